"""Which rank holds which attention heads: the query heads, and below them the KV heads that these read."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from tpcode.figures.marks import MARGIN, SMALL, WIDTH, heading, lettering, line, say
from tpcode.figures.style import INK, Picture, canvas, render, tile
from tpcode.shapes import HeadGroups, head_groups

_MOST_HEADS = 8
_GAP, _HIGH = 6.0, 18.0  # between two ranks; of a tile
_TOP, _PANEL, _FOOT = 34.0, 92.0, 20.0  # above a panel's tiles; of a panel; for the legend


def heads_to_ranks(heads: int, kv_heads: int, sizes: Sequence[int] = (1, 2, 4)) -> Picture:
    """One panel for each number of ranks t: every rank's query heads, each above the KV head that it reads.

    A KV head that several ranks hold alike is drawn as replicated on each of them.

    Raises:
        ValueError: more query heads than there is room for, no size, or heads that do not split over one of the sizes.
    """
    if heads > _MOST_HEADS or not sizes:
        raise ValueError(f"the picture has room for {_MOST_HEADS} query heads and one t at least: {heads=}, {sizes=}")
    splits = [head_groups(heads, kv_heads, t) for t in sizes]
    with canvas(WIDTH, len(splits) * _PANEL + _FOOT) as (figure, axes):
        for number, split in enumerate(splits):
            _draw_panel(axes, number * _PANEL, split)
        _draw_legend(axes, len(splits) * _PANEL + 2, any(split.replicas > 1 for split in splits))
        return render(figure, "heads", " ".join(map(describe, splits)))


def describe(split: HeadGroups) -> str:
    """One panel in words."""
    held = [
        f"rank {rank} holds {_named('q', split.heads_of(rank))} and {_named('kv', split.kv_heads_of(rank))}"
        for rank in range(split.t)
    ]
    return f"t = {split.t}: {'; '.join(held)}."


def _named(kind: str, numbers: Sequence[int]) -> str:
    return ", ".join(f"{kind}{number}" for number in numbers)


# ---- drawing, in points ---------------------------------------------------------------------------------------------


def _draw_panel(axes: Axes, top: float, split: HeadGroups) -> None:
    copies = f", each KV head on {split.replicas} ranks" if split.replicas > 1 else ""
    held = (
        f"{split.heads_per_rank} of {split.heads} query heads a rank"
        if split.t > 1
        else f"all {split.heads} query heads"
    )
    heading(axes, top + 10, f"t = {split.t}: {held}{copies}")
    wide = (WIDTH - 2 * MARGIN - (split.t - 1) * _GAP) / split.heads
    for rank in range(split.t):
        queries, kv = split.heads_of(rank), split.kv_heads_of(rank)
        left, across = MARGIN + queries.start * wide + rank * _GAP, len(queries) * wide
        say(axes, left + across / 2, top + _TOP - 8, f"rank {rank}", ha="center", size=SMALL)
        _draw_row(axes, left, top + _TOP, across, "q", queries, "sharded")
        kind = "replicated" if split.replicas > 1 else "sharded"
        _draw_row(axes, left, top + _TOP + _HIGH + 3, across, "kv", kv, kind)
        line(axes, (left, top + _TOP + 2 * _HIGH + 7), (left + across - 1, top + _TOP + 2 * _HIGH + 7), INK, 1.0)


def _draw_row(axes: Axes, left: float, top: float, across: float, name: str, numbers: range, kind: str) -> None:
    """Tiles of one width that fill the rank's room."""
    wide = across / len(numbers)
    for place, number in enumerate(numbers):
        tile(axes, left + place * wide, top, wide - 1, _HIGH, kind, f"{name}{number}")


def _draw_legend(axes: Axes, top: float, replicas: bool) -> None:
    _draw_key(axes, MARGIN, top, "sharded", "on this rank only")
    if replicas:
        _draw_key(axes, MARGIN + 150, top, "replicated", "the same on several ranks")


def _draw_key(axes: Axes, left: float, top: float, kind: str, words: str) -> None:
    with lettering(SMALL):
        tile(axes, left, top, 22, 13, kind, "kv")
    say(axes, left + 28, top + 7, words, size=SMALL)
