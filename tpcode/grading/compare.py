"""Compare what ranks computed with what the dense layer says, and say what a difference looks like.

    compare(got, want, t=2, symptoms=[part_only({"dX": [part_0, part_1]})])

`got` is what `on_ranks` returned: for each rank a mapping from property ("Y", "dX") to a tensor or numbers. `want` is
the same for each rank, or one mapping for all of them. The first property that differs on any rank raises Wrong, with
property, rank, t, shapes or largest difference, and the first symptom that recognises the wrong value.

A symptom is a function of a `Difference` that returns a sentence, or None if the value is not the one it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpcode.grading.answers import blanks
from tpcode.grading.failures import Unfilled, Wrong

TOLERANCE = 1e-12  # checks run in float64; sums of a few hundred terms differ in the last bits only


@dataclass(frozen=True)
class Difference:
    """A property that is wrong on a rank, with everything a symptom may want to look at.

    `got` and `want` are this rank's values, of one shape; `all_got` and `all_want` those of every rank, in rank order.
    """

    name: str
    rank: int
    t: int
    got: Tensor
    want: Tensor
    all_got: list[Tensor]
    all_want: list[Tensor]
    tolerance: float = TOLERANCE

    def equals(self, value) -> bool:
        """Whether `got` is `value`, within the tolerance, and that is not the right value."""
        value = as_tensor(value)
        return value.shape == self.got.shape and _close(self.got, value, self.tolerance)


Symptom = Callable[[Difference], str | None]


# ---- comparing ------------------------------------------------------------------------------------------------------


def compare(
    got: Sequence[Mapping],
    want: Mapping | Sequence[Mapping],
    *,
    t: int | None = None,
    symptoms: Iterable[Symptom] = (),
    tolerance: float = TOLERANCE,
) -> None:
    """Raise Wrong for the first property of `want` that differs on any rank; extra properties in `got` are ignored.

    Args:
        got: one mapping per rank, from property to a tensor or (nested) numbers.
        want: the same, or one mapping that holds on every rank.
        t: the number of ranks, for the message; by default that of `got`.
        symptoms: tried before the general ones.
        tolerance: largest allowed difference, relative to max(1, largest right value).
    """
    t = len(got) if t is None else t
    wants = [want] * len(got) if isinstance(want, Mapping) else list(want)
    for name in wants[0]:
        values = [_value(name, mine, rank, t) for rank, mine in enumerate(got)]
        right = [as_tensor(of_rank[name]) for of_rank in wants]
        for rank, (mine, theirs) in enumerate(zip(values, right, strict=True)):
            where = f"{name} on rank {rank} at t = {t}"
            require_shape_and_kind(where, mine, theirs)
            if not _close(mine, theirs, tolerance):
                difference = Difference(name, rank, t, mine, theirs, values, right, tolerance)
                raise Wrong(describe(where, difference, symptoms))


def compare_one(
    name: str,
    got,
    want,
    *,
    symptoms: Iterable[Symptom] = (),
    tolerance: float = TOLERANCE,
    where: str = "",
    reveal: bool = True,
) -> None:
    """Raise Wrong unless a single answer, a tensor or (nested) numbers, equals `want`: for what is typed or needs no
    ranks.

    Args:
        where: added to the name in the message ("at h = 6").
        reveal: whether the message may show a right value; what is worked out on paper is not given away.
    """
    if stub := blanks(got):
        raise Unfilled(f"replace {stub} in {name}.")
    mine, right = _tensor_or_wrong(name, got), as_tensor(want)
    full_name = f"{name} {where}".strip()
    require_shape_and_kind(full_name, mine, right)
    if not _close(mine, right, tolerance):
        difference = Difference(name, 0, 1, mine, right, [mine], [right], tolerance)
        raise Wrong(describe(full_name, difference, symptoms, reveal))


def require_shape_and_kind(where: str, got: Tensor, want: Tensor) -> None:
    """Raise Wrong if shapes differ, or a value is not a number."""
    if got.shape != want.shape:
        hint = ""
        if got.dim() >= 2 and got.transpose(-1, -2).shape == want.shape:
            hint = " It may be transposed."
        raise Wrong(f"{where} has shape {list(got.shape)}, not {list(want.shape)}.{hint}")
    if not torch.isfinite(got.to(torch.float64)).all() and torch.isfinite(want.to(torch.float64)).all():
        raise Wrong(f"{where} holds {'nan' if got.isnan().any() else 'inf'}.")


def describe(where: str, difference: Difference, symptoms: Iterable[Symptom] = (), reveal: bool = True) -> str:
    """The message for a difference: where, how large (unless that is not to be revealed), and what it looks like."""
    gap = (difference.got.to(torch.float64) - difference.want.to(torch.float64)).abs()
    at = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.dim() else []
    yours, right = difference.got[tuple(at)].item(), difference.want[tuple(at)].item()
    place = f" at {at}" if at else ""
    text = f"{where}: largest difference {gap.max().item():.4g}{place} (yours {yours:.6g}, right {right:.6g})."
    if not reveal:
        text = f"{where} is not right{place}, where yours is {yours:.6g}."
    for symptom in (*symptoms, *GENERAL):
        if sentence := symptom(difference):
            return f"{text}\n{sentence}"
    return text


def as_tensor(value) -> Tensor:
    """A detached tensor of `value`: a tensor, a number, an array or nested lists of numbers or tensors."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return torch.stack([as_tensor(item) for item in value])
    return torch.as_tensor(value)


def _tensor_or_wrong(where: str, value) -> Tensor:
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"{where} should be a tensor or numbers; it is {value!r:.80}.") from None


def _value(name: str, of_rank: Mapping, rank: int, t: int) -> Tensor:
    value = of_rank.get(name)
    if value is None:
        raise Wrong(f"{name} is missing on rank {rank} at t = {t}: it is None there.")
    return _tensor_or_wrong(f"{name} on rank {rank} at t = {t}", value)


def _close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    got, want = got.to(torch.float64), want.to(torch.float64)
    if not want.numel():
        return True
    scale = max(1.0, want.abs().max().item())
    return bool(((got - want).abs() <= tolerance * scale).all())


# ---- symptoms -------------------------------------------------------------------------------------------------------


def looks_like(wrong: Mapping[str, object], sentence: str, *, per_rank: bool = False) -> Symptom:
    """A symptom: the property equals the known wrong value `wrong[name]`, or, per rank, `wrong[name][rank]`."""

    def symptom(difference: Difference) -> str | None:
        if difference.name not in wrong:
            return None
        value = wrong[difference.name]
        return sentence if difference.equals(value[difference.rank] if per_rank else value) else None

    return symptom


def part_only(parts: Mapping[str, Sequence]) -> Symptom:
    """A symptom: rank r holds `parts[name][r]`, its own part of a sum that nobody added up."""

    def symptom(difference: Difference) -> str | None:
        if difference.name in parts and difference.equals(parts[difference.name][difference.rank]):
            return f"It is rank {difference.rank}'s own part only: the parts of all ranks were not added."
        return None

    return symptom


def times_t(difference: Difference) -> str | None:
    t = difference.t
    if t > 1 and difference.equals(t * difference.want):
        return f"It is {t} times the right value: what every rank already held whole was summed over the {t} ranks."
    return None


def divided_by_t(difference: Difference) -> str | None:
    t = difference.t
    if t > 1 and difference.equals(difference.want / t):
        return f"It is 1/{t} of the right value: averaged where a sum is needed."
    return None


def negated(difference: Difference) -> str | None:
    return "It has the wrong sign." if difference.equals(-difference.want.to(torch.float64)) else None


def zero(difference: Difference) -> str | None:
    return "It is all zeros." if difference.equals(torch.zeros_like(difference.want)) else None


def transposed(difference: Difference) -> str | None:
    want = difference.want
    if want.dim() >= 2 and difference.equals(want.transpose(-1, -2)):
        return "It is transposed."
    return None


def other_ranks(difference: Difference) -> str | None:
    for other, want in enumerate(difference.all_want):
        if other != difference.rank and difference.equals(want):
            return f"It is what belongs to rank {other}."
    return None


def less_precise(difference: Difference) -> str | None:
    got, want = difference.got.dtype, difference.want.dtype
    if got != want and got.is_floating_point and _close(difference.got, difference.want, tolerance=1e-2):
        return f"It is {got}, the right value is {want}: precision was lost on the way."
    return None


GENERAL: tuple[Symptom, ...] = (times_t, divided_by_t, negated, zero, transposed, other_ranks, less_precise)
