"""Chapter 7, the vocabulary and the loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import log, log2, prod

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, one_hot, pad
from torch.utils._python_dispatch import TorchDispatchMode

from tpcode.comm import group_rank, group_size, reduce_from_tp
from tpcode.grading.answers import blanks
from tpcode.grading.compare import compare, compare_one, looks_like
from tpcode.grading.failures import Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_calls, require_returned
from tpcode.grading.registry import exercise
from tpcode.layers import vocab_parallel_cross_entropy
from tpcode.runtime.notes import watch
from tpcode.shapes import padded_vocab

TOKENS, HIDDEN, VOCAB = (2, 3), 5, 24


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


# ---- 7.1 ------------------------------------------------------------------------------------------------------------

Z_OF, TARGET = ((1, 3), (2, 0)), 2
ROUNDED = 5e-3  # a loss may be typed with two decimals

OWN_MAX = (
    "With its own largest logit, 2, rank 1 counts in units of 2², and rank 0 in units of 2³. m is the largest of all."
)
NO_MAX = "These are the powers of z. Take m off first: 2^(z - m)."
NOT_MINE = "Rank 0 does not have id 2: it holds 0 and 1. Who has no target says 0."
LOCAL_TARGET = "Id 2 is rank 1's first: at position 2 - 2 = 0 of its logits."
SHIFTED = "This is z - m. The logit itself is asked for; m is added back in the loss."
NO_ADDING_BACK = "m is not added back: loss = log2(sum) + m - z[y]."
FROM_OWN_MAX = "This comes of 1.25 + 1.25: each rank took its own largest logit, and the sums are in different units."
NO_TARGET = "This is log2 of the sum. The target's logit is taken off it."
NATURAL = "This is the natural logarithm. The powers are of 2, and so is the logarithm."
RANK_1_ALONE = "This is the loss over rank 1's ids alone. Rank 0's exponentials belong to the sum."
MEAN_OF_OWN = "This is made of the ranks' own losses. A softmax over half of the ids is another softmax: add the sums."
FLIPPED = "The sign is turned round: the loss is minus the logarithm of a probability, so it is above 0."


@exercise("7.1")
def cross_entropy_by_hand(m, sum_0, sum_1, hit_0, hit_1, loss) -> str:
    """Single numbers; in base 2."""
    typed = {"m": m, "sum_0": sum_0, "sum_1": sum_1, "hit_0": hit_0, "hit_1": hit_1, "loss": loss}
    right, symptoms = _by_hand()
    for name, want in right.items():
        tolerance = ROUNDED if name == "loss" else 1e-9
        compare_one(name, typed[name], want, symptoms=symptoms, tolerance=tolerance, reveal=False)
    return "1.25 + 0.625 in units of 2³, and log2 15 - 2 = 1.907 on both ranks."


def _by_hand() -> tuple[dict[str, float], list]:
    z = [logit for z_r in Z_OF for logit in z_r]
    m, hit = max(z), z[TARGET]
    sums = [sum(2.0 ** (logit - m) for logit in z_r) for z_r in Z_OF]
    powers = [sum(2.0**logit for logit in z_r) for z_r in Z_OF]
    own = [total / 2.0 ** max(z_r) for total, z_r in zip(powers, Z_OF, strict=True)]
    right = {"m": m, "sum_0": sums[0], "sum_1": sums[1], "hit_0": 0, "hit_1": hit, "loss": log2(sum(powers)) - hit}
    of_rank = [log2(powers[0]), log2(powers[1]) - hit]  # what a rank alone would call its loss
    return right, [
        looks_like({"m": 2}, "This is rank 1's own largest. m is the largest of all logits."),
        looks_like({"sum_1": own[1]}, OWN_MAX),
        looks_like({"sum_0": powers[0], "sum_1": powers[1]}, NO_MAX),
        looks_like({"hit_0": Z_OF[0][0]}, NOT_MINE),
        looks_like({"hit_0": Z_OF[0][1]}, NOT_MINE),
        looks_like({"hit_0": hit}, NOT_MINE),
        looks_like({"hit_1": Z_OF[1][1]}, LOCAL_TARGET),
        looks_like({"hit_1": hit - m}, SHIFTED),
        looks_like({"loss": log2(sum(sums)) - hit}, NO_ADDING_BACK),
        looks_like({"loss": log2(sum(own)) + m - hit}, FROM_OWN_MAX),
        looks_like({"loss": log2(sum(powers))}, NO_TARGET),
        looks_like({"loss": log(sum(powers)) - hit}, NATURAL),
        looks_like({"loss": of_rank[1]}, RANK_1_ALONE),
        looks_like({"loss": sum(of_rank) / 2}, MEAN_OF_OWN),
        looks_like({"loss": sum(of_rank)}, MEAN_OF_OWN),
        looks_like({"loss": hit - log2(sum(powers))}, FLIPPED),
    ]


# ---- 7.2 ------------------------------------------------------------------------------------------------------------

WRAPS = (
    "A negative index counts from the end: E_r[-2] is a row. Ids below this rank's first one are not its own either, "
    "and give zeros."
)
FOREIGN_ROWS = (
    "For an id of another rank there is {what} where zeros should be, and the sum over the ranks holds it as well."
)
NO_FIRST = "Rank r's first row is id r·V/t. Here every rank looked up the ids as if its rows began at id 0."
EDGE = "Rank r holds the ids from r·V/t up to (r + 1)·V/t - 1: its first one is missing here."
GRADIENT_OF_OTHERS = (
    "The output is right, and yet a row got the gradient of ids that are not its own: the zeros were written behind "
    "autograd's back. Use where, masked_fill or a product with the mask."
)
IDS_CHANGED = "Your function changed ids, which belong to the caller: make a new tensor, ids - first."


@exercise("7.2")
def lookup_of_own_ids(my_part: Callable) -> str:
    """`my_part(ids, E_r)` on each rank: [b, s] and [V/t, h] to this rank's summand of X, [b, s, h]."""
    table, dx = _random((VOCAB, HIDDEN), (*TOKENS, HIDDEN))
    ids = torch.tensor([[0, 7, 23], [10, 0, 16]])
    for t in SIZES:
        results = on_ranks(_look_up, t, my_part, ids, table, dx)
        require_returned(my_part, results)
        if any(result["changed"] for result in results):
            raise Wrong(IDS_CHANGED)
        want, symptoms = _lookup_reference(t, ids, table, dx)
        compare(results, want, t=t, symptoms=symptoms)
    return "X and dE on every rank, at t = 1, 2, 4."


def _look_up(my_part: Callable, ids: Tensor, table: Tensor, dx: Tensor) -> dict | None:
    mine = table.chunk(group_size())[group_rank()].clone().requires_grad_()
    given = ids.clone()
    part = my_part(given, mine)
    if blanks(part):
        return None
    found = {"changed": not torch.equal(given, ids)}
    if not isinstance(part, Tensor) or part.shape != dx.shape:
        return found | {"X": part}  # the comparison says what is wrong with it
    x = reduce_from_tp(part)
    if not x.requires_grad:
        raise Wrong("no gradient flows back from your rows to E_r: detach() and .data cut it off.")
    x.backward(dx)
    return found | {"X": x.detach(), "dE_r": mine.grad}


def _lookup_reference(t: int, ids: Tensor, table: Tensor, dx: Tensor) -> tuple[list[dict], list]:
    gradient = one_hot(ids.flatten(), VOCAB).double().T @ dx.flatten(0, 1)  # [V, h]
    want = [{"X": table[ids], "dE_r": of_rank} for of_rank in gradient.chunk(t)]
    rows, width = table.chunk(t), VOCAB // t
    local = [ids - r * width for r in range(t)]
    mine = [(at >= 0) & (at < width) for at in local]

    def summed(index: Callable[[int], Tensor], keep: Callable[[int], Tensor] | None = None) -> Tensor:
        parts = [embedding(index(r), rows[r]) for r in range(t)]
        return sum(parts if keep is None else (part * keep(r).unsqueeze(-1) for r, part in enumerate(parts)))

    def rows_0_for_others(r: int) -> Tensor:
        hits = one_hot(local[r].where(mine[r], 0).flatten(), width).double()
        return hits.T @ dx.flatten(0, 1)  # [V/t, h]

    edge = looks_like({"X": summed(lambda r: ids % width, lambda r: mine[r] & (local[r] > 0))}, EDGE)
    if t == 1:
        return want, [edge]
    wrong = {
        "a row all the same, the first one,": summed(lambda r: local[r].where(mine[r], 0)),
        "a row all the same, the first or the last one,": summed(lambda r: local[r].clamp(0, width - 1)),
        "a row all the same, number id % (V/t),": summed(lambda r: ids % width),
    }
    wrapped = summed(lambda r: local[r] % width, lambda r: (local[r] >= -width) & (local[r] < width))
    return want, [
        looks_like({"X": wrapped}, WRAPS),
        *(looks_like({"X": value}, FOREIGN_ROWS.format(what=what)) for what, value in wrong.items()),
        looks_like({"X": summed(lambda r: ids % width, lambda r: ids < width)}, NO_FIRST),
        edge,
        looks_like({"dE_r": [rows_0_for_others(r) for r in range(t)]}, GRADIENT_OF_OTHERS, per_rank=True),
    ]


# ---- 7.3 ------------------------------------------------------------------------------------------------------------

GATHERED = (
    "All values are right, and {elements} numbers a token went over the ranks: logits were gathered. Three are enough, "
    "whatever V is."
)
TOO_MANY = "All values are right; the loss needs three all-reduces of [b, s]: a maximum and two sums."
TOO_WIDE = (
    "All values are right, and a tensor of shape {shape} was made on rank {rank} at t = {t}: V numbers a token, or "
    "more. A rank has the logits of its own V/t ids, and needs nothing wider."
)
OVERFLOWS = "With logits near 1000 the loss is {value}: exp overflows. Take the largest logit of all ranks off first."
OWN_UNITS = (
    "The exponentials were taken with each rank's own largest logit, so the sums are in different units and cannot be "
    "added. The maximum is one over all ranks."
)
OWN_LOSSES = (
    "This is made of the ranks' own losses, each over its own ids. A softmax over some of the ids is another softmax: "
    "add the sums of exponentials, and take the logarithm of the total."
)
MAX_LOST = "The largest logit was taken off inside the exponentials and not off the target's logit (or not added back)."
NOT_ADDED = "The sums of exponentials were not added over the ranks: each rank has the logarithm of its own."
HIT_UNMASKED = (
    "A rank that does not hold the target has to say 0 for the target's logit. Here each rank says one of its own."
)
SUM_DETACHED = (
    "The gradient misses the softmax: no gradient flows through your sum of exponentials. Use reduce_from_tp for it."
)
TARGET_DETACHED = (
    "The gradient is the softmax alone: no gradient flows through the target's logit. Use reduce_from_tp for it."
)
SUMMED_BACK = (
    "The gradient is {t} times too large: there is one loss, and every rank has all of its gradient. The sums of the "
    "loss are reduce (g), whose backward is the identity."
)
NOT_SILENT = "Every rank has the total already, from forward: the backward of the loss asks for nothing."


@exercise("7.3")
def cross_entropy_in_three_sums(cross_entropy: Callable) -> str:
    """`cross_entropy(z_r, targets)` on each rank: [b, s, V/t] and [b, s] to [b, s]; autograd goes back through it."""
    z, dloss = _random((*TOKENS, VOCAB), TOKENS)
    z = 3 * z
    targets = torch.tensor([[0, 14, 23], [10, 5, 14]])
    for t in SIZES:
        results = _require_loss(cross_entropy, t, z, targets, dloss)
        large = on_ranks(_loss_on_a_rank, t, cross_entropy, z + 1000, targets, dloss)
        _require_finite(large)
        compare(large, {"loss": _token_losses(z, targets)}, t=t, tolerance=1e-9)
        if t > 1:
            _require_small_calls(results, z)
    return "the loss and dz on every rank at t = 1, 2, 4; three numbers a token forward, nothing backward."


def _require_loss(cross_entropy: Callable, t: int, z: Tensor, targets: Tensor, dloss: Tensor) -> list[dict]:
    results = on_ranks(_loss_on_a_rank, t, cross_entropy, z, targets, dloss)
    require_returned(cross_entropy, results)
    want, symptoms = _loss_reference(t, z, targets, dloss)
    compare(results, want, t=t, symptoms=symptoms)
    return results


def _require_finite(results: list[dict]) -> None:
    for result in results:
        bad = result["loss"][~result["loss"].isfinite()]
        if len(bad):
            raise Wrong(OVERFLOWS.format(value=bad[0].item()))


def _loss_on_a_rank(cross_entropy: Callable, z: Tensor, targets: Tensor, dloss: Tensor) -> dict | None:
    z_r = z.chunk(group_size(), -1)[group_rank()].clone().requires_grad_()
    with watch() as forward, _Widest() as seen:
        loss = cross_entropy(z_r, targets)
    if blanks(loss):
        return None
    if not isinstance(loss, Tensor) or loss.shape != dloss.shape:
        return {"loss": loss}  # the comparison says what is wrong with it
    if not loss.requires_grad:
        raise Wrong("no gradient flows back from the loss to z_r: detach() cuts it off, and a plain collective too.")
    with watch() as backward:
        loss.backward(dloss)
    found = {"loss": loss.detach(), "dz_r": z_r.grad, "widest": seen.shape}
    return found | {"forward": forward, "backward": backward}


class _Widest(TorchDispatchMode):
    """Notes the shape of the largest tensor that is made inside."""

    def __init__(self):
        super().__init__()
        self.shape: list[int] = []
        self._elements = -1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, Tensor) and tensor.numel() > self._elements:
                self.shape, self._elements = list(tensor.shape), tensor.numel()
        return made


def _token_losses(z: Tensor, targets: Tensor) -> Tensor:
    return z.logsumexp(-1) - z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _loss_reference(t: int, z: Tensor, targets: Tensor, dloss: Tensor) -> tuple[list[dict], list]:
    """What each rank should hold, and what it may hold instead."""
    loss, m, log_total = _token_losses(z, targets), z.amax(-1), z.logsumexp(-1)
    softmax, hot = z.softmax(-1), one_hot(targets, VOCAB)
    dz = (softmax - hot) * dloss.unsqueeze(-1)
    want = [{"loss": loss, "dz_r": dz_r} for dz_r in dz.chunk(t, -1)]

    def per_rank(name: str, values, sentence: str):
        return looks_like({name: list(values)}, sentence, per_rank=True)

    def scaled(gradient: Tensor):
        return [of_rank * dloss.unsqueeze(-1) for of_rank in gradient.chunk(t, -1)]

    at_any_t = [
        looks_like({"loss": loss + m}, MAX_LOST),
        looks_like({"loss": loss - m}, MAX_LOST),
        per_rank("dz_r", scaled(-hot), SUM_DETACHED),
        per_rank("dz_r", scaled(softmax), TARGET_DETACHED),
    ]
    if t == 1:
        return want, at_any_t
    hit, shards, width = log_total - loss, z.chunk(t, -1), VOCAB // t
    own_max, own_log = [z_r.amax(-1) for z_r in shards], [z_r.logsumexp(-1) for z_r in shards]
    in_own_units = sum((z_r - top.unsqueeze(-1)).exp().sum(-1) for z_r, top in zip(shards, own_max, strict=True)).log()
    owners_max = sum(top * (targets // width == r) for r, top in enumerate(own_max))
    local = [targets - r * width for r in range(t)]
    every_rank_hits = {
        "first": [at.where((at >= 0) & (at < width), 0) for at in local],
        "clamped": [at.clamp(0, width - 1) for at in local],
        "modulo": [at % width for at in local],
    }
    hits = [
        sum(z_r.gather(-1, at.unsqueeze(-1)).squeeze(-1) for z_r, at in zip(shards, index, strict=True))
        for index in every_rank_hits.values()
    ]
    return want, [
        looks_like({"loss": in_own_units - hit + owners_max}, OWN_UNITS),
        per_rank("loss", (in_own_units + top - hit for top in own_max), OWN_UNITS),
        looks_like({"loss": in_own_units - hit}, OWN_UNITS),
        looks_like({"loss": (sum(own_log) - hit) / t}, OWN_LOSSES),
        looks_like({"loss": sum(own_log) - hit}, OWN_LOSSES),
        looks_like({"loss": sum(own_log) / t - hit}, OWN_LOSSES),
        per_rank("loss", (own - hit for own in own_log), NOT_ADDED),
        *at_any_t,
        *(looks_like({"loss": log_total - wrong_hit}, HIT_UNMASKED) for wrong_hit in hits),
        *(looks_like({"loss": log_total - wrong_hit + (t - 1) * m}, HIT_UNMASKED) for wrong_hit in hits),
        per_rank("dz_r", scaled(t * (softmax - hot)), SUMMED_BACK.format(t=t)),
    ]


def _require_small_calls(results: list[dict], z: Tensor) -> None:
    """Raise Wrong unless forward sent at most three numbers a token in at most three calls, and backward nothing."""
    t, tokens = len(results), z[..., 0].numel()
    for rank, result in enumerate(results):
        calls = result["forward"]
        sent = sum(map(_elements, calls)) / tokens
        if sent >= z.shape[-1] // t:
            raise Wrong(GATHERED.format(elements=f"{sent:g}"))
        if sent > 3 or len(calls) > 3:
            raise Wrong(f"forward sent {sent:g} numbers a token in {len(calls)} calls.\n{TOO_MANY}")
        if t == max(SIZES) and prod(result["widest"]) >= z.numel():
            raise Wrong(TOO_WIDE.format(shape=result["widest"], rank=rank, t=t))
    require_calls(results, "backward", 0, NOT_SILENT)


def _elements(call: str) -> int:
    """Of a call as `watch` notes it, such as "all_reduce SUM float64 [2, 3]"."""
    shapes = re.findall(r"\[([\d, ]*)\]", call)
    return sum(prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes)


# ---- 7.4 ------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a": "the ranks' ids begin in the wrong place",
    "b": "the padding takes part in the softmax",
    "c": "the sum of exponentials is added up twice",
    "d": "the target's logit is counted on two ranks",
}
NOT_THAT = {
    "a": "All logits are 0 here, so it makes no difference which of them are whose.",
    "c": "Twice the sum would raise the loss by ln 2 = 0.693, and at t = 2 as well.",
    "d": "The target's logit is 0 here: counted twice, it is still 0.",
}
STILL_IN = (
    "rank {rank} at t = {t}, V = {V}: the ids {ids} are padding and still take part, with exp(z) > 0. A rank's ids "
    "begin at r·W: masked is what reaches V or lies beyond."
)
TAKEN_OUT = "rank {rank} at t = {t}, V = {V}: the ids {ids} are true ones, and you masked them."
CHANGED = "rank {rank} at t = {t}, V = {V}: the logits of true ids have to stay as they are."
OTHER_SHAPE = "rank {rank} at t = {t}, V = {V}: the mask returned shape {shape}, not {want}: keep the width, W."


def cross_entropy_without_a_mask(z_r: Tensor, targets: Tensor) -> Tensor:
    """The faulty loss of exercise 7.4: right, but for the padding. [b, s, W] and [b, s] -> [b, s]."""
    return vocab_parallel_cross_entropy(z_r, targets, reduction="none")


@exercise("7.4")
def padding_is_masked(fault: str, mask: Callable) -> str:
    """`mask(z_r, V)`: this rank's logits [b, s, W], padding included, so that the padding takes no part."""
    if fault not in FAULTS:
        raise Wrong(f"fault is {fault!r}; it should be one of {', '.join(map(repr, FAULTS))}.")
    if fault != "b":
        raise Wrong(f"it is not that {FAULTS[fault]}.\n{NOT_THAT[fault]}")
    for V, t in ((10, 4), (10, 2), (10, 1), (5, 4), (9, 2)):
        _check_mask(mask, V, t)
    return "b, and the padding is masked: ln 10 at every t, and the loss of any logits, also at V = 5 on four ranks."


def _check_mask(mask: Callable, V: int, t: int) -> None:
    width = padded_vocab(V, t, multiple=1) // t
    z, dloss = _random((*TOKENS, V), TOKENS)
    targets = torch.tensor([[0, V - 1, 1], [2, 3, V - 1]])
    results = on_ranks(_masked_loss, t, mask, pad(z, (0, t * width - V)), targets, dloss, V)
    require_returned(mask, results)
    for rank, result in enumerate(results):
        _require_mask(result, rank, t, V, width)
    dz = (z.softmax(-1) - one_hot(targets, V)) * dloss.unsqueeze(-1)
    wide = pad(dz, (0, t * width - V)).chunk(t, -1)
    want = [{"loss": _token_losses(z, targets), "dz_r": dz_r} for dz_r in wide]
    compare(results, want, t=t)


def _masked_loss(mask: Callable, padded: Tensor, targets: Tensor, dloss: Tensor, V: int) -> dict | None:
    z_r = padded.chunk(group_size(), -1)[group_rank()].clone().requires_grad_()
    masked = mask(z_r, V)
    if blanks(masked):
        return None
    if not isinstance(masked, Tensor):
        raise Wrong(f"mask should return a tensor; it returned {masked!r:.40}.")
    found = {"given": z_r.detach().clone(), "masked": masked.detach().clone()}
    if masked.shape != z_r.shape:
        shapes = {"shape": list(masked.shape), "want": list(z_r.shape)}
        raise Wrong(OTHER_SHAPE.format(rank=group_rank(), t=group_size(), V=V, **shapes))
    loss = cross_entropy_without_a_mask(masked, targets)
    if not loss.requires_grad:
        raise Wrong("no gradient flows back through your mask: detach() and .data cut it off.")
    loss.backward(dloss)
    return found | {"loss": loss.detach(), "dz_r": z_r.grad}


def _require_mask(result: dict, rank: int, t: int, V: int, width: int) -> None:
    given, masked, where = result["given"], result["masked"], {"rank": rank, "t": t, "V": V}
    takes_part = (masked.exp() > 0).flatten(0, -2)  # [tokens, W]
    ids = range(rank * width, (rank + 1) * width)
    still_in = [id for id, column in zip(ids, takes_part.any(0), strict=True) if column and id >= V]
    taken_out = [id for id, column in zip(ids, takes_part.all(0), strict=True) if not column and id < V]
    if taken_out:
        raise Wrong(TAKEN_OUT.format(ids=taken_out, **where))
    if still_in:
        raise Wrong(STILL_IN.format(ids=still_in, **where))
    words = [id - rank * width for id in ids if id < V]
    if not torch.equal(masked[..., words], given[..., words]):
        raise Wrong(CHANGED.format(**where))


def uniform_losses(V: int = 10) -> dict[int, float]:
    """By t, the loss of a model that says 0 for every logit; the padding is not masked."""
    return {t: on_ranks(_uniform_loss, t, V)[0] for t in SIZES}


def _uniform_loss(V: int) -> float:
    t = group_size()
    z_r = torch.zeros(1, 1, padded_vocab(V, t, multiple=1) // t, dtype=torch.float64)
    return cross_entropy_without_a_mask(z_r, torch.zeros(1, 1, dtype=torch.long)).item()


# ---- 7.5 ------------------------------------------------------------------------------------------------------------

WHYS = {
    "a": "the loss is small and dX is large",
    "b": "every rank uses the sum in the same way, and X with columns of its own",
    "c": "the loss has been averaged over the ranks already",
}
NOT_WHY = {
    "a": "Size decides what a collective costs, not whether a gradient is whole. Who uses the sum, and how? And X?",
    "c": "Nothing was averaged. Who uses the sum of exponentials, and how? And X?",
}
NO_ONE_HOT = "This is the softmax. The target's logit has a derivative of its own: 1 is taken off there."
ONE_HOT_EVERYWHERE = "1 was taken off on ranks that do not hold the target, too. There is one target, on one rank."
OWN_SOFTMAX = "This is the softmax over the rank's own ids. The sum is over all ids: log_total has it."
NO_DLOSS = "dloss is missing: what comes back for a token's loss multiplies its row."
SUMMED_DZ = "The ranks' dz_r were added. They are of different ids: each is complete as it is."
DZ_T_TIMES = "This is {t} times dz_r: dloss is the same on every rank, and was summed over the ranks."
DX_PART = "It is what this rank's ids say about X. Every rank used X: the parts are added (copy's backward)."
DW_SUMMED = "The ranks' weight gradients were added. They are of different ids: each is complete where it stands."


@exercise("7.5")
def silent_loss_and_loud_head(why: str, loss_backward: Callable, head_backward: Callable) -> str:
    """`loss_backward(z_r, log_total, targets, dloss)` -> dz_r; `head_backward(dz_r, x, weight_r)` -> dx, dweight_r."""
    if why not in WHYS:
        raise Wrong(f"why is {why!r}; it should be one of {', '.join(map(repr, WHYS))}.")
    x, weight, dloss = _random((*TOKENS, HIDDEN), (VOCAB, HIDDEN), TOKENS)
    targets = torch.tensor([[0, 14, 23], [10, 5, 14]])
    for t in SIZES:
        _check_loss_backward(loss_backward, t, linear(x, weight), targets, dloss)
        _check_head_backward(head_backward, t, x, weight, dz=_random((*TOKENS, VOCAB))[0])
    if why != "b":
        raise Wrong(f"both functions are right, and the reason is not that {WHYS[why]}.\n{NOT_WHY[why]}")
    return "dz, dX and dW on every rank at t = 1, 2, 4, with 0 collectives for the loss and 1 for the head."


def _check_loss_backward(function: Callable, t: int, z: Tensor, targets: Tensor, dloss: Tensor) -> None:
    results = on_ranks(_loss_backward_on_a_rank, t, function, z, targets, dloss)
    require_returned(function, [result["dz_r"] for result in results])
    want, symptoms = _loss_backward_reference(t, z, targets, dloss)
    compare(results, want, t=t, symptoms=symptoms)
    if t > 1:
        require_calls(results, "the loss", 0, "Every rank has its logits and log_total: there is nothing to ask for.")


def _loss_backward_on_a_rank(function: Callable, z: Tensor, targets: Tensor, dloss: Tensor) -> dict:
    z_r = z.chunk(group_size(), -1)[group_rank()].clone()
    with watch() as calls:
        dz_r = function(z_r, z.logsumexp(-1), targets.clone(), dloss.clone())
    return {"dz_r": dz_r, "the loss": calls}


def _loss_backward_reference(t: int, z: Tensor, targets: Tensor, dloss: Tensor) -> tuple[list[dict], list]:
    scale, softmax, hot = dloss.unsqueeze(-1), z.softmax(-1), one_hot(targets, VOCAB)
    shards, width = ((softmax - hot) * scale).chunk(t, -1), VOCAB // t
    want = [{"dz_r": dz_r} for dz_r in shards]

    def wrong(values, sentence: str):
        return looks_like({"dz_r": list(values)}, sentence, per_rank=True)

    general = [
        wrong((softmax * scale).chunk(t, -1), NO_ONE_HOT),
        wrong((softmax - hot).chunk(t, -1), NO_DLOSS),
    ]
    if t == 1:
        return want, general
    local = [targets - r * width for r in range(t)]
    indices = (
        [at.where((at >= 0) & (at < width), 0) for at in local],
        [at.clamp(0, width - 1) for at in local],
        [at % width for at in local],
    )
    own = [z_r.softmax(-1) - hot_r for z_r, hot_r in zip(z.chunk(t, -1), hot.chunk(t, -1), strict=True)]
    pairs = [zip(softmax.chunk(t, -1), index, strict=True) for index in indices]
    return want, [
        *general,
        *(wrong(((p - one_hot(at, width)) * scale for p, at in pair), ONE_HOT_EVERYWHERE) for pair in pairs),
        wrong((dz_r * scale for dz_r in own), OWN_SOFTMAX),
        wrong([sum(shards)] * t, SUMMED_DZ),
        wrong((t * dz_r for dz_r in shards), DZ_T_TIMES.format(t=t)),
    ]


def _check_head_backward(function: Callable, t: int, x: Tensor, weight: Tensor, dz: Tensor) -> None:
    results = on_ranks(_head_backward_on_a_rank, t, function, x, weight, dz)
    require_returned(function, [None if blanks(result["dX"]) else result for result in results])
    parts = [dz_r @ w_r for dz_r, w_r in zip(dz.chunk(t, -1), weight.chunk(t), strict=True)]  # [b, s, V/t] [V/t, h]
    dw = [dz_r.flatten(0, 1).T @ x.flatten(0, 1) for dz_r in dz.chunk(t, -1)]  # [V/t, b·s] [b·s, h] -> [V/t, h]
    want = [{"dX": sum(parts), "dW_r": dw_r} for dw_r in dw]
    wrong = [looks_like({"dX": parts}, DX_PART, per_rank=True), looks_like({"dW_r": sum(dw)}, DW_SUMMED)]
    compare(results, want, t=t, symptoms=wrong if t > 1 else [])
    if t > 1:
        require_calls(results, "the head", 1, "One all-reduce, of dX, is all that is needed.")


def _head_backward_on_a_rank(function: Callable, x: Tensor, weight: Tensor, dz: Tensor) -> dict:
    r, t = group_rank(), group_size()
    with watch() as calls:
        both = function(dz.chunk(t, -1)[r].clone(), x.clone(), weight.chunk(t)[r].clone())
    if both is None or (isinstance(both, (tuple, list)) and all(map(blanks, both))):
        return {"dX": None}
    if not isinstance(both, (tuple, list)) or len(both) != 2:
        raise Wrong(f"head_backward should return two tensors, dx and dweight_r; it returned {both!r:.40}.")
    return {"dX": both[0], "dW_r": both[1], "the head": calls}
