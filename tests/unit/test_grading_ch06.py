"""Exercises 6.1 to 6.5: right answers in several styles pass, each wrong one hears what is wrong with it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checking import refused
from torch import nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from tpcode.comm import all_gather, all_reduce, copy_to_tp, group_rank, group_size, reduce_from_tp
from tpcode.dense import explicit_attention
from tpcode.grading import ch06, check
from tpcode.layers import ColumnParallelLinear, RowParallelLinear

# ---- 6.1 ------------------------------------------------------------------------------------------------------------

HELD = {
    1: (list(range(12)), [0, 1, 2, 3]),
    2: ([6, 7, 8, 9, 10, 11], [2, 3]),
    3: "refused",
    4: ([6, 7, 8], [2]),
    6: "refused",
    12: ([7], [2]),
}
OTHER_STYLE = {
    t: value if value == "refused" else [range(value[0][0], value[0][-1] + 1), np.array(value[1])]
    for t, value in HELD.items()
}


@pytest.mark.parametrize("held, ranks", [(HELD, [6, 7, 8]), (OTHER_STYLE | {3: " Refused."}, {8, 6, 7})])
def test_heads_on_ranks_pass(held, ranks, capsys):
    check("6.1", held, ranks)
    assert capsys.readouterr().out.startswith("6.1 right")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({3: ([4, 5, 6, 7], [1, 2])}, "0, 1, 2, 3 read KV head 0, 0, 0, 1, and rank 1's 4, 5, 6, 7 read 1, 1, 2, 2"),
        ({6: ([6, 7], [2])}, "0, 1 read KV head 0, 0, and rank 1's 2, 3 read 0, 1"),
        ({12: "refused"}, ch06.SEVERAL_RANKS),
        ({4: "refused"}, ch06.DIVIDES_BOTH.format(t=4)),
        ({1: "refused"}, ch06.DIVIDES_BOTH.format(t=1)),
        ({2: ([1, 3, 5, 7, 9, 11], [2, 3])}, ch06.EVERY_TH.format(t=2)),
        ({4: ([3, 7, 11], [2])}, ch06.EVERY_TH.format(t=4)),
        ({4: ([0, 1, 2], [2])}, ch06.OWN_NUMBERS),
        ({2: ([0, 1, 2, 3, 4, 5], [2, 3])}, ch06.OWN_NUMBERS),
        ({4: ([9, 10, 11], [2])}, ch06.NOT_WITH_7.format(rank=3)),
        ({2: ([6, 7, 8, 9, 10, 11], [0, 1, 2, 3])}, ch06.ALL_KV),
        ({4: ([6, 7, 8], [6, 7, 8])}, ch06.AS_QUERIES),
        ({12: ([7], [7])}, ch06.AS_QUERIES),
        ({12: ([7], [3])}, ch06.MODULO),
        ({4: ([6, 7, 8], [0, 2, 3])}, ch06.MODULO),
        ({2: ([6, 7, 8, 9, 10, 11], [0, 1])}, ch06.OWN_NUMBERS),
        ({4: ([6, 7, 8], [0])}, ch06.OWN_NUMBERS),
        ({4: ([6, 7, 8], [1])}, "the KV heads are not [1]"),
        ({4: ([6, 7], [2])}, "the query heads are not [6, 7]"),
        ({4: "no"}, 'should be "refused", or two lists'),
        ({4: 7}, 'should be "refused", or two lists'),
        ({4: ([6, 7, 8], 2)}, "should be a list of whole numbers"),
        ({4: ([6, 7, 8.5], [2])}, "should hold whole numbers"),
    ],
)
def test_wrong_shares_hear_why(wrong, said):
    refused(said, "6.1", HELD | wrong, [6, 7, 8])


@pytest.mark.parametrize(
    "ranks, said", [([2, 6, 10], ch06.STRIDED), ([7], "That is one of them"), ([8, 9, 10, 11], "with_kv_2 is [8, 9")]
)
def test_wrong_replicas_hear_why(ranks, said):
    refused(said, "6.1", HELD, ranks)


def test_a_dict_with_other_keys_is_refused():
    refused("the keys 1, 2, 3, 4, 6, 12", "6.1", {1: HELD[1]}, [6, 7, 8])


# ---- 6.2 ------------------------------------------------------------------------------------------------------------


class Split(nn.Module):
    """The right one; the wrong ones below change a method."""

    def __init__(self, dense):
        super().__init__()
        self.heads = dense.heads
        for name, layer in zip("qkv", (dense.q_proj, dense.k_proj, dense.v_proj)):
            setattr(self, name, nn.Parameter(self.rows(layer.weight.detach())))
        self.o = nn.Parameter(self.rows(dense.o_proj.weight.detach().T).T)

    def rows(self, weight):
        return weight.chunk(group_size())[group_rank()].clone()

    def split(self, x):
        return x.unflatten(-1, (self.heads // group_size(), -1)).transpose(1, 2)

    def core(self, q, k, v):
        return explicit_attention(q, k, v)

    def copy(self, x):
        return copy_to_tp(x)

    def reduce(self, y):
        return reduce_from_tp(y)

    def forward(self, x):
        x = self.copy(x)
        q, k, v = (self.split(linear(x, w)) for w in (self.q, self.k, self.v))
        return self.reduce(linear(self.core(q, k, v).transpose(1, 2).flatten(2), self.o))


class BySdpa(Split):
    def core(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


class OfLayers(nn.Module):
    """The package's two layers, on one fused matrix, whose pieces are shown under the four names."""

    def __init__(self, dense):
        super().__init__()
        weights = [layer.weight.detach() for layer in (dense.q_proj, dense.k_proj, dense.v_proj)]
        r, t = group_rank(), group_size()
        self.q, self.k, self.v = (nn.Parameter(w.chunk(t)[r].clone()) for w in weights)
        self.out = RowParallelLinear.from_dense(dense.o_proj)
        self.o, self.held = self.out.weight, dense.heads // t

    def forward(self, x):
        qkv = linear(copy_to_tp(x), torch.cat([self.q, self.k, self.v])).unflatten(-1, (3, self.held, -1))
        return self.out(explicit_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2))


class HeadByHead(Split):
    def core(self, q, k, v):
        return torch.stack([explicit_attention(*(x[:, [i]] for x in (q, k, v)))[:, 0] for i in range(q.shape[1])], 1)


@pytest.mark.parametrize("MyAttention", [Split, BySdpa, OfLayers, HeadByHead])
def test_split_attentions_pass(MyAttention, capsys):
    check("6.2", MyAttention, inside)
    assert capsys.readouterr().out.startswith("6.2 right")


class NoCopy(Split):
    def copy(self, x):
        return x


class NoReduce(Split):
    def reduce(self, y):
        return y


class NoGradient(Split):
    def reduce(self, y):
        return all_reduce(y.detach())


class ThreeCopies(Split):
    def forward(self, x):
        q, k, v = (self.split(linear(copy_to_tp(x), w)) for w in (self.q, self.k, self.v))
        return reduce_from_tp(linear(self.core(q, k, v).transpose(1, 2).flatten(2), self.o))


class ThreeLayers(nn.Module):
    """Three column layers, each with a copy (f) of its own."""

    def __init__(self, dense):
        super().__init__()
        self.layers = nn.ModuleList(
            ColumnParallelLinear.from_dense(layer) for layer in (dense.q_proj, dense.k_proj, dense.v_proj)
        )
        self.q, self.k, self.v = (layer.weight for layer in self.layers)
        self.out = RowParallelLinear.from_dense(dense.o_proj)
        self.o, self.held = self.out.weight, dense.heads // group_size()

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (self.held, -1)).transpose(1, 2) for layer in self.layers)
        return self.out(explicit_attention(*heads).transpose(1, 2).flatten(2))


class CutInside(Split):
    """The same piece of each head's features on a rank."""

    def rows(self, weight):
        return weight.unflatten(0, (self.heads, -1)).chunk(group_size(), 1)[group_rank()].flatten(0, 1).clone()

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ReadAsAllHeads(Split):
    """Whole heads' columns, read as pieces of all: it gives the same Y as CutInside."""

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class EveryTh(Split):
    def rows(self, weight):
        return weight.unflatten(0, (self.heads, -1))[group_rank() :: group_size()].flatten(0, 1).clone()


class WholeOnEveryRank(Split):
    def rows(self, weight):
        return weight.clone()

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ReadsLater(Split):
    def core(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)


class GathersHeads(Split):
    def core(self, q, k, v):
        everyone = all_gather(k.detach(), 1)  # for nothing
        return explicit_attention(q, k, v) + 0 * everyone.sum()


class NoParameters(Split):
    def __init__(self, dense):
        super().__init__(dense)
        weight = self.q.detach()
        del self.q
        self.q = weight


@pytest.mark.parametrize(
    "MyAttention, said",
    [
        (NoCopy, ch06.NO_COPY),
        (NoReduce, ch06.NO_REDUCE.format(rank=0)),
        (NoGradient, "Y has no gradient"),
        (ThreeCopies, ch06.THREE_COPIES),
        (ThreeLayers, ch06.THREE_COPIES),
        (CutInside, ch06.CUT_INSIDE.format(a=4, share=2, piece=2, d=4)),
        (ReadAsAllHeads, ch06.CUT_INSIDE.format(a=4, share=2, piece=2, d=4)),
        (EveryTh, ch06.EVERY_TH_HEAD),
        (WholeOnEveryRank, "It is 2 times the right value"),
        (ReadsLater, ch06.NOT_CAUSAL),
        (GathersHeads, ch06.NO_WORD),
        (NoParameters, "MyAttention.q should be this rank's weight, an nn.Parameter"),
    ],
)
def test_wrong_attentions_hear_why(MyAttention, said):
    refused(said, "6.2", MyAttention, inside)


def weights(scores):
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def inside(q_r, k_r, v_r, d):
    return weights(all_reduce(q_r @ k_r.mT) * d**-0.5) @ v_r


def inside_by_gathering(q_r, k_r, v_r, d):
    q, k = all_gather(q_r, -1), all_gather(k_r, -1)
    return weights(q @ k.mT / d**0.5) @ v_r


def inside_by_products(q_r, k_r, v_r, d):
    """Scaled before the sum."""
    return weights(all_reduce(q_r @ k_r.mT / d**0.5)) @ v_r


@pytest.mark.parametrize("mended", [inside_by_gathering, inside_by_products])
def test_mended_cuts_pass(mended, capsys):
    check("6.2", Split, mended)
    assert capsys.readouterr().out.startswith("6.2 right")


@pytest.mark.parametrize(
    "mended, said",
    [
        (lambda q, k, v, d: weights(q @ k.mT * d**-0.5) @ v, ch06.PART_OF_SCORE),
        (lambda q, k, v, d: weights(q @ k.mT * q.shape[-1] ** -0.5) @ v, ch06.PART_OF_SCORE),
        (lambda q, k, v, d: weights(all_reduce(q @ k.mT) * q.shape[-1] ** -0.5) @ v, ch06.PIECE_SCALE),
        (
            lambda q, k, v, d: all_reduce(weights(q @ k.mT * d**-0.5)) / dist.get_world_size() @ v,
            ch06.SUM_AFTER,
        ),
        (lambda q, k, v, d: None, "returned None on every rank"),
    ],
)
def test_wrong_mendings_hear_why(mended, said):
    refused(said, "6.2", Split, mended)


# ---- 6.3 ------------------------------------------------------------------------------------------------------------


def share(start, heads, r, t, d):
    return list(range((start + r * heads // t) * d, (start + (r + 1) * heads // t) * d))


def rows_stacked(r, t, a, k, d):
    return share(0, a, r, t, d) + share(a, k, r, t, d) + share(a + k, k, r, t, d)


def rows_grouped(r, t, a, k, d):
    return share(0, a + 2 * k, r, t, d)


def stacked_by_tensor(r, t, a, k, d):
    rows = torch.arange((a + 2 * k) * d)
    return torch.cat([part.chunk(t)[r] for part in rows.split([a * d, k * d, k * d])])


def grouped_by_group(r, t, a, k, d):
    per = (a // k + 2) * d
    return [row for j in range(r * k // t, (r + 1) * k // t) for row in range(j * per, (j + 1) * per)]


@pytest.mark.parametrize("one, other", [(rows_stacked, rows_grouped), (stacked_by_tensor, grouped_by_group)])
def test_rows_of_a_fused_matrix_pass(one, other, capsys):
    check("6.3", one, other)
    assert capsys.readouterr().out.startswith("6.3 right")


def thirds(r, t, a, k, d):
    third = (a + 2 * k) * d // 3
    return [part * third + i for part in range(3) for i in range(r * (third // t), (r + 1) * (third // t))]


def all_kv(r, t, a, k, d):
    return share(0, a, r, t, d) + list(range(a * d, (a + 2 * k) * d))


def keys_first(r, t, a, k, d):
    return share(a, k, r, t, d) + share(0, a, r, t, d) + share(a + k, k, r, t, d)


@pytest.mark.parametrize(
    "one, other, said",
    [
        (rows_grouped, rows_grouped, ch06.PLAIN),
        (thirds, rows_grouped, ch06.IN_THIRDS),
        (lambda r, t, a, k, d: rows_stacked(r, t, a, k, 1), rows_grouped, ch06.HEADS_NOT_ROWS),
        (all_kv, rows_grouped, ch06.ALL_ROWS_OF_KV),
        (keys_first, rows_grouped, ch06.OTHER_ORDER),
        (rows_stacked, rows_stacked, ch06.OTHER_LAYOUT),
        (rows_stacked, lambda r, t, a, k, d: rows_grouped(r, t, a, k, 1), ch06.HEADS_NOT_ROWS),
        (rows_stacked, lambda r, t, a, k, d: rows_grouped(r, t, a, k, d)[::-1], ch06.FILE_ORDER),
        (rows_stacked, lambda r, t, a, k, d: [99], "has row 99, and the matrix has 16 rows"),
        (lambda r, t, a, k, d: "q0", rows_grouped, "should be a list of whole numbers"),
        (lambda r, t, a, k, d: [], rows_grouped, "gives rows of nothing; right are those of q0 q1 k0 v0"),
    ],
)
def test_wrong_rows_hear_why(one, other, said):
    if one.__name__ == "<lambda>":
        one.__name__ = "rows_stacked"
    refused(said, "6.3", one, other)


def test_the_first_sizes_tell_the_wrong_rows_apart():
    """On the first case that is checked, every wrong list differs from the right one and from the others."""
    a, k, d, t = ch06.FUSED[0]
    wrong = [f(0, t, a, k, d) for f in (rows_stacked, rows_grouped, thirds, all_kv, keys_first)]
    assert len(set(map(tuple, wrong))) == len(wrong)


# ---- 6.4 ------------------------------------------------------------------------------------------------------------


def replicas(t, k):
    return [list(range(j * t // k, (j + 1) * t // k)) for j in range(k)]


def replicas_by_rank(t, k):
    return torch.arange(t).reshape(k, -1).tolist()


def keys(x, weight_r, group):
    return linear(x, copy_to_tp(weight_r, group))


class CopyWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, dweight):
        dist.all_reduce(dweight, group=ctx.group)
        return dweight, None


def keys_by_own_pair(x, weight_r, group):
    return x @ CopyWeight.apply(weight_r, group).T


@pytest.mark.parametrize("groups, made", [(replicas, keys), (replicas_by_rank, keys_by_own_pair)])
def test_gradients_of_replicas_pass(groups, made, capsys):
    check("6.4", groups, made)
    assert capsys.readouterr().out.startswith("6.4 right")


class Averages(CopyWeight):
    @staticmethod
    def backward(ctx, dweight):
        return all_reduce(dweight, group=ctx.group) / dist.get_world_size(ctx.group), None


def sums_forward(x, weight_r, group):
    all_reduce(x.detach(), group=group)  # for nothing
    return keys(x, weight_r, group)


@pytest.mark.parametrize(
    "groups, made, said",
    [
        (lambda t, k: [list(range(j, t, k)) for j in range(k)], keys, ch06.EVERY_KTH),
        (lambda t, k: [list(range(j * k, (j + 1) * k)) for j in range(t // k)], keys, ch06.SWAPPED),
        (lambda t, k: [list(range(t))], keys, ch06.EVERYONE),
        (lambda t, k: [[r] for r in range(t)], keys, "replicas(t=2, k=1) is [[0], [1]], not [[0, 1]]"),
        (lambda t, k: 2, keys, "should return a list of lists"),
        (replicas, lambda x, w, group: linear(x, w), ch06.NOT_EQUAL),
        (replicas, lambda x, w, group: linear(x, copy_to_tp(w)), ch06.OVER_ALL),
        (replicas, lambda x, w, group: linear(copy_to_tp(x), copy_to_tp(w, group)), ch06.COPIED_AGAIN),
        (replicas, lambda x, w, group: linear(copy_to_tp(x, group), copy_to_tp(w, group)), ch06.COPIED_AGAIN),
        (replicas, lambda x, w, group: linear(x, Averages.apply(w, group)), ch06.MEAN_OF_PARTS),
        (replicas, sums_forward, ch06.ONE_SUM),
        (replicas, lambda x, w, group: reduce_from_tp(linear(x, w), group), "K on rank 0 at t = 2"),
        (replicas, lambda x, w, group: linear(x, w).detach(), "no gradient flows back from K"),
        (replicas, lambda x, w, group: linear(x, w)[..., :2], "K on rank 0 at t = 2 has shape [2, 3, 2]"),
    ],
)
def test_wrong_replicas_of_weights_hear_why(groups, made, said):
    refused(said, "6.4", groups, made)


# ---- 6.5 ------------------------------------------------------------------------------------------------------------

SUMMED = {name: right for name, (right, _) in ch06.OVER_WHICH.items()}


def head_norm(q, gamma):
    return rms_norm(q, (q.shape[-1],), copy_to_tp(gamma), ch06.EPS)


def norm_by_hand(q, gamma):
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + ch06.EPS) * CopyWeight.apply(gamma, None)


@pytest.mark.parametrize("norm", [head_norm, norm_by_hand])
def test_head_norms_pass(norm, capsys):
    check("6.5", norm, SUMMED)
    assert capsys.readouterr().out.startswith("6.5 right")


def over_all_heads(q, gamma):
    wide = q.shape[2:]
    return rms_norm(q, wide, copy_to_tp(gamma).expand(wide), ch06.EPS)


def talks_forward(q, gamma):
    all_reduce(gamma.detach())  # for nothing
    return head_norm(q, gamma)


def copies_all(q, gamma):
    return head_norm(copy_to_tp(q), gamma)


@pytest.mark.parametrize(
    "norm, said",
    [
        (lambda q, gamma: rms_norm(q, (q.shape[-1],), gamma, ch06.EPS), ch06.OWN_GAMMA),
        (over_all_heads, ch06.OVER_HEADS),
        (talks_forward, ch06.NORM_NEEDS_NO_WORD),
        (copies_all, "dq on rank 0 at t = 2"),
        (lambda q, gamma: head_norm(q, gamma) / gamma, "Y on rank 0 at t = 1"),
        (lambda q, gamma: head_norm(q, gamma).detach(), "no gradient flows back from Y"),
        (lambda q, gamma: head_norm(q, gamma).flatten(2), "Y on rank 0 at t = 1 has shape"),
    ],
)
def test_wrong_norms_hear_why(norm, said):
    refused(said, "6.5", norm, SUMMED)


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("given", ch06.SUMS)
def test_each_other_sum_is_refused_with_who_uses_the_weight(name, given, monkeypatch):
    monkeypatch.setattr(ch06, "SIZES", ())  # head_norm is right: the rest is asked here
    if given != SUMMED[name]:
        refused(ch06.OVER_WHICH[name][1], "6.5", head_norm, SUMMED | {name: given})


def test_sums_that_are_none_are_refused(monkeypatch):
    monkeypatch.setattr(ch06, "SIZES", ())
    refused("is none of 'none', 'all', 'replicas'", "6.5", head_norm, SUMMED | {"bias of W_o": "some"})
    refused("summed_over should be a dict", "6.5", head_norm, {"gamma": "all"})


# ---- stubs ----------------------------------------------------------------------------------------------------------


def hole(*answers):
    value = None
    return value


class Stub(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.q = self.k = self.v = None
        self.o = None


class HalfStub(Split):
    def forward(self, x):
        y = None
        return y


def inside_stub(q_r, k_r, v_r, d):
    scores = None
    return torch.ones_like(scores) @ v_r


@pytest.mark.parametrize(
    "id, answers, said",
    [
        ("6.1", (dict.fromkeys(ch06.RANKS), [6, 7, 8]), "replace None in held"),
        ("6.1", (HELD, None), "replace None in with_kv_2"),
        ("6.2", (Stub, inside), "replace None in MyAttention"),
        ("6.2", (HalfStub, inside), "replace None in MyAttention"),
        ("6.2", (Split, inside_stub), "replace None in inside_a_head"),
        ("6.3", (hole, rows_grouped), "replace None in hole"),
        ("6.3", (rows_stacked, hole), "replace None in hole"),
        ("6.4", (hole, keys), "replace None in hole"),
        ("6.4", (replicas, hole), "replace None in hole"),
        ("6.5", (hole, SUMMED), "replace None in hole"),
        ("6.5", (head_norm, dict.fromkeys(SUMMED)), "replace None in summed_over"),
    ],
)
def test_stubs_are_recognised(id, answers, said):
    refused(f"{id} is not filled in yet: {said}", id, *answers)
