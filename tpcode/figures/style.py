"""How every picture looks, and how it becomes an SVG that is the same on every machine.

Colour never stands alone: what is sharded is blue and hatched, what is replicated is green and plain, what is partial
is amber and marked "+". Tiles bring their own light ground; all other ink is the page's own text colour (SVG's
`currentColor`), so that a picture is legible on a light page and on a dark one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import StringIO

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK = "#010203"  # becomes currentColor in the SVG; nothing else is drawn in this colour
TILE_INK = "#111111"  # text on a tile's own light ground
RED = "#d1242f"  # what passes between devices


@dataclass(frozen=True)
class Kind:
    """How a tile of one kind is drawn: ground, line, and the pattern that says the same without colour."""

    ground: str
    line: str
    hatch: str = ""


KINDS = {
    "sharded": Kind("#cfe3f7", "#1f66ad", "////"),
    "replicated": Kind("#cdebd9", "#187a4b"),
    "partial": Kind("#fbdf9f", "#a86b00"),
}

_RC = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and scaled, and needs no glyph outlines
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the layout is the same everywhere
    "font.size": 9.0,
    "hatch.linewidth": 0.5,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Picture:
    """A drawn figure: its SVG, and the sentence that says the same to who cannot see it."""

    svg: str = field(repr=False)
    alt: str

    def _repr_html_(self) -> str:
        """Inline, so that `currentColor` is the page's; on a narrow screen the picture scrolls rather than shrinks."""
        return f'<div style="overflow-x: auto">{self.svg}</div>'

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
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=look.ground, edgecolor=_pale(look), hatch=look.hatch, lw=0)
    )
    axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=look.line, lw=1.0))
    axes.text(x + width / 2, y + height / 2, label, color=TILE_INK, ha="center", va="center_baseline")


def render(figure: Figure, name: str, alt: str) -> Picture:
    """The figure as a `Picture`: same bytes on every run. `name` keeps ids apart where a page shows several."""
    out = StringIO()
    with mpl.rc_context({**_RC, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Picture(_inline(out.getvalue(), name, alt), alt)


def _inline(svg: str, name: str, alt: str) -> str:
    """Matplotlib's SVG file as an element that can stand inside a page."""
    svg = svg[svg.index("<svg") :].strip()
    # Metadata holds nothing; the style sheet would apply to the whole page that the picture stands in.
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    width = round(float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]))
    # A third larger than drawn where there is room; where there is none it scrolls rather than shrinks.
    look = f"width: 100%; min-width: {width}px; max-width: {width * 4 // 3}px; height: auto; stroke-linejoin: round"
    head = f'<svg role="img" aria-label="{escape(alt)}" style="{look}"'
    svg = re.sub(r'<svg (.*?) width="[^"]*" height="[^"]*"', rf"{head} \1", svg, count=1, flags=re.DOTALL)
    return svg.replace(INK, "currentColor")


def _pale(look: Kind) -> str:
    """The hatch's colour: nearer to the ground than to the line, so that the label stays legible."""
    ground, line = (mpl.colors.to_rgb(colour) for colour in (look.ground, look.line))
    return mpl.colors.to_hex([0.6 * g + 0.4 * l for g, l in zip(ground, line)])
