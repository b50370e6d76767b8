"""What split layers send, keep, cast and refuse; and the faults that a right-looking output hides, each by name."""

import copy
import warnings
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode.comm import all_reduce, record
from tpcode.dense import FFN, SwiGLU
from tpcode.layers import ColumnParallelLinear, ParallelFFN, ParallelSwiGLU, RowParallelLinear
from tpcode.runtime import RankError, launch

B, S, H, F = 3, 7, 5, 12
TOKENS = B * S

LAYERS = {
    "column": (lambda: ColumnParallelLinear.from_dense(nn.Linear(H, F)), H),
    "column, gathered": (lambda: ColumnParallelLinear.from_dense(nn.Linear(H, F), gather_output=True), H),
    "row": (lambda: RowParallelLinear.from_dense(nn.Linear(F, H)), F // 2),
    "row, whole input": (lambda: RowParallelLinear.from_dense(nn.Linear(F, H), input_is_parallel=False), F),
    "ffn": (lambda: ParallelFFN.from_dense(FFN(H, F)), H),
    "swiglu": (lambda: ParallelSwiGLU.from_dense(SwiGLU(H, F)), H),
}


# ---- what is sent ---------------------------------------------------------------------------------------------------


def what_is_sent():
    """Each layer's events, and the counts of PyTorch's own counter, forward and backward."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    for name, (make, features) in LAYERS.items():
        layer, x = make(), torch.randn(B, S, features, requires_grad=True)
        with record() as ledger, CommDebugMode() as mode:
            y = layer(x)
            forward = mode.get_total_counts()
            y.square().sum().backward()
        events = [(e.phase, e.op, e.shape, e.payload_bytes, e.wire_bytes) for e in ledger.events]
        witness = {str(op).removeprefix("c10d."): n for op, n in mode.get_comm_counts().items()}
        found[name] = events, (forward, mode.get_total_counts()), witness
    return found


def test_what_each_layer_sends():
    """Exact collectives by phase, their shapes and bytes, and the same count from a witness that is independent of the
    ledger. fp32: 4 bytes an element; on two ranks an all-reduce sends its payload once, a gather half of it."""
    h, whole = 4 * TOKENS * H, 4 * TOKENS * F
    reduce = "all_reduce", (B, S, H), h, h
    gather = "all_gather", (B, S, F), whole, whole // 2
    expected = {
        "column": [("backward", *reduce)],
        "column, gathered": [("forward", *gather), ("backward", *reduce)],
        "row": [("forward", *reduce)],
        "row, whole input": [("forward", *reduce), ("backward", *gather)],
        "ffn": [("forward", *reduce), ("backward", *reduce)],
        "swiglu": [("forward", *reduce), ("backward", *reduce)],
    }
    for found in launch(what_is_sent, 2):
        assert {name: events for name, (events, _, _) in found.items()} == expected
        for name, (events, totals, witness) in found.items():
            forward = sum(event[0] == "forward" for event in events)
            assert totals == (forward, len(events)), name
            names = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather"}
            assert {names[op]: n for op, n in witness.items()} == {
                op: sum(event[1] == op for event in events) for op in {event[1] for event in events}
            }


def ffn_bytes():
    ffn, x = ParallelFFN.from_dense(FFN(H, F)), torch.randn(B, S, H, requires_grad=True)
    with record() as ledger:
        ffn(x).sum().backward()
    return ledger.count("all_reduce"), ledger.payload_bytes(), ledger.wire_bytes()


@pytest.mark.parametrize("t", [1, 2, 4])
def test_an_ffn_sends_two_all_reduces_of_its_activations(t):
    """The payload does not depend on t; on the wire a rank sends 2 (t-1)/t of it; one rank sends nothing."""
    payload = 2 * 4 * TOKENS * H if t > 1 else 0
    assert launch(ffn_bytes, t) == [(2 if t > 1 else 0, payload, Fraction(2 * (t - 1), t) * payload)] * t


def bytes_of_a_step(tokens, width):
    """What the same FFN sends on the same batch: as two copies with half of the tokens each, and as two halves."""
    torch.manual_seed(0)
    dense, x = FFN(H, width), torch.randn(tokens, H)
    with record() as data_parallel:
        copied = copy.deepcopy(dense)
        copied(x.chunk(2)[dist.get_rank()]).sum().backward()
        for weight in copied.parameters():
            weight.grad = all_reduce(weight.grad)
    with record() as tensor_parallel:
        ParallelFFN.from_dense(dense)(x.requires_grad_()).sum().backward()
    return data_parallel.payload_bytes(), tensor_parallel.payload_bytes()


def test_tensor_parallelism_is_not_data_parallelism():
    """Both all-reduce and both end with the same weights, but one sends gradients, the other activations: the first
    grows with the width and not with the tokens, the second with the tokens and not with the width."""
    weights = H * F + F + F * H + H
    more = 2 * H * F + F  # weights, where the width is twice as large
    assert launch(bytes_of_a_step, 2, 8, F)[0] == (4 * weights, 4 * 2 * 8 * H)
    assert launch(bytes_of_a_step, 2, 16, F)[0] == (4 * weights, 4 * 2 * 16 * H)
    assert launch(bytes_of_a_step, 2, 8, 2 * F)[0] == (4 * (weights + more), 4 * 2 * 8 * H)


def order_in_backward():
    """The calls of a column layer's backward, in order."""
    calls = []
    import tpcode.layers.linear as module

    real_launch = module.all_reduce_async

    class Handle:
        def __init__(self, handle):
            self.handle = handle

        def wait(self):
            calls.append("wait")
            self.handle.wait()

    def launched(x, group):
        calls.append("all-reduce launched")
        out, handle = real_launch(x, group)
        return out, Handle(handle)

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                calls.append(f"product {list(args[0].shape)} {list(args[1].shape)}")
            return func(*args, **(kwargs or {}))

    layer = ColumnParallelLinear.from_dense(nn.Linear(H, F))
    y = layer(torch.randn(TOKENS, H, requires_grad=True))
    module.all_reduce_async = launched
    try:
        with Products():
            y.backward(torch.randn(TOKENS, F // 2))
    finally:
        module.all_reduce_async = real_launch
    return calls


def test_the_all_reduce_of_dx_runs_while_dw_is_computed():
    dgrad, wgrad = f"product [{TOKENS}, 6] [6, {H}]", f"product [6, {TOKENS}] [{TOKENS}, {H}]"
    assert launch(order_in_backward, 2) == [[dgrad, "all-reduce launched", wgrad, "wait"]] * 2


def frozen():
    """Collectives, and which gradients there are, with the weights frozen or the input without a gradient."""
    found = {}
    for what in ("all", "input only", "weights only", "nothing", "bias only"):
        dense = FFN(H, F)
        dense.requires_grad_(what in ("all", "weights only"))
        if what == "bias only":
            dense.c_fc.bias.requires_grad_(True)
        ffn = ParallelFFN.from_dense(dense)
        x = torch.randn(B, S, H, requires_grad=what in ("all", "input only"))
        with record() as ledger:
            y = ffn(x)
            if y.requires_grad:
                y.sum().backward()
        grads = [name for name, p in ffn.named_parameters() if p.grad is not None]
        same = [p.requires_grad for p in ffn.to_dense().parameters()] == [p.requires_grad for p in dense.parameters()]
        found[what] = ledger.count(phase="forward"), ledger.count(phase="backward"), x.grad is not None, grads, same
    return found


def test_no_all_reduce_for_a_gradient_that_nobody_wants():
    every = ["c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"]
    expected = {
        "all": (1, 1, True, every, True),
        "input only": (1, 1, True, [], True),
        "weights only": (1, 0, False, every, True),
        "nothing": (1, 0, False, [], True),
        "bias only": (1, 0, False, ["c_fc.bias"], True),
    }
    assert launch(frozen, 2) == [expected] * 2


def saved_for_backward(what):
    """Names of the tensors that a column layer keeps."""
    dense = nn.Linear(H, F)
    dense.requires_grad_(what != "input only")
    layer = ColumnParallelLinear.from_dense(dense)
    x = torch.randn(B, S, H, requires_grad=what != "weights only")
    names = {x.data_ptr(): "x", layer.weight.data_ptr(): "weight"}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(names[t.data_ptr()]) or t, lambda t: t):
        layer(x)
    return kept


@pytest.mark.parametrize(
    ("what", "kept"), [("all", ["x", "weight"]), ("input only", ["weight"]), ("weights only", ["x"])]
)
def test_only_what_backward_needs_is_kept(what, kept):
    assert launch(saved_for_backward, 2, what) == [kept] * 2


# ---- faults that are ruled out, by name -----------------------------------------------------------------------------


def row_bias():
    torch.manual_seed(0)
    dense = nn.Linear(F, H, dtype=torch.float64)
    dense.bias.data = torch.arange(1.0, H + 1, dtype=torch.float64)
    x = torch.randn(B, S, F, dtype=torch.float64)
    split = RowParallelLinear.from_dense(dense, input_is_parallel=False)
    return ((split(x) - nn.functional.linear(x, dense.weight)) / dense.bias).detach()


def test_row_bias_is_added_once():
    """Rules out: a bias added in the local product and then summed t times. Not vacuous: no entry of it is near 0."""
    for times in launch(row_bias, 4):
        torch.testing.assert_close(times, torch.ones(B, S, H, dtype=torch.float64), rtol=0, atol=1e-12)


def gradient_ratios():
    """Split over dense, entry by entry: dX of a column layer, dW of a row layer."""
    torch.manual_seed(0)
    x, dy = torch.randn(B, S, H, dtype=torch.float64), torch.randn(B, S, F, dtype=torch.float64)
    rank, t = dist.get_rank(), dist.get_world_size()
    column, row = nn.Linear(H, F, dtype=torch.float64), nn.Linear(F, H, dtype=torch.float64)
    x_dense, x_split = x.clone().requires_grad_(), x.clone().requires_grad_()
    column(x_dense).backward(dy)
    ColumnParallelLinear.from_dense(column)(x_split).backward(dy.chunk(t, -1)[rank])
    row(dy).backward(x)
    split = RowParallelLinear.from_dense(row, input_is_parallel=False)
    split(dy).backward(x)
    return x_split.grad / x_dense.grad, split.weight.grad / row.weight.grad.chunk(t, 1)[rank]


def test_column_dx_is_summed_over_the_ranks():
    """Rules out: a column layer without copy (f), and a dX from this rank's own part. Not vacuous: the rows of the
    gradient that comes back differ, and no part is near the sum."""
    for ratio, _ in launch(gradient_ratios, 4):
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-12)


def test_row_weight_gradient_is_not_t_times_too_large():
    """Rules out: an all-reduce as the backward of reduce (g); the ratio would be 4."""
    for _, ratio in launch(gradient_ratios, 4):
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-12)


def fused_halves():
    """A SwiGLU that is right, and one with the fused matrix cut in plain halves."""
    torch.manual_seed(0)
    dense, x = SwiGLU(H, F, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
    right, wrong = (ParallelSwiGLU.from_dense(dense) for _ in range(2))
    fused = torch.cat([dense.gate_proj.weight, dense.up_proj.weight]).detach()
    wrong.gate_up.weight.data = fused.chunk(2)[dist.get_rank()]
    return [(split(x) - dense(x)).abs().max().item() for split in (right, wrong)]


def test_fused_gate_up_is_not_cut_in_plain_halves():
    """Rules out: all of the gate on one rank and all of up on the other. Its shapes are right and its values wrong."""
    for right, wrong in launch(fused_halves, 2):
        assert right < 1e-12 and wrong > 0.01


def biases():
    """The shapes of the biases on a rank, and whether they came back whole."""
    dense = FFN(H, F)
    split = ParallelFFN.from_dense(dense)
    back = split.to_dense()
    same = [torch.equal(getattr(back, name).bias, getattr(dense, name).bias) for name in ("c_fc", "c_proj")]
    return list(split.c_fc.bias.shape), list(split.c_proj.bias.shape), same


def seeded(function):
    torch.manual_seed(0)
    return function()


def test_a_column_bias_is_cut_and_a_row_bias_is_not():
    """Rules out: biases cut by the weight's rule."""
    assert launch(seeded, 4, biases) == [([3], [5], [True, True])] * 4


def there_and_back():
    """Shard, merge: bitwise the original, whatever t; the random state is left alone."""
    torch.manual_seed(0)
    found = []
    for dense, split in ((FFN(H, 10), ParallelFFN), (SwiGLU(H, 10, bias=True), ParallelSwiGLU)):
        state = torch.get_rng_state()
        back = split.from_dense(dense, pad=True).to_dense()
        found.append(torch.equal(state, torch.get_rng_state()))
        found.append(str(back) == str(dense))
        found += [torch.equal(back.state_dict()[name], whole) for name, whole in dense.state_dict().items()]
        back.to("cpu").eval()
        found.append(torch.equal(back(torch.ones(H)), dense(torch.ones(H))))
    return found


@pytest.mark.parametrize("t", [1, 2, 4])
def test_shards_go_back_to_the_dense_layer(t):
    assert launch(there_and_back, t) == [[True] * (3 + 4 + 3 + 6)] * t


def one_loss_on_every_rank():
    torch.manual_seed(0)
    dense, x = nn.Linear(H, F, dtype=torch.float64), torch.randn(B, S, H, dtype=torch.float64)
    split = ColumnParallelLinear.from_dense(dense, gather_output=True)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, leaf in zip((dense, split), xs):
        layer(leaf).square().sum().backward()
    own = dense.weight.grad.chunk(dist.get_world_size())[dist.get_rank()]
    return (xs[1].grad - xs[0].grad).abs().max().item(), (split.weight.grad - own).abs().max().item()


def test_a_gathered_output_with_the_loss_on_every_rank():
    """Rules out: gradients t times too large behind a gathered output."""
    for differences in launch(one_loss_on_every_rank, 4):
        assert max(differences) < 1e-12


def odd_gradients():
    """Largest differences in dX and dW with an expanded gradient and a transposed input."""
    torch.manual_seed(0)
    dense = FFN(H, F, dtype=torch.float64)
    split = ParallelFFN.from_dense(copy.deepcopy(dense))
    x = torch.randn(H, S, B, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for layer, leaf in zip((dense, split), leaves):
        layer(leaf.permute(2, 1, 0)).sum().backward()
    rows = dense.c_fc.weight.grad.chunk(dist.get_world_size())[dist.get_rank()]
    return (leaves[1].grad - leaves[0].grad).abs().max().item(), (split.c_fc.weight.grad - rows).abs().max().item()


def test_strides_do_not_matter():
    """Rules out: `.sum().backward()`, whose gradient has stride 0, or a transposed input, sent as if contiguous."""
    for differences in launch(odd_gradients, 2):
        assert max(differences) < 1e-12


# ---- autocast -------------------------------------------------------------------------------------------------------


def autocast(kind):
    """dtypes under autocast beside the dense layer's, and the largest differences relative to the largest entry."""
    torch.manual_seed(0)
    dense = FFN(64, 128) if kind == "ffn" else SwiGLU(64, 128)
    split = (ParallelFFN if kind == "ffn" else ParallelSwiGLU).from_dense(copy.deepcopy(dense))
    x, dy = torch.randn(B, S, 64), torch.randn(B, S, 64)
    results = []
    for layer in (dense, split):
        leaf = x.clone().requires_grad_()
        with record() as ledger, torch.autocast("cpu", torch.bfloat16):
            y = layer(leaf)
        y.backward(dy.to(y.dtype))
        results.append((y, leaf.grad, {event.dtype for event in ledger.events}))
    (y_dense, dx_dense, _), (y, dx, _) = results
    sent = {str(event.dtype) for event in ledger.events}
    dtypes = [str(tensor.dtype) for tensor in (y_dense, y, dx_dense, dx, *(p.grad for p in split.parameters()))]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in ((y, y_dense), (dx, dx_dense))]
    return dtypes, sent, errors


@pytest.mark.parametrize(("kind", "parameters"), [("ffn", 4), ("swiglu", 2)])
def test_autocast_as_for_the_dense_layer(kind, parameters):
    """bfloat16 in the products and on the wire, each gradient in its own tensor's dtype."""
    for dtypes, sent, errors in launch(autocast, 2, kind):
        assert dtypes == ["torch.bfloat16"] * 2 + ["torch.float32"] * (2 + parameters)
        assert sent == {"torch.bfloat16"}
        assert max(errors) < 0.05  # a bfloat16 has 8 bits


def autocast_mixed():
    """Under autocast a bfloat16 input meets float32 weights; float64 stays as it is."""
    layers = [make() for make, _ in (LAYERS["column"], LAYERS["row"])]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = [layer(torch.randn(B, layer.weight.shape[1], dtype=torch.bfloat16)).dtype for layer in layers]
        double = [layer.double()(torch.randn(B, layer.weight.shape[1]).double()).dtype for layer in layers]
    return [str(dtype) for dtype in mixed + double]


def test_autocast_takes_what_linear_takes():
    assert launch(autocast_mixed, 2) == [["torch.bfloat16"] * 2 + ["torch.float64"] * 2] * 2


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusals():
    """What each wrong call raised, on this rank, and how many collectives there were."""
    column = ColumnParallelLinear.from_dense(nn.Linear(H, F))
    row = RowParallelLinear.from_dense(nn.Linear(F, H))
    whole = RowParallelLinear.from_dense(nn.Linear(F, H), input_is_parallel=False)
    half_frozen = SwiGLU(H, F)
    half_frozen.gate_proj.weight.requires_grad_(False)
    calls = [
        lambda: column(torch.randn(B, S, F)),
        lambda: column(torch.tensor(1.0)),
        lambda: column(torch.ones(B, S, H, dtype=torch.long)),
        lambda: column(torch.ones(B, S, H, dtype=torch.float64)),
        lambda: column([1.0] * H),
        lambda: row(torch.randn(B, S, F)),
        lambda: row(torch.ones(B, S, F // 2, dtype=torch.bfloat16)),
        lambda: whole(torch.randn(B, S, F // 2)),
        lambda: ColumnParallelLinear.from_dense(nn.Linear(H, 9)),
        lambda: RowParallelLinear.from_dense(nn.Linear(9, H)),
        lambda: ColumnParallelLinear.from_dense(nn.Bilinear(H, H, F)),
        lambda: ParallelFFN.from_dense(SwiGLU(H, F)),
        lambda: ParallelSwiGLU.from_dense(nn.Linear(H, F)),
        lambda: ParallelSwiGLU.from_dense(SwiGLU(H, 9)),
        lambda: ParallelSwiGLU.from_dense(half_frozen),
        lambda: ParallelFFN.from_dense(FFN(H, 9, activation=torch.sigmoid), pad=True),
        lambda: ColumnParallelLinear.from_dense(nn.Linear(H, 9), pad=True, gather_output=True),
        lambda: ColumnParallelLinear.from_dense(nn.Linear(H, F), segments=(6, 6), gather_output=True),
        lambda: RowParallelLinear.from_dense(nn.Linear(9, H), pad=True, input_is_parallel=False),
        lambda: ColumnParallelLinear.from_dense(nn.Linear(H, F), segments=(6, 5)),
    ]
    raised = []
    with record() as ledger:
        for call in calls:
            try:
                call()
                raised.append("nothing")
            except (TypeError, ValueError) as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised, ledger.count()


def test_bad_input_is_refused_on_every_rank_before_anything_is_sent():
    """Among them: a whole tensor taken for a local shard, and the reverse."""
    expected = [
        "ValueError: ColumnParallelLinear: the last dimension must be 5 and is 12 (shape [3, 7, 12])",
        "ValueError: ColumnParallelLinear: the last dimension must be 5 and does not exist (shape [])",
        "TypeError: ColumnParallelLinear: the input is torch.int64 and the weight torch.float32; "
        "convert one of them with .to()",
        "TypeError: ColumnParallelLinear: the input is torch.float64 and the weight torch.float32; "
        "convert one of them with .to()",
        "TypeError: ColumnParallelLinear: the input must be a tensor and is list",
        "ValueError: RowParallelLinear, this rank's shard: the last dimension must be 6 and is 12 (shape [3, 7, 12]); "
        "input_is_parallel=False takes all 12 features",
        "TypeError: RowParallelLinear, this rank's shard: the input is torch.bfloat16 and the weight torch.float32; "
        "convert one of them with .to()",
        "ValueError: RowParallelLinear: the last dimension must be 12 and is 6 (shape [3, 7, 6]); "
        "input_is_parallel=True takes a shard",
        "ValueError: ColumnParallelLinear's out_features = 9 does not divide by t = 2; t that work: 1, 3, 9; "
        "or pad it with zeros: pad=True",
        "ValueError: RowParallelLinear's in_features = 9 does not divide by t = 2; t that work: 1, 3, 9; "
        "or pad it with zeros: pad=True",
        "TypeError: ColumnParallelLinear.from_dense takes a torch.nn.Linear, and this is Bilinear",
        "TypeError: ParallelFFN.from_dense takes a tpcode.dense.FFN, and this is a SwiGLU",
        "TypeError: ParallelSwiGLU.from_dense takes a tpcode.dense.SwiGLU, and this is a Linear",
        "ValueError: ColumnParallelLinear's out_features = 9 does not divide by t = 2; t that work: 1, 3, 9; "
        "or pad it with zeros: pad=True",
        "ValueError: gate_proj.weight and up_proj.weight become one parameter: freeze both or neither",
        "ValueError: F is padded only where the activation of 0 is 0, and here it is 0.5; choose a t that divides F",
        "ValueError: ColumnParallelLinear: gather_output=True needs shards that lie side by side in the whole, and "
        "these are of the fused or padded segments [9] over t = 2",
        "ValueError: ColumnParallelLinear: gather_output=True needs shards that lie side by side in the whole, and "
        "these are of the fused or padded segments [6, 6] over t = 2",
        "ValueError: RowParallelLinear: input_is_parallel=False needs shards that lie side by side in the whole, and "
        "these are of the fused or padded segments [9] over t = 2",
        "ValueError: a whole over t = 2 must have 11 along dimension 0, and its shape is [12, 5]",
    ]
    for raised, events in launch(refusals, 2):
        assert raised == expected
        assert events == 0


def padded_sigmoid():
    """Where t divides F, nothing is padded and any activation will do."""
    return list(ParallelFFN.from_dense(FFN(H, 10, activation=torch.sigmoid), pad=True)(torch.ones(H)).shape)


def test_padding_that_is_not_needed_is_not_refused():
    assert launch(padded_sigmoid, 2) == [[H]] * 2


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for make, features in LAYERS.values():
            layer = make()
            layer(torch.randn(B, S, features, requires_grad=True)).sum().backward()
            layer.to_dense()
    return [str(warning.message) for warning in caught]


def test_no_warnings():
    assert launch(warned, 2) == [[], []]


def test_layers_print_their_sizes():
    layer = ColumnParallelLinear.from_dense(nn.Linear(H, F))
    assert str(layer) == "ColumnParallelLinear(5, 12, bias=True, shard=[12, 5])"


def one_rank_wrong():
    layer, _ = LAYERS["ffn"]
    layer()(torch.randn(B, S, H + (dist.get_rank() == 1)))


def test_one_ranks_bad_input_is_that_ranks_error():
    with pytest.raises(RankError, match=r"the last dimension must be 5 and is 6") as caught:
        launch(one_rank_wrong, 2)
    assert caught.value.rank == 1
