"""Exercises 11.1 to 11.5: right answers in several styles pass, each wrong one hears what is wrong with it."""

import pytest
import torch
import torch.distributed as dist
from checking import passes, refused
from torch.nn.functional import linear

from tpcode.comm import (
    all_gather,
    all_gather_async,
    all_reduce,
    copy_to_tp,
    gather_sequence,
    group_rank,
    group_size,
    reduce_from_tp,
    reduce_scatter,
    reduce_scatter_sequence,
    scatter_sequence,
)
from tpcode.grading import ch11

# ---- 11.1 -----------------------------------------------------------------------------------------------------------

RIGHT = {
    "after_reduce_scatter": [[12, 9], [9, 11], [10, 11]],
    "after_norm": [[3, 0], [0, 2], [0, 1]],
    "after_all_gather": [[3, 0], [0, 2], [0, 1]],
    "entries_by_all_reduce": 8,
    "entries_by_halves": 8,
}


@pytest.mark.parametrize("style", [RIGHT, {k: torch.tensor(v) for k, v in RIGHT.items()}, {"entries_by_halves": 4 + 4}])
def test_halves_on_paper_pass(style, capsys):
    passes(capsys, "11.1", **RIGHT | style)


WRONG_HALVES = [
    ({"after_reduce_scatter": [[1, 4], [3, 3], [1, 8]]}, ch11.OWN_SUMMANDS),
    ({"after_reduce_scatter": [RIGHT["after_reduce_scatter"]] * 3}, ch11.WHOLE_SUM),
    ({"after_reduce_scatter": [[10, 11], [12, 9], [9, 11]]}, ch11.NEXT_TOKEN),
    ({"after_reduce_scatter": [[9, 11], [10, 11], [12, 9]]}, ch11.NEXT_TOKEN),
    ({"after_reduce_scatter": [[12, 9, 10], [9, 11, 11]]}, ch11.BY_FEATURES),
    ({"after_norm": [[6, 3], [3, 5], [7, 8]]}, ch11.NORM_OF_SUMMANDS),
    ({"after_norm": RIGHT["after_reduce_scatter"]}, ch11.NOT_NORMED),
    ({"after_norm": [[0, -3], [-2, 0], [-1, 0]]}, ch11.LARGEST),
    ({"after_norm": [[3, 0], [0, 2], [1, 2]]}, ch11.SMALLEST_OF_ALL),
    ({"after_all_gather": [3, 3]}, ch11.ADDED_UP),
    ({"after_all_gather": [0, 2]}, ch11.ONE_PIECE),
    ({"after_all_gather": RIGHT["after_reduce_scatter"]}, ch11.NOT_NORMED),
    ({"after_all_gather": [[6, 3], [3, 5], [7, 8]]}, ch11.NORM_OF_SUMMANDS),
    ({"entries_by_all_reduce": 4}, ch11.ONE_HALF),
    ({"entries_by_halves": 4}, ch11.LESS),
    ({"entries_by_all_reduce": 6}, ch11.PAYLOAD),
    ({"entries_by_halves": 12}, ch11.TWICE),
    ({"entries_by_halves": 24}, ch11.ALL_RANKS),
]


@pytest.mark.parametrize("wrong, said", WRONG_HALVES)
def test_wrong_halves_hear_why(wrong, said):
    message = refused(said, "11.1", **RIGHT | wrong)
    assert "right 8" not in message


def test_the_numbers_tell_the_ways_apart():
    values = [str(wrong) for wrong, _ in WRONG_HALVES]
    assert len(set(values)) == len(values)
    assert ch11.SUMMANDS.sum(0).tolist() == RIGHT["after_reduce_scatter"]


# ---- 11.2 -----------------------------------------------------------------------------------------------------------


def by_loop(x, norm_1, attention, norm_2, ffn):
    for norm, part in ((norm_1, attention), (norm_2, ffn)):
        x = x + reduce_scatter_sequence(part(gather_sequence(norm(x)))) + part.bias
    return x


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, dy):
        parts = [part.contiguous() for part in dy.chunk(dist.get_world_size(), 1)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own

    @staticmethod
    def backward(ctx, dy):
        parts = [torch.empty_like(dy) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, dy.contiguous())
        return torch.cat(parts, 1)


def by_torchs_own(x, norm_1, attention, norm_2, ffn):
    attended = Scatter.apply(attention(Gather.apply(norm_1(x))))
    x = attended + attention.bias + x
    return x + (Scatter.apply(ffn(Gather.apply(norm_2(x)))) + ffn.bias)


@pytest.mark.parametrize("layer", [by_loop, by_torchs_own])
def test_a_layer_of_slices_passes(layer, capsys):
    passes(capsys, "11.2", layer)


def each_block(block):
    return lambda x, n1, a, n2, m: block(block(x, n1, a), n2, m)


WRONG_LAYERS = {
    "split": (
        each_block(
            lambda x, n, p: x + reduce_scatter_sequence(p(gather_sequence(n(x), replicated_consumer=True))) + p.bias
        ),
        ch11.SPLIT_BACK,
    ),
    "copy too": (
        each_block(lambda x, n, p: x + reduce_scatter_sequence(p(copy_to_tp(gather_sequence(n(x))))) + p.bias),
        ch11.COPY_TOO,
    ),
    "all-reduce, then cut": (
        each_block(lambda x, n, p: x + scatter_sequence(reduce_from_tp(p(gather_sequence(n(x))))) + p.bias),
        ch11.REDUCED_THEN_CUT,
    ),
    "gathered before the norm": (
        each_block(lambda x, n, p: x + reduce_scatter_sequence(p(n(gather_sequence(x)))) + p.bias),
        "saw 4 tokens of each sequence, and this rank has 2: it was gathered too early",
    ),
    "no bias": (each_block(lambda x, n, p: x + reduce_scatter_sequence(p(gather_sequence(n(x))))), ch11.NO_BIAS),
    "bias in the sum": (
        each_block(lambda x, n, p: x + reduce_scatter_sequence(p(gather_sequence(n(x))) + p.bias)),
        ch11.BIAS_IN_SUM,
    ),
    "f and g": (each_block(lambda x, n, p: x + reduce_from_tp(p(copy_to_tp(n(x)))) + p.bias), "Y on rank"),
    "norms swapped": (lambda x, n1, a, n2, m: by_loop(x, n2, a, n1, m), ch11.SWAPPED),
    "not cut": (
        lambda x, n1, a, n2, m: gather_sequence(by_loop(x, n1, a, n2, m)),
        "Y has shape [2, 4, 8], not [2, 2, 8]",
    ),
    "no gradient": (lambda x, n1, a, n2, m: by_loop(x, n1, a, n2, m).detach(), "Y has no gradient"),
}


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_wrong_layers_of_slices_hear_why(name):
    layer, said = WRONG_LAYERS[name]
    refused(said, "11.2", layer)


# ---- 11.3 -----------------------------------------------------------------------------------------------------------


def by_name(grads):
    return {name: all_reduce(grad) if name in ch11.PARTS else grad for name, grad in grads.items()}


def in_place(grads):
    for name in ("norm.weight", "norm.bias", "o_proj.bias", "positions.weight"):
        dist.all_reduce(grads[name])
    return grads


def as_one(grads):
    names = [name for name in grads if name.startswith(("norm", "positions")) or name == "o_proj.bias"]
    whole = all_reduce(torch.cat([grads[name].flatten() for name in names]))
    pieces = whole.split([grads[name].numel() for name in names])
    return grads | {name: piece.view_as(grads[name]) for name, piece in zip(names, pieces)}


@pytest.mark.parametrize("finalize", [by_name, in_place, as_one])
def test_the_sum_of_the_parts_passes(finalize, capsys):
    passes(capsys, "11.3", finalize)


def without(*forgotten):
    return lambda grads: {
        name: all_reduce(g) if name in ch11.PARTS and name not in forgotten else g for name, g in grads.items()
    }


def and_also(*more):
    return lambda grads: {name: all_reduce(g) if name in (*ch11.PARTS, *more) else g for name, g in grads.items()}


WRONG_SUMS = {
    "mean": (lambda g: {n: all_reduce(x, "avg") if n in ch11.PARTS else x for n, x in g.items()}, ch11.MEAN),
    "everything": (lambda g: {n: all_reduce(x) for n, x in g.items()}, ch11.SHARES_ADDED),
    "mean of everything": (lambda g: {n: all_reduce(x, "avg") for n, x in g.items()}, ch11.MEAN),
    "all vectors": (
        lambda g: {n: all_reduce(x) if x.dim() == 1 or n in ch11.PARTS else x for n, x in g.items()},
        ch11.SHARES_ADDED,
    ),
    "nothing": (lambda g: g, ch11.FORGOTTEN["positions.weight"]),
    "no positions": (without("positions.weight"), ch11.FORGOTTEN["positions.weight"]),
    "no gamma": (without("norm.weight"), ch11.FORGOTTEN["norm.weight"]),
    "no beta": (without("norm.bias"), ch11.FORGOTTEN["norm.bias"]),
    "no row bias": (without("o_proj.bias"), ch11.FORGOTTEN["o_proj.bias"]),
    "column bias too": (and_also("qkv.bias"), ch11.SHARES_ADDED),
    "weight too": (and_also("o_proj.weight"), ch11.SHARES_ADDED),
    "QK-norm too": (and_also("q_norm.weight"), ch11.WHOLE_ALREADY),
    "sums that are dropped": (
        lambda g: {n: all_reduce(x) if n in ch11.PARTS else (all_reduce(x), x)[1] for n, x in g.items()},
        "Sum what is a part, and send nothing for the rest",
    ),
    "parts only": (lambda g: {n: all_reduce(g[n]) for n in ch11.PARTS}, "returned no qkv.weight"),
    "a list": (lambda g: list(g.values()), "it should return the gradients by name"),
}


@pytest.mark.parametrize("name", WRONG_SUMS)
def test_wrong_sums_hear_why(name):
    finalize, said = WRONG_SUMS[name]
    refused(said, "11.3", finalize)


# ---- 11.4 -----------------------------------------------------------------------------------------------------------


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_r, weight):
        ctx.save_for_backward(x_r, weight)
        return all_gather(x_r, 1) @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x_r, weight = ctx.saved_tensors
        x, gathered = all_gather_async(x_r, 1)
        dx_r = reduce_scatter(dy @ weight, 1)
        gathered.wait()
        return dx_r, dy.flatten(0, 1).T @ x.flatten(0, 1)


class OnTorch(torch.autograd.Function):
    @staticmethod
    def whole(x_r):
        parts = [torch.empty_like(x_r) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x_r.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def forward(ctx, x_r, weight):
        ctx.save_for_backward(x_r, weight)
        return linear(OnTorch.whole(x_r), weight)

    @staticmethod
    def backward(ctx, dy):
        x_r, weight = ctx.saved_tensors
        parts = [part.contiguous() for part in (dy @ weight).chunk(dist.get_world_size(), 1)]
        dx_r = torch.empty_like(x_r)
        dist.reduce_scatter(dx_r, parts)
        return dx_r, torch.einsum("bsf,bsh->fh", dy, OnTorch.whole(x_r))


@pytest.mark.parametrize("node", [Node, OnTorch])
def test_a_column_that_keeps_its_slice_passes(node, capsys):
    passes(capsys, "11.4", node.apply)


def variant(keep="slice", dx="scatter", dw="whole"):
    class Variant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x_r, weight):
            x = all_gather(x_r, 1)
            ctx.save_for_backward(x if keep == "whole" else x_r, weight)
            ctx.hidden = x if keep == "hidden" else None
            return x @ weight.T

        @staticmethod
        def backward(ctx, dy):
            kept, weight = ctx.saved_tensors
            x = {"slice": lambda: all_gather(kept, 1), "whole": lambda: kept, "hidden": lambda: ctx.hidden}[keep]()
            parts = dy @ weight
            own = parts.chunk(group_size(), 1)[group_rank()]
            if dx == "scatter":
                own = reduce_scatter(parts, 1)
            elif dx == "reduce":
                own = all_reduce(parts).chunk(group_size(), 1)[group_rank()]
            if dw == "own":
                dy, x = dy.chunk(group_size(), 1)[group_rank()], kept
            dweight = dy.flatten(0, 1).T @ x.flatten(0, 1)
            return own, all_reduce(dweight) if dw == "summed" else dweight

    return Variant.apply


WRONG_COLUMNS = {
    "gather, then linear": (lambda x_r, w: linear(gather_sequence(x_r), w), "The gathered X is kept"),
    "whole saved": (variant(keep="whole"), "The gathered X is kept"),
    "whole on ctx": (variant(keep="hidden"), ch11.HIDDEN),
    "own part of dX": (variant(dx="own"), ch11.OWN_PART),
    "all-reduce of dX": (variant(dx="reduce"), ch11.REDUCED_DX),
    "dW of own tokens": (variant(dw="own"), ch11.OWN_TOKENS_ONLY),
    "no gradient": (lambda x_r, w: all_gather(x_r.detach(), 1) @ w.detach().T, "Y_r has no gradient"),
    "own tokens only": (lambda x_r, w: linear(x_r, w), "all tokens, this rank's columns"),
    "dW cut off": (lambda x_r, w: linear(gather_sequence(x_r), w.detach()), "no gradient comes back to weight"),
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_wrong_columns_hear_why(name):
    column, said = WRONG_COLUMNS[name]
    refused(said, "11.4", column)


# ---- 11.5 -----------------------------------------------------------------------------------------------------------


def two_gathers(x_r, gate, weight):
    for_all = gather_sequence(x_r, replicated_consumer=True)
    return linear(for_all, gate).softmax(-1), linear(gather_sequence(x_r), weight)


class OneGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_r):
        whole = all_gather(x_r, 1)
        return whole, whole.clone()

    @staticmethod
    def backward(ctx, d_alike, d_own_way):
        own = d_alike.chunk(group_size(), 1)[group_rank()]
        return own + reduce_scatter(d_own_way, 1)


def one_gather(x_r, gate, weight):
    for_all, for_columns = OneGather.apply(x_r)
    return torch.softmax(for_all @ gate.T, -1), for_columns @ weight.T


def shared_out(x_r, gate, weight):
    """One gather with a reduce-scatter behind it: of the router's gradient each rank gives a t-th."""
    whole = gather_sequence(x_r)
    t = group_size()
    for_router = whole / t + (whole - whole / t).detach()
    logits = linear(whole.detach(), gate) + linear(for_router - for_router.detach(), gate.detach())
    return logits.softmax(-1), linear(whole, weight)


@pytest.mark.parametrize("answer", [two_gathers, one_gather, shared_out])
def test_both_readers_pass(answer, capsys):
    passes(capsys, "11.5", answer)


def one_for_both(replicated_consumer):
    def answer(x_r, gate, weight):
        x = gather_sequence(x_r, replicated_consumer=replicated_consumer)
        return linear(x, gate).softmax(-1), linear(x, weight)

    return answer


def averaged(x_r, gate, weight):
    p, y = one_for_both(False)(x_r, gate, weight)
    x_r.register_hook(lambda dx: dx / group_size())
    return p, y


def gate_summed(x_r, gate, weight):
    return linear(gather_sequence(x_r, replicated_consumer=True), copy_to_tp(gate)).softmax(-1), linear(
        gather_sequence(x_r), weight
    )


WRONG_READERS = {
    "reduce-scatter for both": (one_for_both(False), "The router's share of it is in there 2 times"),
    "split for both": (one_for_both(True), ch11.COLUMN_LOST),
    "averaged": (averaged, ch11.AVERAGED),
    "router detached": (
        lambda x, g, w: (linear(gather_sequence(x.detach()), g).softmax(-1), linear(gather_sequence(x), w)),
        ch11.NO_ROUTER,
    ),
    "gate summed": (gate_summed, ch11.GATE_SUMMED),
    "own tokens": (lambda x, g, w: (linear(x, g).softmax(-1), linear(gather_sequence(x), w)), "all tokens"),
    "one tensor": (lambda x, g, w: linear(gather_sequence(x), w), "returns two tensors"),
}


@pytest.mark.parametrize("name", WRONG_READERS)
def test_wrong_readers_hear_why(name):
    answer, said = WRONG_READERS[name]
    refused(said, "11.5", answer)
