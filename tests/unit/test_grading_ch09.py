"""Exercises 9.1 to 9.4: right answers in several styles pass, each wrong one hears what is wrong with it."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checking import passes, refused
from torch.nn.functional import pad

from tpcode.comm import all_gather, all_reduce, group_rank, group_size
from tpcode.dense import keyed_generator
from tpcode.grading import ch09

# ---- 9.1 ------------------------------------------------------------------------------------------------------------


def drawn_and_chunked(name, shape, dim, seed, r, t):
    generator = keyed_generator(f"{seed}/{name}")
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).chunk(t, dim)[r]


def normal_and_narrowed(name, shape, dim, seed, r, t):
    generator = keyed_generator(f"{seed}/{name}")
    whole = torch.empty(shape, dtype=torch.float64).normal_(0, 1 / math.sqrt(shape[1]), generator=generator)
    size = shape[dim] // t
    return whole.narrow(dim, r * size, size)


def uniform_and_sliced(name, shape, dim, seed, r, t):
    whole = (torch.rand(shape, generator=keyed_generator(f"{name} {seed}")) - 0.5) * math.sqrt(12 / shape[1])
    size = shape[dim] // t
    part = slice(r * size, (r + 1) * size)
    return whole[part] if dim == 0 else whole[:, part]


@pytest.mark.parametrize("first_shard", [drawn_and_chunked, normal_and_narrowed, uniform_and_sliced])
def test_first_weights_pass(first_shard, capsys):
    passes(capsys, "9.1", first_shard)


def own_shape(shape, dim, t):
    shape = list(shape)
    shape[dim] //= t
    return shape


def shard_drawn(name, shape, dim, seed, r, t):
    return torch.randn(own_shape(shape, dim, t), generator=keyed_generator(f"{seed}/{name}")) / shape[1] ** 0.5


def seed_of_the_rank(name, shape, dim, seed, r, t):
    return torch.randn(own_shape(shape, dim, t), generator=keyed_generator(f"{seed + r}/{name}")) / shape[1] ** 0.5


def seed_of_the_rank_sliced(name, shape, dim, seed, r, t):
    return drawn_and_chunked(name, shape, dim, seed + r, r, t)


def fan_in_of_the_shard(name, shape, dim, seed, r, t):
    whole = torch.randn(shape, generator=keyed_generator(f"{seed}/{name}"))
    shard = whole.chunk(t, dim)[r]
    return shard / shard.shape[1] ** 0.5


def fan_out(name, shape, dim, seed, r, t):
    return drawn_and_chunked(name, shape, dim, seed, r, t) * (shape[1] / shape[0]) ** 0.5


def unscaled(name, shape, dim, seed, r, t):
    return drawn_and_chunked(name, shape, dim, seed, r, t) * shape[1] ** 0.5


def variance_for_deviation(name, shape, dim, seed, r, t):
    return drawn_and_chunked(name, shape, dim, seed, r, t) / shape[1] ** 0.5


def default_generator(name, shape, dim, seed, r, t):
    return (torch.randn(shape) / shape[1] ** 0.5).chunk(t, dim)[r]


def by_hash(name, shape, dim, seed, r, t):
    generator = torch.Generator().manual_seed(hash((seed, name)) % 2**32)
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).chunk(t, dim)[r]


def by_seed_alone(name, shape, dim, seed, r, t):
    return drawn_and_chunked("", shape, dim, seed, r, t)


def by_name_alone(name, shape, dim, seed, r, t):
    return drawn_and_chunked(name, shape, dim, 0, r, t)


def every_other_row(name, shape, dim, seed, r, t):
    whole = drawn_and_chunked(name, shape, dim, seed, 0, 1)
    return whole[r::t] if dim == 0 else whole[:, r::t]


def backwards(name, shape, dim, seed, r, t):
    return drawn_and_chunked(name, shape, dim, seed, t - 1 - r, t)


@pytest.mark.parametrize(
    "first_shard, said",
    [
        (shard_drawn, ch09.SAME_SHARD.format(pair="0 and 1", t=2, name="up")),
        (seed_of_the_rank, ch09.OTHER_MODEL.format(t=2, name="up")),
        (seed_of_the_rank_sliced, ch09.OTHER_MODEL.format(t=2, name="up")),
        (fan_in_of_the_shard, ch09.FAN_IN.format(t=2, name="down", inputs=24, all_inputs=48)),
        (fan_out, ch09.FAN_OUT.format(name="up")),
        (unscaled, "the standard deviation of up is 1.01"),
        (variance_for_deviation, "and 1/√inputs is 0.177"),
        (default_generator, "called twice, with other random numbers drawn in between"),
        (by_hash, ch09.HASH),
        (by_seed_alone, ch09.NO_NAME),
        (by_name_alone, ch09.NO_SEED),
        (every_other_row, ch09.OTHER_RANKS.format(t=2, name="up")),
        (backwards, ch09.OTHER_RANKS.format(t=2, name="up")),
        (lambda *a: drawn_and_chunked(*a[:4], 0, 1), 'first_shard("up", (48, 32), 0, 7, 0, 2) is the whole weight'),
        (lambda name, shape, dim, *a: drawn_and_chunked(name, shape, 1 - dim, *a), "cut along the other dimension"),
        (lambda *a: drawn_and_chunked(*a)[:1], "has shape [1, 32], not [48, 32]"),
        (lambda *a: drawn_and_chunked(*a).tolist(), "it should return a tensor"),
        (lambda *a: None, "Is there a return?"),
    ],
)
def test_wrong_first_weights_hear_why(first_shard, said):
    refused(said, "9.1", first_shard)


# ---- 9.2 ------------------------------------------------------------------------------------------------------------


def squares_of(grads, placements, replicated=True, replicas=True, padding=True):
    """This rank's; what is False is counted wrongly."""
    rank, t = group_rank(), group_size()
    found = {}
    for name, grad in grads.items():
        p = placements[name]
        if p.dim is None:
            found[name] = grad.square().sum() * float(rank == 0 or not replicated)
            continue
        keep = p.counted(rank, t)
        if name == "kv" and not replicas or name == "table" and not padding:
            keep = torch.ones_like(keep)
        found[name] = grad.index_select(p.dim, keep.nonzero().flatten()).square().sum()
    return found


def counted(grads, placements):
    return all_reduce(sum(squares_of(grads, placements).values())).sqrt()


def in_shares(grads, placements):
    """What several ranks have, each counts a share of; padding is told by its row's number."""
    rank, t = group_rank(), group_size()
    total = 0.0
    for name, grad in grads.items():
        p = placements[name]
        if p.dim is None:
            total += grad.square().sum().item() / t
        else:
            size = grad.shape[p.dim]
            true = max(0, min(size, p.true_size - rank * size)) if p.pad else size
            total += grad.narrow(p.dim, 0, true).square().sum().item() / p.replicas
    return math.sqrt(all_reduce(torch.tensor(total, dtype=torch.float64)).item())


def with_torchs_own(grads, placements):
    squares = torch.stack(list(squares_of(grads, placements).values()))
    dist.all_reduce(squares)
    return squares.sum().sqrt().reshape(1)


def gathered(grads, placements):
    own = sum(squares_of(grads, placements).values()).reshape(1)
    return all_gather(own, 0).sum().item() ** 0.5


@pytest.mark.parametrize("grad_norm", [counted, in_shares, with_torchs_own, gathered])
def test_norms_pass(grad_norm, capsys):
    passes(capsys, "9.2", grad_norm)


def counting(**wrong):
    return lambda grads, placements: all_reduce(sum(squares_of(grads, placements, **wrong).values())).sqrt()


def all_squares(grads, placements):
    return all_reduce(sum(grad.square().sum() for grad in grads.values())).sqrt()


def own_only(grads, placements):
    return sum(squares_of(grads, placements).values()).sqrt()


def roots_added(grads, placements):
    return all_reduce(own_only(grads, placements))


def rank_0_alone(grads, placements):
    own = sum(grad.square().sum() for grad in grads.values())
    return all_reduce(own * float(group_rank() == 0)).sqrt()


def one_call_each(grads, placements):
    return sum(all_reduce(squares) for squares in squares_of(grads, placements).values()).sqrt()


def other_bits(grads, placements):
    return counted(grads, placements).item() + 1e-14 * group_rank()


REPLICATED, REPLICAS, PADDING = (ch09.COUNTED[kind].format(t=4, copies=2) for kind in ch09.COUNTED)


@pytest.mark.parametrize(
    "grad_norm, said",
    [
        (counting(replicated=False), REPLICATED),
        (counting(replicas=False), REPLICAS),
        (counting(padding=False), PADDING),
        (counting(replicas=False, padding=False), f"{REPLICAS}\n{PADDING}"),
        (all_squares, f"{REPLICATED}\n{REPLICAS}\n{PADDING}"),
        (own_only, ch09.OWN_ONLY.format(rank=0)),
        (rank_0_alone, ch09.RANK_0_ALONE),
        (roots_added, ch09.ROOTS_ADDED),
        (lambda g, p: sum(grad.square().sum().sqrt() for grad in g.values()), ch09.NORMS_ADDED),
        (lambda g, p: counted(g, p) ** 2, ch09.NO_ROOT),
        (lambda g, p: counted(g, p) / group_size() ** 0.5, ch09.MEAN),
        (lambda g, p: counted({n: x for n, x in g.items() if n != "gamma"}, p), ch09.NO_REPLICATED),
        (other_bits, ch09.OTHER_BITS),
        (one_call_each, ch09.ONE_CALL),
        (lambda g, p: torch.ones(3), "grad_norm returned a tensor of shape [3]"),
        (lambda g, p: "13", "grad_norm returned '13'; it should return one number"),
        (lambda g, p: None, "Is there a return?"),
    ],
)
def test_wrong_norms_hear_why(grad_norm, said):
    refused(said, "9.2", grad_norm)


def test_each_wrong_norm_is_another():
    """Of one rank, of two and of four: no two ways to count give the same number."""
    for t in (2, 4):
        want, _ = ch09._norm_reference(t)
        naive = sum(grad.square().sum() for r in range(t) for grad in ch09._gradients(r, t).values()).sqrt()
        assert naive > want + 0.1


# ---- 9.3 ------------------------------------------------------------------------------------------------------------

RIGHT = {"A": "c", "B": "a", "C": "d", "D": "b"}


@pytest.mark.parametrize("down", [4, 4.0, np.int64(4)])
def test_the_right_faults_pass(down, capsys):
    passes(capsys, "9.3", RIGHT, down)


@pytest.mark.parametrize("typed, true", list(ch09.NOT_THAT))
def test_another_fault_hears_what_speaks_against_it(typed, true):
    run = next(run for run, fault in RIGHT.items() if fault == true)
    said = refused(ch09.NOT_THAT[typed, true].format(run=run), "9.3", RIGHT | {run: typed}, 4)
    assert f"run {run} has another fault than {typed}, {ch09.FAULTS[typed]}." in said


def test_every_wrong_pair_has_its_text():
    assert set(ch09.NOT_THAT) == {(typed, true) for typed in "abcd" for true in "abcd" if typed != true}


@pytest.mark.parametrize(
    "fault_of, down, said",
    [
        (RIGHT | {"B": "e"}, 4, """fault_of["B"] is 'e'; it should be one of 'a', 'b', 'c', 'd'"""),
        ({"A": "c"}, 4, """fault_of["B"] is None"""),
        (RIGHT, 0, ch09.DOWN),
        (RIGHT, 3, "going_down is not 3"),
        (RIGHT | {"A": None}, 4, "replace None in fault_of"),
    ],
)
def test_other_answers_hear_why(fault_of, down, said):
    refused(said, "9.3", fault_of, down)


@pytest.fixture(scope="module")
def runs():
    return ch09.wrong_runs()


def test_the_runs_show_what_the_texts_say(runs, capsys):
    """Each fault has its signs, no two the same; every loss goes down; the right run is right in all of them."""
    assert all(of_run["losses"][-1] < of_run["losses"][0] - 1 for of_run in runs.values())
    signs = {
        run: (of_run["first loss"], of_run["wrong gradients"], of_run["norm"], of_run["alike"])
        for run, of_run in runs.items()
    }
    assert signs == {
        "right": (True, 0, True, True),
        "A": (False, 12, False, True),
        "B": (True, 11, False, False),
        "C": (True, 0, False, True),
        "D": (True, 2, False, False),
    }
    ch09.show_runs(runs)
    printed = capsys.readouterr().out
    assert "right        right   0 of 12" in printed and "D            right   2 of 12         OTHER   NO" in printed


# ---- 9.4 ------------------------------------------------------------------------------------------------------------


def padded_and_split(shards, V, t_to):
    width = math.ceil(V / t_to)
    return list(pad(torch.cat(shards)[:V], (0, 0, 0, t_to * width - V)).split(width))


def row_by_row(shards, V, t_to):
    old, new = len(shards[0]), -(-V // t_to)
    found = [torch.zeros(new, shards[0].shape[1], dtype=shards[0].dtype) for _ in range(t_to)]
    for id in range(V):
        found[id // new][id % new] = shards[id // old][id % old]
    return found


def into_zeros(shards, V, t_to):
    width = (V + t_to - 1) // t_to
    whole = torch.zeros(t_to * width, shards[0].shape[1], dtype=shards[0].dtype)
    whole[:V] = torch.cat(list(shards))[:V]
    return whole.chunk(t_to)


@pytest.mark.parametrize("reshard", [padded_and_split, row_by_row, into_zeros])
def test_resharding_passes(reshard, capsys):
    passes(capsys, "9.4", reshard)


def padding_kept(shards, V, t_to):
    whole = torch.cat(shards)
    width = -(-len(whole) // t_to)
    return list(pad(whole, (0, 0, 0, t_to * width - len(whole))).split(width))


def unequal(shards, V, t_to):
    return list(torch.cat(shards)[:V].tensor_split(t_to))


def rounded_down(shards, V, t_to):
    width = V // t_to
    return [torch.cat(shards)[r * width : (r + 1) * width] for r in range(t_to)]


def rubbish_kept(shards, V, t_to):
    width = -(-V // t_to)
    whole = torch.cat(shards)[: t_to * width]
    return list(pad(whole, (0, 0, 0, t_to * width - len(whole))).split(width))


def padded_on_each_rank(shards, V, t_to):
    width = -(-V // t_to)
    return [pad(part, (0, 0, 0, width - len(part))) for part in unequal(shards, V, t_to)]


def clears_the_shards(shards, V, t_to):
    found = padded_and_split([shard.clone() for shard in shards], V, t_to)
    shards[-1].zero_()
    return found


def too_many_rows(shards, V, t_to):
    return [pad(part, (0, 0, 0, 1)) for part in padded_and_split(shards, V, t_to)]


@pytest.mark.parametrize(
    "reshard, said",
    [
        (padding_kept, "the ranks get [6, 6] rows. That is the shards' 12 rows cut in 2, their padding included"),
        (unequal, "the ranks get [3, 3, 2, 2] rows. All ranks need the same number, 3"),
        (rounded_down, "the ranks get [2, 2, 2, 2] rows, 8 in all, and the table has 10"),
        (rubbish_kept, ch09.RUBBISH_KEPT.format(call="reshard of V = 10 from 4 to 3 ranks", rank=2)),
        (padded_on_each_rank, ch09.PAD_EACH.format(call="reshard of V = 10 from 2 to 4 ranks")),
        (clears_the_shards, "changed the shards that it was given"),
        (too_many_rows, "the ranks get [4, 4, 4, 4] rows; it should be 3 each"),
        (lambda shards, V, t: padded_and_split(shards, V, t)[::-1], "It is what belongs to rank 3"),
        (lambda shards, V, t: torch.stack(padded_and_split(shards, V, t)), "it returned a Tensor"),
        (lambda shards, V, t: shards, "should return a list of 4 tensors; it returned 2 things"),
        (lambda shards, V, t: [part.float() for part in padded_and_split(shards, V, t)][:0], "it returned 0 things"),
        (lambda shards, V, t: None, "Is there a return?"),
    ],
)
def test_wrong_resharding_hears_why(reshard, said):
    refused(said, "9.4", reshard)
