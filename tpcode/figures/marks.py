"""The small marks that pictures share: numbers, words, arrows, and the outline of what stands nowhere whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from tpcode.figures.style import INK, RED

WIDTH = 360.0  # points: what a phone shows without scrolling
MARGIN = 8.0
SMALL = 7.5  # points


def number(value) -> str:
    """A number as a tile shows it: whole where it is whole, with a minus sign and not a hyphen."""
    return f"{value:g}".replace("-", "−")


def of_rank(name: str, rank: int | str) -> str:
    """A shard's name as formulas have it: "A" of rank 0 is "A₀", "Aᵀ" is "A₀ᵀ", and of any rank, "r", "Aᵣ"."""
    base = name.removesuffix("ᵀ")
    return base + str(rank).translate(_SUBSCRIPTS) + name[len(base) :]


_SUBSCRIPTS = str.maketrans("0123456789r", "₀₁₂₃₄₅₆₇₈₉ᵣ")


def say(axes: Axes, x: float, y: float, words: str, **look) -> None:
    """Words in ink, from x on, around the height y."""
    axes.text(x, y, words, **{"color": INK, "va": "center_baseline", **look})


def heading(axes: Axes, y: float, words: str) -> None:
    say(axes, MARGIN, y, words, weight="bold", size=10)


def outline(axes: Axes, x: float, y: float, width: float, height: float, label: str) -> None:
    """A dashed box: a value that is spoken of, and that no rank holds in this form."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=INK, lw=0.7, ls=(0, (2, 2))))
    say(axes, x + width / 2, y + height / 2, label, ha="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = RED) -> None:
    """From start to end: red between ranks, ink within one."""
    look = {"arrowstyle": "-|>", "mutation_scale": 8, "color": colour, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, **look))


def line(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = RED, lw: float = 1.4) -> None:
    look = {"color": colour, "lw": lw, "ls": "-", "marker": "", "solid_capstyle": "butt"}
    axes.plot([start[0], end[0]], [start[1], end[1]], **look)


@contextmanager
def lettering(size: float) -> Iterator[None]:
    """What is drawn inside has its labels in this size."""
    with mpl.rc_context({"font.size": size}):
        yield


def require_ranks(t: int, most: int) -> int:
    """t, if a picture has room for that many ranks.

    Raises:
        ValueError: not 2 to `most`.
    """
    if not 2 <= t <= most:
        raise ValueError(f"the picture has room for 2 to {most} ranks, and there are {t}")
    return t
