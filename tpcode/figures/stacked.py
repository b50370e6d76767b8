"""Bars one below the other, each cut into the same parts, beside a limit: what fits, and what takes the room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcode.figures.marks import MARGIN, SMALL, WIDTH, line, say
from tpcode.figures.style import INK, KINDS, Picture, canvas, render

_NAME, _TOTAL = 88.0, 40.0  # points for a bar's name on the left and its sum on the right
_TOP, _ROW, _BAR, _KEY = 22.0, 21.0, 15.0, 17.0  # above the bars; of a row; of a bar; of a row of the legend
_DIGIT = 4.8  # a part that is narrower than its number has no room for it
_HATCHES = ("", "///", "...", "xx")  # of parts that are no placement
_BEYOND = 1.6  # a bar that is longer than so many limits is cut off


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    limit: float | None = None,
    limit_name: str = "limit",
    kinds: Mapping[str, str] | None = None,
) -> Picture:
    """One bar for each name, cut into its parts, all on one scale; a dashed line at the limit. Values are drawn to one
    decimal.

    Args:
        bars: by a bar's name its parts in order, {"t = 8": {"state": 44.4, ...}, ...}. All have the same parts.
        unit: of the values: "GB".
        limit: where the line stands; a bar much longer than that is cut off, its sum and an arrow stand beside it.
        limit_name: what the line is.
        kinds: which parts are "sharded", "replicated" or "partial", and are drawn so. The others are in ink alone.

    Raises:
        ValueError: no bar, no part, or not the same parts; a value is negative or no finite number; no such kind; more
            other parts than there are patterns.
    """
    parts = _require(bars, limit)
    looks = _looks(parts, kinds or {})
    sums = {name: sum(values.values()) for name, values in bars.items()}
    longest = max(sums.values()) if limit is None else max(limit, min(max(sums.values()), _BEYOND * limit))
    scale = (WIDTH - 2 * MARGIN - _NAME - _TOTAL) / longest
    foot = _TOP + len(bars) * _ROW
    with canvas(WIDTH, foot + 12 + len(parts) * _KEY) as (figure, axes):
        say(axes, MARGIN, 10, unit, size=SMALL)
        for row, (name, values) in enumerate(bars.items()):
            _draw_bar(axes, _TOP + row * _ROW, name, values, looks, scale, longest)
        if limit is not None:
            _draw_limit(axes, MARGIN + _NAME + limit * scale, foot, f"{limit_name}: {limit:g} {unit}")
        for number, part in enumerate(parts):
            _draw_key(axes, foot + 10 + number * _KEY, part, looks[part])
        return render(figure, "stacked-bars", _in_words(bars, unit, limit, limit_name))


def _require(bars: Mapping[str, Mapping[str, float]], limit: float | None) -> list[str]:
    """The names of the parts."""
    if not bars:
        raise ValueError("stacked_bars draws at least one bar, and got none")
    parts = list(next(iter(bars.values())))
    for name, values in bars.items():
        if list(values) != parts or not parts:
            raise ValueError(f"the bar {name!r} has the parts {list(values)}, and the first bar has {parts}")
        for part, value in values.items():
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name!r}: {part!r} is {value}; it must be a finite number, and not negative")
        if not sum(values.values()):
            raise ValueError(f"the bar {name!r} has no length")
    if limit is not None and not (isfinite(limit) and limit > 0):
        raise ValueError(f"the limit must be a positive number and is {limit}")
    return parts


def _looks(parts: Sequence[str], kinds: Mapping[str, str]) -> dict[str, str]:
    """By part a kind, or the hatch of one that is no placement."""
    for part, kind in kinds.items():
        if part not in parts or kind not in KINDS:
            raise ValueError(f"kinds has {part!r}: {kind!r}; parts are {list(parts)}, kinds are {', '.join(KINDS)}")
    others = [part for part in parts if part not in kinds]
    if len(others) > len(_HATCHES):
        raise ValueError(f"there are {len(_HATCHES)} patterns for parts that are no placement, and {others} are more")
    return {**kinds, **dict(zip(others, _HATCHES))}


# ---- drawing, in points ---------------------------------------------------------------------------------------------


def _draw_bar(
    axes: Axes, top: float, name: str, values: Mapping[str, float], looks: dict, scale: float, longest: float
) -> None:
    total = sum(values.values())
    say(axes, MARGIN, top + _BAR / 2, name)
    say(
        axes, WIDTH - MARGIN, top + _BAR / 2, f"{total:.1f}" + (" →" if total > longest else ""), ha="right", size=SMALL
    )
    start = 0.0
    for part, value in values.items():
        end = min(start + value, longest)
        left, wide = MARGIN + _NAME + start * scale, (end - start) * scale
        if wide > 0:
            label = f"{value:.1f}".removesuffix(".0")
            label = label if wide >= _DIGIT * len(label) + 4 else ""
            _draw_part(axes, left, top, wide, looks[part], label)
        start = end


def _draw_part(axes: Axes, left: float, top: float, wide: float, look: str, label: str) -> None:
    """A placement on its own ground, its number in it if there is room (its name is in the legend); the rest in ink."""
    kind = KINDS.get(look)
    if kind is None:
        axes.add_patch(Rectangle((left, top), wide, _BAR, facecolor="none", edgecolor=INK, hatch=look, lw=0.8))
    else:
        axes.add_patch(Rectangle((left, top), wide, _BAR, facecolor=kind.ground, lw=0))
        if kind.hatch:
            shade = {"facecolor": "none", "edgecolor": kind.shade, "hatch": kind.hatch, "lw": 0}
            axes.add_patch(Rectangle((left, top), wide, _BAR, **shade))
    if label and (kind or not look):  # on lines of ink no number is legible
        colour = kind.ink if kind else INK
        say(axes, left + wide / 2, top + _BAR / 2, label, ha="center", size=SMALL, color=colour)


def _draw_limit(axes: Axes, x: float, foot: float, words: str) -> None:
    axes.plot([x, x], [_TOP - 5, foot], color=INK, lw=1.4, ls=(0, (3, 2)), marker="")
    line(axes, (x - 3, _TOP - 5), (x + 3, _TOP - 5), INK, 1.4)
    say(axes, min(x, WIDTH - MARGIN - 3.2 * len(words)), 10, words, ha="center", size=SMALL, weight="bold")


def _draw_key(axes: Axes, top: float, part: str, look: str) -> None:
    _draw_part(axes, MARGIN, top, 22, look, "")
    say(axes, MARGIN + 30, top + _BAR / 2, part, size=SMALL)


def _in_words(bars: Mapping[str, Mapping[str, float]], unit: str, limit: float | None, limit_name: str) -> str:
    told = []
    for name, values in bars.items():
        total = sum(values.values())
        beside = "" if limit is None else f", {'within' if total <= limit else 'over'} the limit"
        each = ", ".join(f"{part} {value:.1f}" for part, value in values.items())
        told.append(f"{name}: {each}; {total:.1f} in all{beside}.")
    at = "" if limit is None else f" {limit_name}: {limit:g} {unit}."
    return f"Bars in {unit}.{at} {' '.join(told)}"
