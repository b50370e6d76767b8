"""Timelines below each other on one scale: what is multiplied, what is on the wire meanwhile, where a rank waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcode.comm.timeline import Span
from tpcode.figures.marks import MARGIN, SMALL, WIDTH, line, say
from tpcode.figures.style import INK, RED, Picture, canvas, render

_HEAD, _ROW, _APART, _FOOT = 20.0, 17.0, 8.0, 46.0  # points: a lane's name; a row; after a lane; axis and key
_LETTER = 5.4  # a span that is narrower than its name has no room for it
_TICKS = 4


def timelines(lanes: Mapping[str, Sequence[Span]], names: Sequence[str] = ()) -> Picture:
    """Each lane has two rows: products in boxes and waiting striped above, collectives in red below.

    Args:
        lanes: by a lane's name its spans, as `tpcode.comm.timeline` records them, or made up by a model of cost. All
            times count from the earliest start among them.
        names: what the products of each lane are called, in order, in place of their shapes.

    Raises:
        ValueError: no lane, or one without spans; a span without an end, or that ends before it starts; names are given
            and a lane has not as many products.
    """
    lanes = {name: _named(name, spans, names) for name, spans in lanes.items()}
    _require(lanes)
    first = min(span.start for spans in lanes.values() for span in spans)
    last = max(span.end for spans in lanes.values() for span in spans)
    scale = (WIDTH - 2 * MARGIN) / (last - first)
    lane = _HEAD + 2 * _ROW + _APART
    with canvas(WIDTH, len(lanes) * lane + _FOOT) as (figure, axes):
        for number, (name, spans) in enumerate(lanes.items()):
            top = number * lane
            say(axes, MARGIN, top + 11, name, weight="bold")
            for span in spans:
                _draw_span(axes, MARGIN + (span.start - first) * scale, top + _HEAD, span, scale)
        _draw_foot(axes, len(lanes) * lane, last - first)
        return render(figure, "timelines", _in_words(lanes, first))


def _named(lane: str, spans: Sequence[Span], names: Sequence[str]) -> list[Span]:
    products = [span for span in spans if span.kind == "product"]
    if names and len(products) != len(names):
        raise ValueError(f"{lane!r} has {len(products)} products, and there are {len(names)} names")
    labels = iter(names or [span.name for span in products])
    return [replace(span, name=next(labels)) if span.kind == "product" else span for span in spans]


def _require(lanes: Mapping[str, Sequence[Span]]) -> None:
    if not lanes:
        raise ValueError("timelines draws at least one lane, and got none")
    for name, spans in lanes.items():
        if not spans:
            raise ValueError(f"the lane {name!r} has no spans")
        for span in spans:
            if not (isfinite(span.start) and isfinite(span.end) and span.end >= span.start):
                raise ValueError(f"{name!r}: {span.kind} {span.name} goes from {span.start} to {span.end}")
    if len({moment for spans in lanes.values() for span in spans for moment in (span.start, span.end)}) < 2:
        raise ValueError("nothing here takes any time")


# ---- drawing, in points ---------------------------------------------------------------------------------------------


def _draw_span(axes: Axes, x: float, top: float, span: Span, scale: float) -> None:
    width = span.seconds * scale
    if span.kind == "collective":
        axes.add_patch(Rectangle((x, top + _ROW + 3), width, _ROW - 8, facecolor=RED, lw=0))
        return
    look = {"lw": 0.8} if span.kind == "product" else {"lw": 0.4, "hatch": "////", "alpha": 0.7}
    axes.add_patch(Rectangle((x, top), width, _ROW - 2, facecolor="none", edgecolor=INK, **look))
    if span.kind == "product" and width > _LETTER * len(span.name) + 3:
        say(axes, x + width / 2, top + _ROW / 2 - 1, span.name, ha="center", size=8)


def _draw_foot(axes: Axes, top: float, seconds: float) -> None:
    """The scale in milliseconds, and what the looks mean."""
    line(axes, (MARGIN, top), (WIDTH - MARGIN, top), INK, 0.8)
    step = _step(1e3 * seconds / _TICKS)
    for number in range(int(1e3 * seconds / step) + 1):
        x = MARGIN + number * step / 1e3 / seconds * (WIDTH - 2 * MARGIN)
        line(axes, (x, top), (x, top + 3), INK, 0.8)
        if x < WIDTH - 40:
            say(axes, x, top + 11, f"{number * step:g}", ha="left" if number == 0 else "center", size=SMALL)
    say(axes, WIDTH - MARGIN, top + 11, "ms", ha="right", size=SMALL)
    x = MARGIN
    keys = {
        "product": ({"facecolor": "none", "edgecolor": INK, "lw": 0.8}, 54.0),
        "waiting": ({"facecolor": "none", "edgecolor": INK, "lw": 0.4, "hatch": "////", "alpha": 0.7}, 54.0),
        "collective, from launch to end": ({"facecolor": RED, "lw": 0}, 0.0),
    }
    for words, (look, width) in keys.items():
        axes.add_patch(Rectangle((x, top + 25), 16, 9, **look))
        say(axes, x + 21, top + 30, words, size=8)
        x += 21 + width + 12


def _step(about: float) -> float:
    """A round number near this: 1, 2 or 5 and zeros."""
    size = 10.0 ** len(str(int(about))) / 10 if about >= 1 else 1.0
    while size > about:
        size /= 10
    return size * max(one for one in (1, 2, 5) if one * size <= about)


def _in_words(lanes: Mapping[str, Sequence[Span]], first: float) -> str:
    def words(span: Span) -> str:
        what = {"product": span.name, "collective": f"{span.name} on the wire", "wait": "waits"}[span.kind]
        return f"{what} from {1e3 * (span.start - first):.2f} to {1e3 * (span.end - first):.2f} ms"

    return "Time to the right. " + " ".join(f"{name}: {'; '.join(map(words, spans))}." for name, spans in lanes.items())
