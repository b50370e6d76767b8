"""How every picture looks, and how it becomes an SVG that is the same on every machine.

Colour never stands alone: what is sharded is blue and plain, what is replicated green and dotted, what is partial amber
and striped, and each tile carries a label. Tiles bring their own ground. All other ink is a grey that is legible
on white and on black; the site turns it into the colour of the page's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK = "#767676"  # contrast at least 4.1 on white and on #121212
RED = "#d1242f"  # what passes between devices


@dataclass(frozen=True)
class Kind:
    """How a tile of one kind is drawn: its ground, the ink that is legible on it, and a pattern in a shade of it."""

    ground: str
    ink: str
    hatch: str = ""
    shade: str = ""


# The site's colours (Okabe and Ito's palette), in light and dark alike.
KINDS = {
    "sharded": Kind("#0072b2", "#ffffff"),
    "replicated": Kind("#009e73", "#000000", "..", "#008762"),
    "partial": Kind("#e69f00", "#000000", "//////", "#c88a00"),
}

_RC = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and scaled, and needs no glyph outlines
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the layout is the same everywhere
    "font.size": 9.0,
    "hatch.linewidth": 0.8,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Picture:
    """A drawn figure: its SVG, and the words that say the same to who cannot see it."""

    svg: str = field(repr=False)
    alt: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"


@contextmanager
def canvas(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """An empty drawing of `width` by `height` points in the book's style; y grows downwards. No display is opened."""
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        yield figure, axes


def tile(axes: Axes, x: float, y: float, width: float, height: float, kind: str, label: str) -> None:
    """A rectangle of one `kind` with its label inside. Every tile has a label: colour alone tells nobody apart."""
    if not label:
        raise ValueError(f"a {kind} tile at ({x:g}, {y:g}) has no label")
    look = KINDS[kind]
    axes.add_patch(Rectangle((x, y), width, height, facecolor=look.ground, lw=0))
    if look.hatch:
        axes.add_patch(Rectangle((x, y), width, height, facecolor="none", ec=look.shade, hatch=look.hatch, lw=0))
    axes.text(x + width / 2, y + height / 2, label, color=look.ink, ha="center", va="center_baseline")


def render(figure: Figure, name: str, alt: str) -> Picture:
    """The figure as a `Picture`, the same bytes on every run; `name` salts its ids."""
    out = StringIO()
    with mpl.rc_context({**_RC, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Metadata holds nothing; the style sheet would apply to the whole page that the picture stands in.
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", out.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg[svg.index("<svg") :]).strip()
    # On a screen narrower than 0.9 px a point it scrolls rather than shrinks, so that its text stays legible.
    narrowest = round(0.9 * 72 * figure.get_figwidth())
    return Picture(svg.replace("<svg", f'<svg style="min-width: {narrowest}px"', 1), alt)
