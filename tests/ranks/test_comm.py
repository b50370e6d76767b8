"""Collectives, their autograd pairs and the ledger, on real ranks.

Values are distinct per element and differ per rank, so that a result from the wrong rank, in the wrong order or summed
once too often is another number. Every rank can make every rank's tensor, which is where the expected values come from.
"""

import threading
import warnings
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tpcode import comm
from tpcode.runtime import launch

SIZES = (1, 2, 4)


def of_rank(rank, *shape, dtype=torch.float64):
    """What rank holds: small distinct integers, so that sums are exact in every dtype."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    return (numbers + 3 * rank).to(dtype)


def everyone(t, *shape, **kwargs):
    return [of_rank(rank, *shape, **kwargs) for rank in range(t)]


# ---- collectives ----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


def every_collective(dtype, layout):
    """(name, result as expected, input unchanged) of each collective along each dimension."""
    t, rank = comm.group_size(), comm.group_rank()
    found = []
    wholes = [LAYOUTS[layout](x) for x in everyone(t, 4, 8, 4, dtype=dtype)]
    mine, before = wholes[rank], wholes[rank].clone()
    total = torch.stack(wholes).sum(0).to(dtype)
    calls = {
        "sum": (lambda: comm.all_reduce(mine), total),
        "max": (lambda: comm.all_reduce(mine, "max"), wholes[-1]),
        "min": (lambda: comm.all_reduce(mine, "min"), wholes[0]),
        "async": (lambda: waited(*comm.all_reduce_async(mine)), total),
        "broadcast": (lambda: comm.broadcast(mine, t - 1), wholes[-1]),
    }
    if dtype.is_floating_point:
        calls["avg"] = (lambda: comm.all_reduce(mine, "avg"), total / t)
    for dim in (0, 1, 2, -1, -2, -3):
        calls[f"gather {dim}"] = (lambda dim=dim: comm.all_gather(mine, dim), torch.cat(wholes, dim))
        own = total.chunk(t, dim)[rank]
        calls[f"reduce-scatter {dim}"] = (lambda dim=dim: comm.reduce_scatter(mine, dim), own)
    for dim in (0, 1):
        calls[f"gather {dim}, async"] = (
            lambda dim=dim: waited(*comm.all_gather_async(mine, dim)),
            torch.cat(wholes, dim),
        )
        own = total.chunk(t, dim)[rank]
        calls[f"reduce-scatter {dim}, async"] = (lambda dim=dim: waited(*comm.reduce_scatter_async(mine, dim)), own)
    for name, (call, expected) in calls.items():
        out = call()
        aliased = t > 1 and out.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
        found.append(
            (name, out.dtype == dtype and torch.equal(out, expected), torch.equal(mine, before) and not aliased)
        )
    return found


def waited(out, handle):
    handle.wait()
    return out


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_along_every_dimension(t, layout):
    """Rules out: strides ignored, a gather along the wrong dimension, an in-place call's None passed on, an input
    overwritten. Not vacuous: at t > 1 no rank holds the expected value before the call."""
    for found in launch(every_collective, t, torch.float64, layout):
        assert len(found) == 22
        assert [name for name, right, untouched in found if not (right and untouched)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_every_dtype(dtype):
    for found in launch(every_collective, 2, dtype, "transposed"):
        assert [name for name, right, untouched in found if not (right and untouched)] == []


def gathered_square():
    x = torch.tensor([[0, 1], [2, 3]]) + 10 * comm.group_rank()
    return comm.all_gather(x, -1).tolist()


def test_gather_along_the_last_dimension_is_not_one_along_the_first():
    """Rules out: a gather along dimension 0 taken for one along the last."""
    assert launch(gathered_square, 2) == [[[0, 1, 10, 11], [2, 3, 12, 13]]] * 2


def empty_and_scalar():
    empty, t = torch.zeros(0, 4), comm.group_size()
    shapes = [
        comm.all_reduce(empty),
        comm.all_gather(empty, 0),
        comm.all_gather(empty, 1),
        comm.reduce_scatter(empty, 1),
    ]
    shapes += [comm.reduce_scatter(empty, 0), comm.reduce_scatter(empty.T, 1), comm.broadcast(empty, t - 1)]
    return [tuple(x.shape) for x in shapes], comm.all_reduce(torch.tensor(1.5)).item()


def test_nothing_to_send():
    shapes = [(0, 4), (0, 4), (0, 8), (0, 2), (0, 4), (4, 0), (0, 4)]
    assert launch(empty_and_scalar, 2) == [(shapes, 3.0)] * 2


def inside_subgroups(pairs):
    """Every rank makes every group, in one order, and uses its own."""
    groups = [dist.new_group(pair) for pair in pairs]
    world_rank = dist.get_rank()
    mine = next(number for number, pair in enumerate(pairs) if world_rank in pair)
    group, stranger = groups[mine], groups[1 - mine]
    x = of_rank(world_rank, 2, 2)
    with comm.record() as ledger:
        results = {
            "place": (comm.group_rank(group), comm.group_size(group)),
            "broadcast": comm.broadcast(x, 1, group).tolist(),
            "sum": comm.all_reduce(x, group=group).tolist(),
            "gather": comm.all_gather(x, -1, group).tolist(),
            "scatter": comm.reduce_scatter(x, 0, group).tolist(),
        }
    for call in (comm.group_rank, comm.group_size, lambda g: comm.all_reduce(x, group=g)):
        with pytest.raises(ValueError, match=f"rank {world_rank} is not in this group"):
            call(stranger)
    with pytest.raises(ValueError, match="src = 3 counts within the group, whose ranks are 0 to 1"):
        comm.broadcast(x, 3, group)
    return results, {event.group for event in ledger.events}


@pytest.mark.parametrize("pairs", [[(0, 1), (2, 3)], [(0, 2), (1, 3)]], ids=str)
def test_subgroups(pairs):
    """Rules out: a rank of the world taken for one of the group; a group made by its members only. Not vacuous: in
    {2, 3} source 1 is world rank 3, and the ranks of the other group hold other numbers."""
    answers = launch(inside_subgroups, 4, pairs)
    for pair in pairs:
        first, second = (of_rank(rank, 2, 2) for rank in pair)
        for place, rank in enumerate(pair):
            results, groups = answers[rank]
            assert results["place"] == (place, 2)
            assert results["broadcast"] == second.tolist()
            assert results["sum"] == (first + second).tolist()
            assert results["gather"] == torch.cat([first, second], 1).tolist()
            assert results["scatter"] == (first + second)[place : place + 1].tolist()
            assert groups == {pair}


def refusals():
    """Each wrong call with what it raised; every rank makes them all, and nobody waits for anybody."""
    x = torch.zeros(3, 4)
    calls = [
        lambda: comm.all_gather(x, 2),
        lambda: comm.all_gather(x, -3),
        lambda: comm.all_gather(x, 1.0),
        lambda: comm.all_gather(torch.zeros(()), 0),
        lambda: comm.reduce_scatter(x, 0),
        lambda: comm.reduce_scatter(x, -2),
        lambda: comm.all_reduce(x, "mean"),
        lambda: comm.all_reduce(x.long(), "avg"),
        lambda: comm.all_reduce([1.0]),
        lambda: comm.all_reduce_async(None),
        lambda: comm.all_gather_async(x, 2),
        lambda: comm.reduce_scatter_async(x, 0),
        lambda: comm.broadcast(x, 2),
        lambda: comm.broadcast(x, -1),
        lambda: comm.broadcast(3, 0),
        lambda: comm.all_reduce(x, group=[0, 1]),
        lambda: comm.copy_to_tp(1.0),
        lambda: comm.scatter_to_tp(torch.zeros(3, 3)),
        lambda: comm.scatter_to_tp(torch.zeros(())),
        lambda: comm.scatter_sequence(torch.zeros(2, 7, 4)),
        lambda: comm.reduce_scatter_sequence(torch.zeros(2, 7, 4)),
        lambda: comm.gather_sequence(torch.zeros(7)),
    ]
    raised = []
    with comm.record() as ledger:
        for call in calls:
            try:
                call()
                raised.append("nothing")
            except (TypeError, ValueError) as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised, ledger.count()


def test_bad_calls_are_refused_before_anything_is_sent():
    expected = [
        "ValueError: all_gather: dimension 2 of the shape [3, 4] does not exist",
        "ValueError: all_gather: dimension -3 of the shape [3, 4] does not exist",
        "TypeError: all_gather: dim must be an integer and is 1.0",
        "ValueError: all_gather: dimension 0 of the shape [] does not exist",
        "ValueError: reduce_scatter: dimension 0 of the shape [3, 4] = 3 does not divide by t = 2; t that work: 1, 3",
        "ValueError: reduce_scatter: dimension 0 of the shape [3, 4] = 3 does not divide by t = 2; t that work: 1, 3",
        "ValueError: all_reduce: op must be one of sum, avg, max, min and is 'mean'",
        "TypeError: all_reduce: the average of torch.int64 is no torch.int64; convert x to floating point, or sum",
        "TypeError: all_reduce: x must be a tensor and is list",
        "TypeError: all_reduce: x must be a tensor and is NoneType",
        "ValueError: all_gather: dimension 2 of the shape [3, 4] does not exist",
        "ValueError: reduce_scatter: dimension 0 of the shape [3, 4] = 3 does not divide by t = 2; t that work: 1, 3",
        "ValueError: broadcast: src = 2 counts within the group, whose ranks are 0 to 1",
        "ValueError: broadcast: src must be at least 0 and is -1",
        "TypeError: broadcast: x must be a tensor and is int",
        "TypeError: group must be a process group, or None for all ranks, and is [0, 1]",
        "TypeError: copy_to_tp: x must be a tensor and is float",
        "ValueError: dimension 1 of the shape [3, 3] = 3 does not divide by t = 2; t that work: 1, 3",
        "ValueError: scatter_to_tp: dimension -1 of the shape [] does not exist",
        "ValueError: dimension 1 of the shape [2, 7, 4] = 7 does not divide by t = 2; t that work: 1, 7",
        "ValueError: reduce_scatter: dimension 1 of the shape [2, 7, 4] = 7 does not divide by t = 2; "
        "t that work: 1, 7",
        "ValueError: gather_sequence: the sequence is dimension 1 of [b, s, ...], and the shape is [7]",
    ]
    for raised, events in launch(refusals, 2):
        assert raised == expected
        assert events == 0


def warnings_of_every_collective():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        every_collective(torch.float64, "transposed")
    return [str(warning.message) for warning in caught]


def test_no_warnings():
    assert launch(warnings_of_every_collective, 2) == [[], []]


# ---- conjugates -----------------------------------------------------------------------------------------------------

SHAPE = (2, 8, 4)  # [b, s, h]


def cut(x, dim, t, rank):
    return x.chunk(t, dim)[rank]


# Each: shape of the input, then the expected output and the expected gradient on a rank, from every rank's input `x`
# and every rank's gradient of the output `dy`. "same" pairs have the same input (and gradient) on every rank.
PAIRS = {
    "copy_to_tp": (lambda x, r, t: x[0], lambda dy, r, t: sum(dy)),
    "reduce_from_tp": (lambda x, r, t: sum(x), lambda dy, r, t: dy[0]),
    "gather_from_tp": (lambda x, r, t: torch.cat(x, -1), lambda dy, r, t: cut(dy[0], -1, t, r)),
    "scatter_to_tp": (lambda x, r, t: cut(x[0], -1, t, r), lambda dy, r, t: torch.cat(dy, -1)),
    "gather_sequence": (lambda x, r, t: torch.cat(x, 1), lambda dy, r, t: cut(sum(dy), 1, t, r)),
    "gather_sequence, replicated": (lambda x, r, t: torch.cat(x, 1), lambda dy, r, t: cut(dy[0], 1, t, r)),
    "reduce_scatter_sequence": (lambda x, r, t: cut(sum(x), 1, t, r), lambda dy, r, t: torch.cat(dy, 1)),
    "scatter_sequence": (lambda x, r, t: cut(x[0], 1, t, r), lambda dy, r, t: torch.cat(dy, 1)),
}
SAME_INPUT = {"copy_to_tp", "scatter_to_tp", "scatter_sequence"}
SAME_GRADIENT = {"reduce_from_tp", "gather_from_tp", "gather_sequence, replicated"}


def function_of(name):
    if name.endswith(", replicated"):
        return lambda x, group: comm.gather_sequence(x, group, replicated_consumer=True)
    return lambda x, group: getattr(comm, name)(x, group)


def pair(name, members=None):
    """Whether output and gradient are as expected, with each rank's own gradient and with an expanded one."""
    group = None
    if members:
        group = [dist.new_group(ranks) for ranks in members][dist.get_rank() % 2]
    t, rank = comm.group_size(group), comm.group_rank(group)
    forward, backward = PAIRS[name]
    base = 100 * (dist.get_rank() % 2) if members else 0  # the other group has other numbers
    inputs = [of_rank(0 if name in SAME_INPUT else r, *SHAPE) + base for r in range(t)]
    layouts = {"contiguous": lambda x: x.clone(), "transposed": LAYOUTS["transposed"]}
    right = []
    for layout in layouts.values():
        x = layout(inputs[rank]).requires_grad_()
        y = function_of(name)(x, group)
        right.append(torch.equal(y, forward(inputs, rank, t)))
        grads = [of_rank(0 if name in SAME_GRADIENT else 7 * r, *y.shape) + base for r in range(t)]
        (dx,) = torch.autograd.grad(y, x, layout(grads[rank]), retain_graph=True)
        right.append(torch.equal(dx, backward(grads, rank, t)))
        ones = [torch.ones_like(y) for _ in range(t)]
        (dx,) = torch.autograd.grad(y.sum(), x)
        right.append(torch.equal(dx, backward(ones, rank, t)))
    return right


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, t):
    """Rules out: an all-reduce as the backward of an all-reduce, a copy without one, gradients t times too large,
    the rank's own rows only, an expanded gradient (`.sum().backward()`) read as if it were contiguous."""
    assert launch(pair, t, name) == [[True] * 6] * t


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_in_subgroups(name):
    assert launch(pair, 4, name, members=[(0, 2), (1, 3)]) == [[True] * 6] * 4


def what_each_pair_sends():
    sent = {}
    for name in PAIRS:
        x = torch.zeros(SHAPE, requires_grad=True)
        with comm.record() as ledger:
            function_of(name)(x, None).sum().backward()
        sent[name] = [(event.phase, event.op) for event in ledger.events]
    return sent


def test_each_pair_sends_what_it_says():
    expected = {
        "copy_to_tp": [("backward", "all_reduce")],
        "reduce_from_tp": [("forward", "all_reduce")],
        "gather_from_tp": [("forward", "all_gather")],
        "scatter_to_tp": [("backward", "all_gather")],
        "gather_sequence": [("forward", "all_gather"), ("backward", "reduce_scatter")],
        "gather_sequence, replicated": [("forward", "all_gather")],
        "reduce_scatter_sequence": [("forward", "reduce_scatter"), ("backward", "all_gather")],
        "scatter_sequence": [("backward", "all_gather")],
    }
    assert launch(what_each_pair_sends, 2) == [expected] * 2
    assert launch(what_each_pair_sends, 1) == [{name: [] for name in PAIRS}]


def second_derivative():
    x = torch.ones(2, requires_grad=True)
    (dx,) = torch.autograd.grad(comm.copy_to_tp(x).square().sum(), x, create_graph=True)
    dx.sum().backward()


def test_a_second_derivative_is_refused_rather_than_wrong():
    with pytest.raises(Exception, match="once_differentiable"):
        launch(second_derivative, 2)


def lost_gradients():
    x = torch.ones(2, 2, requires_grad=True)
    refused = []
    for call in (
        lambda y: comm.all_reduce(y),
        lambda y: comm.all_reduce_async(y),
        lambda y: comm.all_gather(y, 0),
        lambda y: comm.reduce_scatter(y, 0),
        lambda y: comm.broadcast(y, 0),
    ):
        with pytest.raises(ValueError, match="no gradient flows through it, and x requires one.*x.detach()"):
            call(2 * x)
        with torch.no_grad():
            refused.append(call(2 * x) is not None)
        call(x.detach())
    return refused


@pytest.mark.parametrize("t", [1, 2])
def test_a_gradient_is_refused_rather_than_lost(t):
    """Not vacuous: without gradients the same calls go through."""
    assert launch(lost_gradients, t) == [[True] * 5] * t


def consumers_of_a_gathered_sequence(replicated):
    """The gradient of Σ y² when every rank computes all of it, divided by the dense one."""
    x = of_rank(comm.group_rank(), *SHAPE).requires_grad_()
    comm.gather_sequence(x, replicated_consumer=replicated).square().sum().backward()
    return (x.grad / (2 * x)).detach().unique().tolist()


def test_one_loss_on_every_rank_is_not_t_losses():
    """Rules out: gradients t times too large behind a gathered output. The wrong choice shows the t."""
    assert launch(consumers_of_a_gathered_sequence, 4, True) == [[1.0]] * 4
    assert launch(consumers_of_a_gathered_sequence, 4, False) == [[4.0]] * 4


# ---- ledger ---------------------------------------------------------------------------------------------------------


def body(x):
    y = comm.reduce_from_tp(x * x)
    return comm.copy_to_tp(y).sin()


def phases():
    found = {}
    for name, run in {
        "plain": body,
        "reentrant": lambda x: checkpoint(body, x, use_reentrant=True),
        "not reentrant": lambda x: checkpoint(body, x, use_reentrant=False),
    }.items():
        x = torch.ones(3, requires_grad=True)
        with comm.record() as ledger:
            run(x).sum().backward()
        found[name] = [event.phase for event in ledger.events]
    with comm.record() as ledger:
        checkpoint(lambda x: comm.all_reduce(x.detach()), torch.ones(3, requires_grad=True), use_reentrant=False)
    found["outside of autograd"] = [event.phase for event in ledger.events]
    return found


def test_phases():
    """A recomputed forward is told from a backward, inside and outside of an autograd function. Not vacuous: the same
    body runs each way, and the backward's all-reduce is there in each."""
    plain, again = ["forward", "backward"], ["forward", "recompute", "backward"]
    expected = {"plain": plain, "reentrant": again, "not reentrant": again, "outside of autograd": ["forward"]}
    assert launch(phases, 2) == [expected] * 2


def bytes_by_hand():
    t = comm.group_size()
    x = torch.zeros(4, 2, dtype=torch.float32)
    with comm.record() as ledger:
        comm.all_reduce(x)
        comm.all_gather(x, 1)
        comm.reduce_scatter(x, 0)
        comm.broadcast(x.bfloat16(), 0)
    return t, [(event.payload_bytes, event.wire_bytes) for event in ledger.events], ledger.wire_bytes()


@pytest.mark.parametrize("t", (2, 4))
def test_bytes_follow_the_ring(t):
    """32 bytes a tensor of 4 x 2 floats, t times that where it is gathered, half in bfloat16."""
    reduce, half = Fraction(2 * (t - 1), t) * 32, Fraction(t - 1, t)
    events = [(32, reduce), (32 * t, half * 32 * t), (32, half * 32), (16, 16)]
    total = sum(wire for _, wire in events)
    assert launch(bytes_by_hand, t) == [(t, events, total)] * t


def one_rank():
    x = torch.zeros(4, 2)
    with comm.record() as ledger:
        out, handle = comm.all_reduce_async(x)
        handle.wait()
        same = [out, comm.all_reduce(x), comm.all_gather(x, 1), comm.reduce_scatter(x, 0), comm.broadcast(x, 0)]
    return all(y is x for y in same), ledger.count()


def test_one_rank_says_nothing():
    assert launch(one_rank, 1) == [(True, 0)]


def threads_and_nesting():
    with comm.record() as outer:
        comm.all_reduce(torch.zeros(2))
        with comm.record() as inner:
            thread = threading.Thread(target=comm.all_reduce, args=(torch.zeros(2),))
            thread.start()
            thread.join()
        comm.all_reduce(torch.zeros(2))
    comm.all_reduce(torch.zeros(2))
    return outer.count(), inner.count()


def test_ledgers_nest_and_see_every_thread():
    assert launch(threads_and_nesting, 2) == [(3, 1)] * 2


def witnessed():
    """The ledger's counts and those of PyTorch's own counter, forward and backward apart."""
    from torch.distributed.tensor.debug import CommDebugMode

    names = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "broadcast_": "broadcast",
    }

    def theirs(mode):
        return {names[str(op).removeprefix("c10d.")]: n for op, n in mode.get_comm_counts().items()}

    def ours(ledger):
        return {op: ledger.count(op) for op in names.values() if ledger.count(op)}

    x = torch.zeros(SHAPE, requires_grad=True)
    with CommDebugMode() as mode, comm.record() as ledger:
        losses = [function_of(name)(x, None).sum() for name in PAIRS]
        every_collective(torch.float64, "contiguous")
    forward = theirs(mode), ours(ledger)
    with CommDebugMode() as mode, comm.record() as ledger:
        sum(losses).backward()
    return forward, (theirs(mode), ours(ledger))


def test_the_ledger_agrees_with_pytorchs_own_counter():
    """`CommDebugMode` counts what reaches c10d and knows nothing of the ledger."""
    for forward, backward in launch(witnessed, 2):
        for theirs, ours in (forward, backward):
            assert theirs == ours
        assert forward[1] == {"all_reduce": 6, "all_gather": 11, "reduce_scatter": 9, "broadcast": 1}
        assert backward[1] == {"all_reduce": 1, "all_gather": 3, "reduce_scatter": 1}
