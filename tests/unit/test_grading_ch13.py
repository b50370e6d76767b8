"""Exercises 13.1 to 13.3: right answers in several styles pass, each wrong one hears what is wrong with it."""

import pytest
import torch
import torch.distributed as dist
from checking import passes, refused

from tpcode.comm import all_gather, all_reduce, all_reduce_async, reduce_scatter
from tpcode.grading import ch13

# ---- 13.1 -----------------------------------------------------------------------------------------------------------

NEEDS = {step: sorted(needs) for step, needs in ch13.NEEDS.items()}
BEHIND = {
    "gather X": [],
    "reduce-scatter Y": [],
    "gather dY": [],
    "gather X again": ["dZ", "dB", "dX"],
    "reduce-scatter dX": ["dB", "dA"],
}


@pytest.mark.parametrize(
    "needs, behind",
    [
        (NEEDS, BEHIND),
        ({step: set(needs) for step, needs in NEEDS.items()}, {step: tuple(x[::-1]) for step, x in BEHIND.items()}),
        (NEEDS | {"H": "gather X", "dX": "dH"}, BEHIND | {"gather X": set()}),
    ],
    ids=["lists", "sets and tuples", "a bare name"],
)
def test_graphs_pass(needs, behind, capsys):
    passes(capsys, "13.1", needs, behind)


WRONG_NEEDS = [
    ({"dA": ["dH"]}, ch13.A_MISSING["dA", "gather X again"]),
    ({"dA": ["gather X again"]}, ch13.A_MISSING["dA", "dH"]),
    ({"dA": ["dH", "X_r"]}, ch13.A_MISSING["dA", "gather X again"]),
    ({"dB": ["gather dY"]}, ch13.A_MISSING["dB", "Z"]),
    ({"dB": ["dY_r", "Z"]}, ch13.A_MISSING["dB", "gather dY"]),
    ({"dH": ["dZ"]}, ch13.A_MISSING["dH", "H"]),
    ({"reduce-scatter dX": ["dX", "dA"]}, ch13.SCATTER_NEEDS_DA),
    ({"gather X again": ["X_r", "dY_r"]}, ch13.X_AGAIN_NEEDS),
    ({"gather X again": ["gather dY"]}, ch13.X_AGAIN_NEEDS),
    ({"next H": ["reduce-scatter Y", "Y"]}, "Only what it needs directly: Y comes by a detour."),
    ({"next H": ["Y"]}, "needs['next H'] lacks a step."),
    ({"Z": ["H", "dZ"]}, "needs['Z'] has one too many."),
    ({"Z": ["h"]}, "'h' is no step"),
    ({"Z": 3}, "should be a list of names; it is 3"),
]


@pytest.mark.parametrize("wrong, said", WRONG_NEEDS)
def test_wrong_edges_hear_why(wrong, said):
    refused(said, "13.1", NEEDS | wrong, BEHIND)


WRONG_BEHIND = [
    ({"reduce-scatter Y": ["next H"]}, ch13.NEXT_LAYER),
    ({"reduce-scatter Y": ["Y"]}, ch13.OWN_INPUT.format(step="Y")),
    ({"gather X": ["H"]}, ch13.OWN_OUTPUT.format(step="H")),
    ({"gather dY": ["dA"]}, ch13.OWN_OUTPUT.format(step="dA")),
    ({"gather X again": ["dZ", "dB", "dX", "dA"]}, ch13.OWN_OUTPUT.format(step="dA")),
    ({"reduce-scatter dX": ["dB", "dA", "dX"]}, ch13.OWN_INPUT.format(step="dX")),
    ({"reduce-scatter dX": ["dA"]}, ch13.ONE_MORE),
    ({"reduce-scatter dX": []}, ch13.ONE_MORE),
    ({"gather X again": ["dX"]}, ch13.ONE_MORE),
    ({"reduce-scatter dX": ["dA", "dB", "next H"]}, ch13.OTHER_PASS.format(step="next H")),
    ({"reduce-scatter dX": ["dA", "dH"]}, "'dH' is none of the products"),
]


@pytest.mark.parametrize("wrong, said", WRONG_BEHIND)
def test_wrong_hiding_places_hear_why(wrong, said):
    refused(said, "13.1", NEEDS, BEHIND | wrong)


def test_an_unfilled_graph_is_told_where():
    refused("not filled in yet: replace None in needs", "13.1", NEEDS | {"Z": None}, BEHIND)
    refused("not filled in yet: replace None in behind", "13.1", NEEDS, BEHIND | {"reduce-scatter Y": None})
    refused("behind has no gather X", "13.1", NEEDS, {})
    refused("needs should be a dictionary", "13.1", [], BEHIND)


# ---- 13.2 -----------------------------------------------------------------------------------------------------------


def weight_gradients(dy_r, x):
    tokens = dy_r.flatten(0, 1)
    return tokens.T @ x.flatten(0, 1), tokens.sum(0)


def by_the_package(dy_r, x, weight):
    dx, handle = all_reduce_async(dy_r @ weight)
    dweight, dbias = weight_gradients(dy_r, x)
    handle.wait()
    return dx, dweight, dbias


def by_torch_in_place(dy_r, x, weight):
    tokens = dy_r.reshape(-1, dy_r.shape[-1])
    dx = torch.mm(tokens, weight)
    work = dist.all_reduce(dx, async_op=True)
    dbias = tokens.sum(0)
    dweight = torch.mm(x.reshape(-1, x.shape[-1]).t(), tokens).t()
    work.wait()
    return [dx.view_as(x), dweight, dbias]


def by_einsum(dy_r, x, weight):
    dx, handle = all_reduce_async(torch.einsum("bsf,fh->bsh", dy_r, weight))
    dweight = torch.einsum("bsf,bsh->fh", dy_r, x)
    handle.wait()
    return dx, dweight, dy_r.sum((0, 1))


@pytest.mark.parametrize("style", [by_the_package, by_torch_in_place, by_einsum])
def test_asynchronous_backwards_pass(style, capsys):
    passes(capsys, "13.2", style)


def blocking(dy_r, x, weight):
    return all_reduce(dy_r @ weight), *weight_gradients(dy_r, x)


def waits_at_once(dy_r, x, weight):
    dx, handle = all_reduce_async(dy_r @ weight)
    handle.wait()
    return dx, *weight_gradients(dy_r, x)


def launches_late(dy_r, x, weight):
    dweight, dbias = weight_gradients(dy_r, x)
    dx, handle = all_reduce_async(dy_r @ weight)
    handle.wait()
    return dx, dweight, dbias


def never_waits(dy_r, x, weight):
    dx, _ = all_reduce_async(dy_r @ weight)
    return dx, *weight_gradients(dy_r, x)


def sends_nothing(dy_r, x, weight):
    return dy_r @ weight, *weight_gradients(dy_r, x)


def returns_its_part(dy_r, x, weight):
    part = dy_r @ weight
    _, handle = all_reduce_async(part)
    dweight, dbias = weight_gradients(dy_r, x)
    handle.wait()
    return part, dweight, dbias


def sums_dw_too(dy_r, x, weight):
    dx, handle = all_reduce_async(dy_r @ weight)
    dweight, dbias = weight_gradients(dy_r, x)
    handle.wait()
    return dx, all_reduce(dweight), dbias


def gathers(dy_r, x, weight):
    parts = all_gather((dy_r @ weight).unsqueeze(0), 0)
    return parts.sum(0), *weight_gradients(dy_r, x)


def scatters(dy_r, x, weight):
    return reduce_scatter((dy_r @ weight).repeat(dist.get_world_size(), 1, 1), 0), *weight_gradients(dy_r, x)


def by_outer_products(dy_r, x, weight):
    dx, handle = all_reduce_async(dy_r @ weight)
    dweight = (dy_r.unsqueeze(-1) * x.unsqueeze(-2)).sum((0, 1))
    handle.wait()
    return dx, dweight, dy_r.sum((0, 1))


WRONG_BACKWARDS = {
    blocking: ch13.TOO_EARLY,
    waits_at_once: ch13.TOO_EARLY,
    launches_late: ch13.TOO_LATE,
    never_waits: ch13.NEVER,
    sends_nothing: ch13.NOTHING_SENT,
    returns_its_part: ch13.PARTS,
    sums_dw_too: ch13.SENT_TWICE.format(n=2, rank=0),
    gathers: ch13.OTHER_OP.format(op="all_gather"),
    scatters: ch13.OTHER_OP.format(op="reduce_scatter"),
    by_outer_products: ch13.NO_PRODUCT,
    lambda dy_r, x, weight: dy_r @ weight: "returns dX, dW and dbias",
}


@pytest.mark.parametrize("wrong, said", WRONG_BACKWARDS.items(), ids=lambda one: getattr(one, "__name__", None))
def test_wrong_backwards_hear_why(wrong, said):
    refused(said, "13.2", wrong)


# ---- 13.3 -----------------------------------------------------------------------------------------------------------

RANKING = ["repair", "tp 2, dp 2", "asynchronous", "chunks", "merge"]


def closed_forms(layer):
    """The chunks' time by cases instead of by a loop."""
    a, alpha = layer["all-reduce"], layer["alpha"]
    wire, c = a - alpha, 4
    chunked = 0
    for product in layer["before sum"]:
        part, each = product / c, alpha + wire / c
        chunked += product + a - (part + c * each if each >= part else c * part + each)
    return {
        "asynchronous": min(a, layer["wgrad"][0]) + min(a, layer["wgrad"][1]),
        "chunks": chunked,
        "merge": 4 * a - 2 * (alpha + 2 * wire),
        "tp 2, dp 2": 4 * a - 4 * (alpha + wire / 3) - layer["replicas"],
        "repair": 3 * wire,
    }


@pytest.mark.parametrize("style", [closed_forms, ch13.saved], ids=["closed forms", "loop"])
def test_gains_pass(style, capsys):
    passes(capsys, "13.3", style, RANKING)
    passes(capsys, "13.3", style, tuple(RANKING))


WRONG_GAINS = [(remedy, name) for remedy, texts in ch13.TIMES.items() for name in texts]


@pytest.mark.parametrize("remedy, mistake", WRONG_GAINS)
def test_each_mistake_hears_why(remedy, mistake):
    """The layers tell each mistake from what is right and from the other mistakes."""

    def gains(layer):
        return ch13.saved(layer) | {remedy: ch13.mistakes(layer)[remedy][mistake]}

    refused(ch13.TIMES[remedy][mistake], "13.3", gains, RANKING)


@pytest.mark.parametrize("remedy", ch13.REMEDIES)
def test_a_loss_is_no_gain(remedy):
    refused(
        "before less after", "13.3", lambda layer: ch13.saved(layer) | {remedy: -ch13.saved(layer)[remedy]}, RANKING
    )


def test_every_mistake_has_a_text_and_every_text_a_mistake():
    for layer in ch13.LAYERS:
        assert {remedy: set(wrong) for remedy, wrong in ch13.mistakes(layer).items()} == {
            remedy: set(texts) for remedy, texts in ch13.TIMES.items()
        }
        assert 4 * layer["all-reduce"] == pytest.approx(0.4 * (4 * layer["all-reduce"] + layer["products"]))


@pytest.mark.parametrize(
    "ranking, said",
    [
        (["merge", *RANKING[:-1]], ch13.MERGE_ABOVE),
        (["tp 2, dp 2", "repair", *RANKING[2:]], ch13.ORDER),
        (RANKING[::-1], ch13.MERGE_ABOVE),
        (RANKING[:-1], "each of the five once"),
        ([*RANKING[:-1], "SP"], "each of the five once"),
    ],
)
def test_wrong_rankings_hear_why(ranking, said):
    refused(said, "13.3", closed_forms, ranking)


def test_unfilled_gains_are_told_where():
    refused("not filled in yet: replace None in ranking", "13.3", closed_forms, [None])
    unfilled = dict.fromkeys(ch13.REMEDIES)
    refused("not filled in yet: replace None in gains, at 'asynchronous'", "13.3", lambda layer: unfilled, RANKING)
    refused("gains has no 'chunks'", "13.3", lambda layer: {"asynchronous": 3.5}, RANKING)
    refused("gains should return a dictionary; it returned None", "13.3", lambda layer: None, RANKING)
    refused("should be a number, in ms", "13.3", lambda layer: ch13.saved(layer) | {"merge": "small"}, RANKING)
