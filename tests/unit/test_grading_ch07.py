"""Exercises 7.1 to 7.5: right answers in several styles pass, each wrong one hears what is wrong with it."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checking import passes, refused
from torch.nn.functional import embedding, linear, one_hot

from tpcode.comm import all_gather, all_reduce, gather_from_tp, group_rank, group_size, reduce_from_tp
from tpcode.grading import Wrong, ch07, check
from tpcode.layers import vocab_parallel_cross_entropy

# ---- 7.1 ------------------------------------------------------------------------------------------------------------

RIGHT = {"m": 3, "sum_0": 1.25, "sum_1": 0.625, "hit_0": 0, "hit_1": 2, "loss": math.log2(15) - 2}


@pytest.mark.parametrize("loss", [math.log2(15) - 2, 1.907, 1.91, np.log2(1.875) + 1, torch.tensor(7.5).log2() - 1])
def test_numbers_by_hand_pass(loss, capsys):
    check("7.1", **RIGHT | {"loss": loss})
    assert capsys.readouterr().out.startswith("7.1 right")


WRONG_BY_HAND = [
    ({"m": 2}, "rank 1's own largest"),
    ({"sum_1": 1.25}, ch07.OWN_MAX),
    ({"sum_0": 10}, ch07.NO_MAX),
    ({"sum_1": 5}, ch07.NO_MAX),
    ({"hit_0": 1}, ch07.NOT_MINE),
    ({"hit_0": 3}, ch07.NOT_MINE),
    ({"hit_0": 2}, ch07.NOT_MINE),
    ({"hit_1": 0}, ch07.LOCAL_TARGET),
    ({"hit_1": -1}, ch07.SHIFTED),
    ({"loss": math.log2(1.875) - 2}, ch07.NO_ADDING_BACK),
    ({"loss": math.log2(2.5) + 1}, ch07.FROM_OWN_MAX),
    ({"loss": math.log2(15)}, ch07.NO_TARGET),
    ({"loss": math.log(15) - 2}, ch07.NATURAL),
    ({"loss": math.log2(5) - 2}, ch07.RANK_1_ALONE),
    ({"loss": (math.log2(10) + math.log2(5) - 2) / 2}, ch07.MEAN_OF_OWN),
    ({"loss": math.log2(10) + math.log2(5) - 2}, ch07.MEAN_OF_OWN),
    ({"loss": 2 - math.log2(15)}, ch07.FLIPPED),
]


@pytest.mark.parametrize("wrong, said", WRONG_BY_HAND)
def test_wrong_numbers_hear_why(wrong, said):
    with pytest.raises(Wrong) as error:
        check("7.1", **RIGHT | wrong)
    assert said in str(error.value)
    assert str(error.value).startswith(f"7.1 not yet right: {next(iter(wrong))}")


def test_each_wrong_number_differs_from_the_right_one():
    assert all(abs(RIGHT[name] - value) > 0.01 for wrong, _ in WRONG_BY_HAND for name, value in wrong.items())


# ---- 7.2 ------------------------------------------------------------------------------------------------------------


def of_this_rank(ids, width):
    local = ids - group_rank() * width
    return local, (local >= 0) & (local < width)


def by_indexing(ids, E_r):
    local, mine = of_this_rank(ids, len(E_r))
    rows = E_r[torch.where(mine, local, 0)]
    return torch.where(mine.unsqueeze(-1), rows, 0.0)


def by_embedding(ids, E_r):
    local, mine = of_this_rank(ids, len(E_r))
    return embedding(local.masked_fill(~mine, 0), E_r).masked_fill(~mine[..., None], 0)


def by_one_hot_product(ids, E_r):
    hot = one_hot(ids, group_size() * len(E_r)).to(E_r.dtype)
    return hot.chunk(group_size(), -1)[group_rank()] @ E_r


def by_filling_in_place(ids, E_r):
    local, mine = of_this_rank(ids, len(E_r))
    x = E_r.new_zeros(*ids.shape, E_r.shape[1])
    x[mine] = E_r[local[mine]]
    return x


def in_a_loop(ids, E_r):
    first = group_rank() * len(E_r)
    zero = torch.zeros_like(E_r[0])
    rows = [E_r[int(id) - first] if first <= id < first + len(E_r) else zero for id in ids.flatten()]
    return torch.stack(rows).view(*ids.shape, -1)


@pytest.mark.parametrize("my_part", [by_indexing, by_embedding, by_one_hot_product, by_filling_in_place, in_a_loop])
def test_lookups_pass(my_part, capsys):
    passes(capsys, "7.2", my_part)


def only_too_high_is_tested(ids, E_r):
    local = ids - group_rank() * len(E_r)
    high = local >= len(E_r)
    return E_r[local.masked_fill(high, 0)] * ~high.unsqueeze(-1)


def zeros_behind_autograds_back(ids, E_r):
    local, mine = of_this_rank(ids, len(E_r))
    rows = E_r[local.where(mine, 0)]
    rows.data[~mine] = 0
    return rows


def changes_ids(ids, E_r):
    part = by_indexing(ids, E_r)
    ids -= group_rank() * len(E_r)
    return part


def first_id_left_out(ids, E_r):
    local, mine = of_this_rank(ids, len(E_r))
    mine = mine & (local > 0)
    return E_r[local.where(mine, 0)] * mine.unsqueeze(-1)


def no_first(ids, E_r):
    mine = ids < len(E_r)
    return E_r[ids.where(mine, 0)] * mine.unsqueeze(-1)


def first_row_for_others(ids, E_r):
    local, mine = of_this_rank(ids, len(E_r))
    return E_r[local.where(mine, 0)]


@pytest.mark.parametrize(
    "my_part, said",
    [
        (only_too_high_is_tested, ch07.WRAPS),
        (first_row_for_others, ch07.FOREIGN_ROWS.format(what="a row all the same, the first one,")),
        (lambda ids, E_r: E_r[of_this_rank(ids, len(E_r))[0].clamp(0, len(E_r) - 1)], "the first or the last one,"),
        (lambda ids, E_r: E_r[ids % len(E_r)], "number id % (V/t),"),
        (no_first, ch07.NO_FIRST),
        (first_id_left_out, ch07.EDGE),
        (zeros_behind_autograds_back, ch07.GRADIENT_OF_OTHERS),
        (changes_ids, ch07.IDS_CHANGED),
        (lambda ids, E_r: by_indexing(ids, E_r.detach()), "no gradient flows back from your rows"),
        (lambda ids, E_r: reduce_from_tp(by_indexing(ids, E_r)), "It is 2 times the right value"),
        (lambda ids, E_r: by_indexing(ids, E_r).mean(0), "has shape"),
        (lambda ids, E_r: None, "Is there a return?"),
    ],
)
def test_wrong_lookups_hear_why(my_part, said):
    refused(said, "7.2", my_part)


# ---- 7.3 ------------------------------------------------------------------------------------------------------------


def hit_of(z_r, targets):
    local, mine = of_this_rank(targets, z_r.shape[-1])
    found = z_r.gather(-1, local.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(mine, found, 0.0)


def largest_of_all(z_r):
    return all_reduce(z_r.detach().amax(-1), "max")


def three_sums(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    return reduce_from_tp(z_r.exp().sum(-1)).log() - reduce_from_tp(hit_of(z_r, targets))


def maximum_added_back(z_r, targets):
    m = largest_of_all(z_r)
    total = reduce_from_tp((z_r - m.unsqueeze(-1)).exp().sum(-1))
    return total.log() + m - reduce_from_tp(hit_of(z_r, targets))


def packed(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    total, hit = reduce_from_tp(torch.stack([z_r.exp().sum(-1), hit_of(z_r, targets)]))
    return total.log() - hit


def gathered_maxima(z_r, targets):
    tops = all_gather(z_r.detach().amax(-1, keepdim=True), -1)  # [b, s, t]
    z_r = z_r - tops.amax(-1, keepdim=True)
    return reduce_from_tp(z_r.exp().sum(-1)).log() - reduce_from_tp(hit_of(z_r, targets))


class ByHand(torch.autograd.Function):
    """With torch's own collectives, in place, and the backward written out."""

    @staticmethod
    def forward(ctx, z_r, targets):
        m = z_r.amax(-1)
        dist.all_reduce(m, dist.ReduceOp.MAX)
        z_r = z_r - m.unsqueeze(-1)
        local, mine = of_this_rank(targets, z_r.shape[-1])
        hit, total = hit_of(z_r, targets), z_r.exp().sum(-1)
        dist.all_reduce(hit)
        dist.all_reduce(total)
        ctx.save_for_backward(z_r.exp() / total.unsqueeze(-1), local, mine)
        return total.log() - hit

    @staticmethod
    def backward(ctx, dloss):
        p, local, mine = ctx.saved_tensors
        hot = torch.arange(p.shape[-1]) == local.unsqueeze(-1)
        return (p - (hot & mine.unsqueeze(-1)).double()) * dloss.unsqueeze(-1), None


def the_packages(z_r, targets):
    return vocab_parallel_cross_entropy(z_r, targets, reduction="none")


@pytest.mark.parametrize(
    "cross_entropy", [three_sums, maximum_added_back, packed, gathered_maxima, ByHand.apply, the_packages]
)
def test_cross_entropies_pass(cross_entropy, capsys):
    passes(capsys, "7.3", cross_entropy)


def gathers(z_r, targets):
    z = gather_from_tp(z_r)
    return torch.nn.functional.cross_entropy(z.transpose(1, 2), targets, reduction="none")


def no_maximum(z_r, targets):
    return reduce_from_tp(z_r.exp().sum(-1)).log() - reduce_from_tp(hit_of(z_r, targets))


def own_maximum(z_r, targets):
    z_r = z_r - z_r.detach().amax(-1, keepdim=True)
    return reduce_from_tp(z_r.exp().sum(-1)).log() - reduce_from_tp(hit_of(z_r, targets))


def own_maximum_added_back(z_r, targets):
    m = z_r.detach().amax(-1)
    total = reduce_from_tp((z_r - m.unsqueeze(-1)).exp().sum(-1))
    return total.log() + m - reduce_from_tp(hit_of(z_r, targets))


def own_maximum_forgotten(z_r, targets):
    total = reduce_from_tp((z_r - z_r.detach().amax(-1, keepdim=True)).exp().sum(-1))
    return total.log() - reduce_from_tp(hit_of(z_r, targets))


def maximum_not_added_back(z_r, targets):
    total = reduce_from_tp((z_r - largest_of_all(z_r).unsqueeze(-1)).exp().sum(-1))
    return total.log() - reduce_from_tp(hit_of(z_r, targets))


def mean_of_own_losses(z_r, targets):
    return reduce_from_tp(z_r.logsumexp(-1) - hit_of(z_r, targets)) / group_size()


def sum_of_own_losses(z_r, targets):
    return reduce_from_tp(z_r.logsumexp(-1) - hit_of(z_r, targets))


def mean_of_own_logarithms(z_r, targets):
    return reduce_from_tp(z_r.logsumexp(-1)) / group_size() - reduce_from_tp(hit_of(z_r, targets))


def sum_not_added(z_r, targets):
    return z_r.logsumexp(-1) - reduce_from_tp(hit_of(z_r, targets))


def hits_unmasked(index):
    def cross_entropy(z_r, targets):
        z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
        at = index(targets, z_r.shape[-1])
        hit = z_r.gather(-1, at.unsqueeze(-1)).squeeze(-1)
        return reduce_from_tp(z_r.exp().sum(-1)).log() - reduce_from_tp(hit)

    return cross_entropy


def first_for_others(targets, width):
    local, mine = of_this_rank(targets, width)
    return local.where(mine, 0)


def hits_unmasked_and_unshifted(z_r, targets):
    m, at = largest_of_all(z_r), first_for_others(targets, z_r.shape[-1])
    total = reduce_from_tp((z_r - m.unsqueeze(-1)).exp().sum(-1))
    return total.log() + m - reduce_from_tp(z_r.gather(-1, at.unsqueeze(-1)).squeeze(-1))


def sum_detached(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    return all_reduce(z_r.detach().exp().sum(-1)).log() - reduce_from_tp(hit_of(z_r, targets))


def target_detached(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    return reduce_from_tp(z_r.exp().sum(-1)).log() - all_reduce(hit_of(z_r.detach(), targets))


class SummedBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy)


def summed_both_ways(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    return SummedBothWays.apply(z_r.exp().sum(-1)).log() - SummedBothWays.apply(hit_of(z_r, targets))


class SumsAndDivides(SummedBothWays):
    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy) / group_size()


def right_but_not_silent(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    return SumsAndDivides.apply(z_r.exp().sum(-1)).log() - reduce_from_tp(hit_of(z_r, targets))


def four_sums(z_r, targets):
    all_reduce(torch.zeros(targets.shape))
    return three_sums(z_r, targets)


def wide_one_hot(z_r, targets):
    z_r = z_r - largest_of_all(z_r).unsqueeze(-1)
    hot = one_hot(targets, z_r.shape[-1] * group_size()).chunk(group_size(), -1)[group_rank()]
    return reduce_from_tp(z_r.exp().sum(-1)).log() - reduce_from_tp((hot * z_r).sum(-1))


@pytest.mark.parametrize(
    "cross_entropy, said",
    [
        (gathers, "logits were gathered"),
        (no_maximum, "With logits near 1000 the loss is inf"),
        (own_maximum, ch07.OWN_UNITS),
        (own_maximum_added_back, ch07.OWN_UNITS),
        (own_maximum_forgotten, ch07.MAX_LOST),  # at t = 1 it is all that is wrong
        (maximum_not_added_back, ch07.MAX_LOST),
        (mean_of_own_losses, ch07.OWN_LOSSES),
        (sum_of_own_losses, ch07.OWN_LOSSES),
        (mean_of_own_logarithms, ch07.OWN_LOSSES),
        (sum_not_added, ch07.NOT_ADDED),
        (hits_unmasked(first_for_others), ch07.HIT_UNMASKED),
        (hits_unmasked(lambda at, width: of_this_rank(at, width)[0].clamp(0, width - 1)), ch07.HIT_UNMASKED),
        (hits_unmasked(lambda targets, width: targets % width), ch07.HIT_UNMASKED),
        (hits_unmasked_and_unshifted, ch07.HIT_UNMASKED),
        (sum_detached, ch07.SUM_DETACHED),
        (target_detached, ch07.TARGET_DETACHED),
        (summed_both_ways, ch07.SUMMED_BACK.format(t=2)),
        (right_but_not_silent, ch07.NOT_SILENT),
        (four_sums, ch07.TOO_MANY),
        (wide_one_hot, "a tensor of shape [2, 3, 24] was made on rank 0 at t = 4"),
        (lambda z_r, targets: three_sums(z_r, targets).mean(), "has shape []"),
        (lambda z_r, targets: three_sums(z_r.detach(), targets), "no gradient flows back from the loss"),
        (lambda z_r, targets: None, "Is there a return?"),
    ],
)
def test_wrong_cross_entropies_hear_why(cross_entropy, said):
    refused(said, "7.3", cross_entropy)


# ---- 7.4 ------------------------------------------------------------------------------------------------------------


def ids_of(z_r):
    return torch.arange(z_r.shape[-1]) + group_rank() * z_r.shape[-1]


def filled(z_r, V):
    return z_r.masked_fill(ids_of(z_r) >= V, -math.inf)


def very_negative(z_r, V):
    return torch.where(ids_of(z_r) < V, z_r, -1e9)


def a_bias(z_r, V):
    bias = torch.zeros(z_r.shape[-1], dtype=z_r.dtype)
    bias[ids_of(z_r) >= V] = -math.inf
    return z_r + bias


def a_clone(z_r, V):
    words = min(max(V - group_rank() * z_r.shape[-1], 0), z_r.shape[-1])
    z_r = z_r.clone()
    z_r[..., words:] = torch.finfo(z_r.dtype).min
    return z_r


@pytest.mark.parametrize("mask", [filled, very_negative, a_bias, a_clone])
def test_masks_pass(mask, capsys):
    passes(capsys, "7.4", "b", mask)


def end_of_every_rank(z_r, V):
    width = z_r.shape[-1]
    return z_r.masked_fill(torch.arange(width) >= width - (group_size() * width - V), -math.inf)


@pytest.mark.parametrize(
    "mask, said",
    [
        (lambda z_r, V: z_r, "rank 3 at t = 4, V = 10: the ids [10, 11] are padding and still take part"),
        (lambda z_r, V: z_r * (ids_of(z_r) < V), "the ids [10, 11] are padding and still take part"),
        (lambda z_r, V: z_r.masked_fill(ids_of(z_r) > V, -math.inf), "the ids [10] are padding and still take part"),
        (
            lambda z_r, V: z_r.masked_fill(torch.arange(z_r.shape[-1]) >= V, -math.inf),
            "the ids [10, 11] are padding and still take part",
        ),
        (lambda z_r, V: z_r.masked_fill(ids_of(z_r) >= V - 1, -math.inf), "the ids [9] are true ones"),
        (end_of_every_rank, "rank 0 at t = 4, V = 10: the ids [1, 2] are true ones, and you masked them"),
        (lambda z_r, V: filled(z_r, V) - 1, "the logits of true ids have to stay as they are"),
        (lambda z_r, V: z_r[..., ids_of(z_r) < V], "keep the width, W"),
        (lambda z_r, V: filled(z_r.detach(), V), "no gradient flows back through your mask"),
        (lambda z_r, V: V, "mask should return a tensor"),
        (lambda z_r, V: None, "Is there a return?"),
    ],
)
def test_wrong_masks_hear_why(mask, said):
    refused(said, "7.4", "b", mask)


@pytest.mark.parametrize("fault, said", [*ch07.NOT_THAT.items(), ("e", "it should be one of")])
def test_another_fault_hears_what_speaks_against_it(fault, said):
    refused(said, "7.4", fault, filled)


def test_the_losses_shown_are_those_of_ten_and_twelve_ids():
    losses = ch07.uniform_losses()
    assert losses == pytest.approx({1: math.log(10), 2: math.log(10), 4: math.log(12)}, abs=1e-12)


# ---- 7.5 ------------------------------------------------------------------------------------------------------------


def softmax_less_one_hot(z_r, log_total, targets, dloss):
    p = (z_r - log_total.unsqueeze(-1)).exp()
    return (p - (targets.unsqueeze(-1) == ids_of(z_r)).double()) * dloss.unsqueeze(-1)


def by_scatter(z_r, log_total, targets, dloss):
    dz_r = (z_r - log_total[..., None]).exp() * dloss[..., None]
    local, mine = of_this_rank(targets, z_r.shape[-1])
    dz_r.scatter_add_(-1, local.where(mine, 0)[..., None], (-dloss * mine)[..., None])
    return dz_r


def head(dz_r, x, weight_r):
    return all_reduce(dz_r @ weight_r), torch.einsum("bsv,bsh->vh", dz_r, x)


def head_with_torchs_own(dz_r, x, weight_r):
    dx = linear(dz_r, weight_r.T)
    dist.all_reduce(dx)
    return dx, dz_r.reshape(-1, dz_r.shape[-1]).T @ x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize("head_backward", [head, head_with_torchs_own])
@pytest.mark.parametrize("loss_backward", [softmax_less_one_hot, by_scatter])
def test_backward_passes(loss_backward, head_backward, capsys):
    passes(capsys, "7.5", "b", loss_backward, head_backward)


def one_hot_at(index):
    def loss_backward(z_r, log_total, targets, dloss):
        hot = one_hot(index(targets, z_r.shape[-1]), z_r.shape[-1])
        return ((z_r - log_total.unsqueeze(-1)).exp() - hot) * dloss.unsqueeze(-1)

    return loss_backward


right = softmax_less_one_hot


@pytest.mark.parametrize(
    "loss_backward, said",
    [
        (lambda z, log_total, y, d: (z - log_total[..., None]).exp() * d[..., None], ch07.NO_ONE_HOT),
        (lambda z, log_total, y, d: right(z, log_total, y, torch.ones_like(d)), ch07.NO_DLOSS),
        (one_hot_at(first_for_others), ch07.ONE_HOT_EVERYWHERE),
        (one_hot_at(lambda at, width: of_this_rank(at, width)[0].clamp(0, width - 1)), ch07.ONE_HOT_EVERYWHERE),
        (one_hot_at(lambda targets, width: targets % width), ch07.ONE_HOT_EVERYWHERE),
        (lambda z, log_total, y, d: right(z, z.logsumexp(-1), y, d), ch07.OWN_SOFTMAX),
        (lambda z, log_total, y, d: all_reduce(right(z, log_total, y, d)), ch07.SUMMED_DZ),
        (lambda z, log_total, y, d: right(z, log_total, y, all_reduce(d)), ch07.DZ_T_TIMES.format(t=2)),
        (
            lambda z, log_total, y, d: right(z, log_total, y, all_reduce(d) / group_size()),
            "there is nothing to ask for",
        ),
        (lambda z, log_total, y, d: -right(z, log_total, y, d), "It has the wrong sign"),
        (lambda z, log_total, y, d: None, "Is there a return?"),
    ],
)
def test_wrong_gradients_of_the_logits_hear_why(loss_backward, said):
    refused(said, "7.5", "b", loss_backward, head)


@pytest.mark.parametrize(
    "head_backward, said",
    [
        (lambda dz, x, w: (dz @ w, head(dz, x, w)[1]), ch07.DX_PART),
        (lambda dz, x, w: (all_reduce(dz @ w), all_reduce(head(dz, x, w)[1])), ch07.DW_SUMMED),
        (lambda dz, x, w: (all_reduce(dz @ w), head(dz, x, w)[1].T), "It may be transposed"),
        (lambda dz, x, w: (all_reduce(all_reduce(dz @ w)), head(dz, x, w)[1]), "It is 2 times the right value"),
        (lambda dz, x, w: (all_reduce(dz @ w), None), "dW_r is missing on rank 0 at t = 1"),
        (lambda dz, x, w: (all_reduce(all_reduce(dz @ w)) / group_size(), head(dz, x, w)[1]), "is all that is needed"),
        (lambda dz, x, w: all_reduce(dz @ w), "should return two tensors"),
        (lambda dz, x, w: None, "Is there a return?"),
    ],
)
def test_wrong_heads_hear_why(head_backward, said):
    refused(said, "7.5", "b", right, head_backward)


@pytest.mark.parametrize("why, said", [*ch07.NOT_WHY.items(), ("d", "it should be one of")])
def test_another_reason_hears_what_to_ask(why, said):
    refused(said, "7.5", why, right, head)


def test_a_stub_in_either_function_is_named():
    def head_backward(dz_r, x, weight_r):
        dx = None
        return dx

    said = refused("replace None in head_backward", "7.5", "b", right, head_backward)
    assert said.startswith("7.5 is not filled in yet")
