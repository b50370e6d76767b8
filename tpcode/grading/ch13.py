"""Chapter 13, overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from tpcode.comm import group_rank, group_size
from tpcode.comm.timeline import Span, timeline
from tpcode.grading.answers import blanks
from tpcode.grading.compare import compare, looks_like
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_returned
from tpcode.grading.registry import exercise

# ---- 13.1 -----------------------------------------------------------------------------------------------------------

# A block with sequence parallelism; the next block's first product, too. Right answers: what each step needs.
NEEDS = {
    "gather X": {"X_r"},
    "H": {"gather X"},
    "Z": {"H"},
    "Y": {"Z"},
    "reduce-scatter Y": {"Y"},
    "next H": {"reduce-scatter Y"},
    "gather dY": {"dY_r"},
    "dZ": {"gather dY"},
    "dB": {"gather dY", "Z"},
    "dH": {"dZ", "H"},
    "gather X again": {"X_r"},
    "dX": {"dH"},
    "reduce-scatter dX": {"dX"},
    "dA": {"dH", "gather X again"},
}
FORWARD = ("gather X", "H", "Z", "Y", "reduce-scatter Y", "next H")
COLLECTIVES = ("gather X", "reduce-scatter Y", "gather dY", "gather X again", "reduce-scatter dX")
PRODUCTS = ("H", "Y", "next H", "dZ", "dB", "dX", "dA")
STEPS = (*NEEDS, "X_r", "dY_r")

A_MISSING = {
    ("dA", "gather X again"): "dA = Xᵀ dH sums over all tokens, and the layer kept its own alone.",
    ("dA", "dH"): "dA = Xᵀ dH is of the first product's weight, and starts from that product's output.",
    ("dB", "Z"): "dB = Zᵀ dY: two factors.",
    ("dB", "gather dY"): "dB = Zᵀ dY sums over all tokens, and dY comes in slices.",
    ("dH", "H"): "dH = dZ where the activation lets it pass, and that depends on H.",
}
SCATTER_NEEDS_DA = "What is summed and scattered is dX. dA stays on its rank, and goes nowhere."
X_AGAIN_NEEDS = "It gathers the slices of X that forward kept. They were there before backward began."
NEXT_LAYER = (
    "the next layer's product needs Y, and the sum is on its way to it. It would have to begin without its input."
)
OWN_INPUT = "{step} is what the collective sends, or comes before that: it is done when the collective starts."
OWN_OUTPUT = "{step} needs the collective's result, directly or by a detour."
OTHER_PASS = "{step} belongs to the other pass: between forward and backward lie the layers above, and the loss."
ONE_MORE = (
    "one more product could run meanwhile: it neither needs the collective nor feeds it. A weight's gradient may wait "
    "as long as it likes; look at what its factors are, and when they are there."
)
NO_SUCH = "{step!r} is none of the products: {products}."


@exercise("13.1")
def what_hides_behind_what(needs: Mapping, behind: Mapping) -> str:
    """`needs`: by step what it needs directly. `behind`: by collective the products that may run meanwhile."""
    for name, given, wanted in (("needs", needs, NEEDS), ("behind", behind, COLLECTIVES)):
        if not isinstance(given, Mapping):
            raise Wrong(f"{name} should be a dictionary; it is {given!r:.60}.")
        if missing := [step for step in wanted if step not in given]:
            raise Wrong(f"{name} has no {', '.join(missing)}.")
    for step, right in NEEDS.items():
        _require_needs(step, _names(f"needs[{step!r}]", needs[step]), right)
    for step in COLLECTIVES:
        _require_behind(step, _names(f"behind[{step!r}]", behind[step]))
    return "forward nothing hides; backward the second gather and the reduce-scatter do."


def _names(where: str, answer) -> set[str]:
    answer = [answer] if isinstance(answer, str) else answer
    if not isinstance(answer, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in answer):
        raise Wrong(f"{where} should be a list of names; it is {answer!r:.60}.")
    return set(answer)


def _require_needs(step: str, given: set[str], right: set[str]) -> None:
    if unknown := sorted(given - set(STEPS)):
        raise Wrong(f"needs[{step!r}]: {unknown[0]!r} is no step; there are {', '.join(STEPS)}.")
    if given == right:
        return
    why = next((text for (name, lacking), text in A_MISSING.items() if name == step and lacking not in given), "")
    if step == "reduce-scatter dX" and "dA" in given:
        why = SCATTER_NEEDS_DA
    if step == "gather X again" and given - right:
        why = X_AGAIN_NEEDS
    detours = {one for one in given - right if any(one in needed_by(NEEDS, other) for other in given & right)}
    if given - right == detours and right <= given:
        why = f"Only what it needs directly: {', '.join(sorted(detours))} comes by a detour."
    lack = "lacks a step" if right - given else "has one too many"
    raise Wrong(f"needs[{step!r}] {lack}. {why}".rstrip())


def _require_behind(step: str, given: set[str]) -> None:
    for one in sorted(given):
        if one not in PRODUCTS:
            raise Wrong(f"behind[{step!r}]: " + NO_SUCH.format(step=one, products=", ".join(PRODUCTS)))
        if (one in FORWARD) != (step in FORWARD):
            raise Wrong(f"behind[{step!r}]: " + OTHER_PASS.format(step=one))
        if step == "reduce-scatter Y" and one == "next H":
            raise Wrong(f"behind[{step!r}]: {NEXT_LAYER}")
        if one in needed_by(NEEDS, step):
            raise Wrong(f"behind[{step!r}]: " + OWN_INPUT.format(step=one))
        if step in needed_by(NEEDS, one):
            raise Wrong(f"behind[{step!r}]: " + OWN_OUTPUT.format(step=one))
    if given != free_during(step):
        raise Wrong(f"behind[{step!r}]: {ONE_MORE}")


def needed_by(needs: Mapping[str, set[str]], step: str) -> set[str]:
    """All that a step needs, directly or by a detour."""
    direct = needs.get(step, set())
    return direct.union(*(needed_by(needs, one) for one in direct))


def free_during(collective: str) -> set[str]:
    """The products of the same pass that may run while this collective does."""
    return {
        one
        for one in PRODUCTS
        if (one in FORWARD) == (collective in FORWARD)
        and one not in needed_by(NEEDS, collective)
        and collective not in needed_by(NEEDS, one)
    }


# ---- 13.2 -----------------------------------------------------------------------------------------------------------

NOTHING_SENT = "Each rank has a part of dX; they must be summed, and your function made no collective."
SENT_TWICE = "it made {n} collectives on rank {rank}, and one is enough: dX is summed, dW and dbias are whole."
OTHER_OP = "it called {op}. Each rank needs all of dX: that is one all-reduce of the parts."
TOO_LATE = (
    "dX's sum is launched after dW's product: nothing is left to hide it. Make dX first, launch its sum, then multiply."
)
TOO_EARLY = (
    "the sum is waited for before dW's product. Between launch and wait nothing runs: that is a blocking all-reduce, "
    "whether in one line or in two. Launch it asynchronously, multiply, and wait then."
)
NEVER = (
    "nobody waits for the sum. The function may return before it is done, and its caller would read half of it; right "
    "numbers here are luck. Call wait() on the handle, after dW's product."
)
NO_PRODUCT = "no product with an output of dW's shape was made: is dW one matrix product over all tokens?"
PARTS = "The sum was launched, and the parts returned: all_reduce_async gives a new tensor beside its handle."


@exercise("13.2")
def asynchronous_column_backward(column_backward: Callable) -> str:
    """`column_backward(dy_r, x, weight)`: [b, s, F/t], [b, s, h], [F/t, h] -> dX, dW, dbias."""
    for t in SIZES:
        got = on_ranks(_backward_job, t, column_backward)
        require_returned(column_backward, [mine["returned"] for mine in got])
        for rank, mine in enumerate(got):
            if not isinstance(mine["returned"], tuple | list) or len(mine["returned"]) != 3:
                raise Wrong(f"column_backward returns dX, dW and dbias; on rank {rank} it returned something else.")
        if t > 1:
            for rank, mine in enumerate(got):
                _require_one_all_reduce(mine["spans"], rank)
        named = [dict(zip(("dX", "dW", "dbias"), mine["returned"])) for mine in got]
        compare(named, [_right(rank, t)[0] for rank in range(t)], t=t, symptoms=_symptoms(t))
        if t > 1:
            for rank, mine in enumerate(got):
                _require_order(mine["spans"], rank, t)
    return "gradients as of the dense layer at t = 1, 2 and 4; launched before dW's product, waited for after it."


@cache
def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(13)
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 3, 8), (2, 3, 6), (8, 6))
    )  # dY, X, W


def _backward_job(column_backward: Callable) -> dict:
    dy, x, weight = _inputs()
    r, t = group_rank(), group_size()
    own_dy, own_weight = dy.chunk(t, -1)[r].clone(), weight.chunk(t)[r].clone()
    with timeline() as seen:
        returned = column_backward(own_dy, x.clone(), own_weight)
        if isinstance(returned, tuple | list):
            returned = tuple(one.detach().clone() if isinstance(one, Tensor) else one for one in returned)
        spans = seen.spans
    if t > 1:
        dist.barrier()  # a sum that nobody waited for ends before the next job begins
    return {"returned": returned, "spans": spans}


@cache
def _right(rank: int, t: int) -> tuple[dict, Tensor]:
    """What belongs on a rank, and its part of dX."""
    dy, x, weight = _inputs()
    own_dy, own_weight = dy.chunk(t, -1)[rank], weight.chunk(t)[rank]
    tokens = own_dy.flatten(0, 1)
    right = {"dX": dy @ weight, "dW": tokens.T @ x.flatten(0, 1), "dbias": tokens.sum(0)}
    return right, own_dy @ own_weight


def _symptoms(t: int) -> list:
    parts = [_right(rank, t)[1] for rank in range(t)]
    return [looks_like({"dX": parts}, PARTS, per_rank=True)]


def _require_one_all_reduce(spans: Sequence[Span], rank: int) -> None:
    sent = [span for span in spans if span.kind == "collective"]
    if not sent:
        raise Wrong(NOTHING_SENT)
    if len(sent) > 1:
        raise Wrong(SENT_TWICE.format(n=len(sent), rank=rank))
    if sent[0].name != "all_reduce":
        raise Wrong(OTHER_OP.format(op=sent[0].name))
    if not any(span.kind == "wait" for span in spans):
        raise Wrong(NEVER)


def _require_order(spans: Sequence[Span], rank: int, t: int) -> None:
    """Launch, then dW's product, then wait. dW's product is the one whose output is [F/t, h], or that transposed."""
    launch = next(span.start for span in spans if span.kind == "collective")
    wait = next(span.start for span in spans if span.kind == "wait")
    shapes = ([8 // t, 6], [6, 8 // t])
    wgrad = [span.start for span in spans if span.kind == "product" and _output(span.name) in shapes]
    if not wgrad:
        raise Wrong(NO_PRODUCT)
    if wgrad[-1] < launch:
        raise Wrong(f"on rank {rank} at t = {t} {TOO_LATE}")
    if wait < wgrad[-1]:
        raise Wrong(f"on rank {rank} at t = {t} {TOO_EARLY}")


def _output(shapes: str) -> list[int]:
    """Rows and columns of the product "[a, b] [b, c]"."""
    left, right = (part.strip("[]").split(", ") for part in shapes.split("] ["))
    return [int(left[-2]), int(right[-1])]


# ---- 13.3 -----------------------------------------------------------------------------------------------------------

LAYERS = (
    {
        "products": 18.0,
        "wgrad": [2.5, 1.0],
        "before sum": [1.2, 2.4],
        "all-reduce": 3.0,
        "alpha": 0.04,
        "replicas": 0.5,
    },
    {
        "products": 30.0,
        "wgrad": [6.0, 2.0],
        "before sum": [3.5, 7.0],
        "all-reduce": 5.0,
        "alpha": 0.20,
        "replicas": 1.5,
    },
)
REMEDIES = ("asynchronous", "chunks", "merge", "tp 2, dp 2", "repair")

TIMES = {
    "merge": {
        "half": "That saves two whole all-reduces. The merged ones are twice as large: the bytes stay, two alphas go.",
        "all": "Four became two: two alphas are saved, not four.",
        "one": "Four became two: two alphas are saved, not one.",
    },
    "asynchronous": {
        "all four": "Forward nothing hides: only the two backward sums do.",
        "unbounded": "A sum hides no more than the product behind which it runs takes: min(all-reduce, wgrad), each.",
        "products": "More than the sum itself cannot be hidden: min(all-reduce, wgrad), each.",
    },
    "chunks": {
        "whole": "The first chunk's product runs beside an idle wire: (c - 1)/c of a product hides, not all.",
        "no alpha": "Each chunk is a call with an alpha of its own: c - 1 more for each sum.",
        "one alpha": "With c chunks there are c - 1 alphas more for each sum, not one.",
        "backward": "The chunks are of the forward sums. What backward hides is the other remedy.",
        "wire": "Where a product's part takes longer than a chunk's sum, the wire waits: all but the last sum hide.",
    },
    "tp 2, dp 2": {
        "tokens": "Half of the tokens, yes. But the ring's factor 2(t-1)/t changes as well, from 3/2 to 1.",
        "factor": "The ring's factor, yes. But each group sees half of the sequences, too.",
        "no dp": "The gradients' sum over the two replicas is not free: the layer pays `replicas` for it.",
        "alpha scaled": "Alpha is a latency: it does not shrink with the bytes.",
    },
    "repair": {
        "alpha scaled": "Alpha is a latency: a faster link divides the rest.",
        "one": "All four sums go over the link.",
    },
}
ORDER = "the ranking is not the order of your own numbers for the first layer, largest gain first."
MERGE_ABOVE = "Merging is above a remedy that saves more: it saves alphas, and bytes take the time."


@exercise("13.3")
def five_remedies(gains: Callable, ranking: Sequence) -> str:
    """`gains(layer)`: by remedy the ms that it saves of a layer. `ranking`: the remedies, best first, for the first."""
    for layer in LAYERS:
        got = gains(dict(layer))
        if not isinstance(got, Mapping):
            raise Wrong(f"gains should return a dictionary; it returned {got!r:.60}.")
        right, wrong = saved(layer), mistakes(layer)
        for remedy in REMEDIES:
            if remedy not in got:
                raise Wrong(f"gains has no {remedy!r}.")
            if stub := blanks(got[remedy]):
                raise Unfilled(f"replace {stub} in gains, at {remedy!r}.")
            _require_gain(remedy, got[remedy], right[remedy], wrong[remedy], layer)
    best_first = sorted(REMEDIES, key=saved(LAYERS[0]).get, reverse=True)
    given = list(ranking)
    if sorted(map(str, given)) != sorted(REMEDIES):
        raise Wrong(f"ranking has each of the five once: {', '.join(REMEDIES)}.")
    if given != best_first:
        raise Wrong(ORDER + (f" {MERGE_ABOVE}" if given[-1] != "merge" else ""))
    return "the link first, then a smaller t; merging last, by far."


def _require_gain(remedy: str, got, right: float, wrong: Mapping[str, float], layer: Mapping) -> None:
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Wrong(f"gains[{remedy!r}] should be a number, in ms; it is {got!r:.40}.")
    if math.isclose(got, right, rel_tol=1e-6, abs_tol=1e-9):
        return
    why = next((TIMES[remedy][name] for name, value in wrong.items() if math.isclose(got, value, rel_tol=1e-6)), "")
    if math.isclose(got, -right, rel_tol=1e-6):
        why = "What is asked is the time saved: before less after."
    where = f"all-reduce {layer['all-reduce']:g} ms, alpha {layer['alpha']:g} ms"
    raise Wrong(f"gains[{remedy!r}] is not {got:.4g} ms (a layer with {where}). {why}".rstrip())


CHUNKS, FASTER = 4, 4


def saved(layer: Mapping) -> dict[str, float]:
    """ms that each remedy saves of a layer's time."""
    a, alpha = layer["all-reduce"], layer["alpha"]
    wire = a - alpha
    return {
        "asynchronous": sum(min(a, product) for product in layer["wgrad"]),
        "chunks": sum(_chunked(product, a, alpha) for product in layer["before sum"]),
        "merge": 2 * alpha,
        "tp 2, dp 2": 4 * (a - (alpha + wire / 2 / 1.5)) - layer["replicas"],
        "repair": 4 * (wire - wire / FASTER),
    }


def _chunked(product: float, a: float, alpha: float) -> float:
    """One after the other, less in chunks: a chunk's sum starts when its product is done and the wire is free."""
    part, each, wire_free = product / CHUNKS, alpha + (a - alpha) / CHUNKS, 0.0
    for chunk in range(1, CHUNKS + 1):
        wire_free = max(chunk * part, wire_free) + each
    return product + a - wire_free


def mistakes(layer: Mapping) -> dict[str, dict[str, float]]:
    """What each known mistake gives."""
    a, alpha, products = layer["all-reduce"], layer["alpha"], layer["before sum"]
    wire, wgrad = a - alpha, layer["wgrad"]
    hides = sum(min(a, product) for product in wgrad)
    most = (CHUNKS - 1) / CHUNKS * sum(products)
    return {
        "merge": {"half": 2 * a, "all": 4 * alpha, "one": alpha},
        "asynchronous": {
            "all four": 2 * hides,
            "unbounded": 2 * a,
            "products": sum(wgrad),
        },
        "chunks": {
            "whole": sum(products),
            "no alpha": most,
            "one alpha": most - 2 * alpha,
            "backward": 2 * sum(_chunked(product, a, alpha) for product in products),
            "wire": most - 2 * (CHUNKS - 1) * alpha,
        },
        "tp 2, dp 2": {
            "tokens": 4 * (wire - wire / 2) - layer["replicas"],
            "factor": 4 * (wire - wire / 1.5) - layer["replicas"],
            "no dp": 4 * (wire - wire / 3),
            "alpha scaled": 4 * (a - a / 3) - layer["replicas"],
        },
        "repair": {"alpha scaled": 4 * (a - a / FASTER), "one": wire - wire / FASTER},
    }
