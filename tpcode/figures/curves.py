"""Loss curves laid over each other, told apart by width and marks rather than by colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, isfinite

from matplotlib.axes import Axes

from tpcode.figures.marks import MARGIN, SMALL, WIDTH, line, say
from tpcode.figures.style import INK, Picture, canvas, render

# The first lies under the others as a pale band, the second on it as a thin line, the third as rings on both.
_LOOKS = (
    {"lw": 7.0, "alpha": 0.3, "solid_capstyle": "round"},
    {"lw": 1.2, "solid_joinstyle": "round"},
    {"lw": 0.0, "marker": "o", "markersize": 5.5, "markerfacecolor": "none", "markeredgewidth": 1.0},
)
_LEFT, _TOP, _HEIGHT, _LEGEND = 38.0, 22.0, 150.0, 22.0
_RINGS = 12  # so many on a curve of rings: each is seen apart
_TICKS = 5


def loss_curves(curves: Mapping[str, Sequence[float]], unit: str = "nats a token") -> Picture:
    """The loss of each step, for up to three runs in one frame. Values are drawn to two decimals, which no eye misses
    and no machine's last digit can move.

    Args:
        curves: by a run's name, its loss in step 0, 1, …; all as long as the first.
        unit: of the loss.

    Raises:
        ValueError: not 1 to 3 runs; fewer than 2 steps, or not as many in each; a loss is not a finite number.
    """
    runs = {name: [round(float(value), 2) for value in losses] for name, losses in _require(curves).items()}
    values = [value for losses in runs.values() for value in losses]
    bottom, top = floor(min(values)), max(ceil(max(values)), floor(min(values)) + 1)
    steps = len(next(iter(runs.values())))

    def place(step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + 6 + (WIDTH - _LEFT - MARGIN - 12) * step / (steps - 1)
        return x, _TOP + _HEIGHT * (top - loss) / (top - bottom)

    with canvas(WIDTH, _TOP + _HEIGHT + 34 + _LEGEND * len(runs)) as (figure, axes):
        say(axes, MARGIN, 10, f"loss, {unit}", size=SMALL)
        _draw_frame(axes, place, bottom, top, steps)
        for losses, look in zip(runs.values(), _LOOKS):
            every = max(1, (steps - 1) // _RINGS) if "marker" in look else 1
            points = [place(step, losses[step]) for step in range(0, steps, every)]
            axes.plot(*zip(*points), **{"color": INK, "ls": "-", "marker": "", **look})
        _draw_legend(axes, list(runs))
        return render(figure, "loss-curves", _in_words(curves, unit))


def _require(curves: Mapping[str, Sequence[float]]) -> Mapping[str, Sequence[float]]:
    if not 1 <= len(curves) <= len(_LOOKS):
        raise ValueError(f"the picture has room for 1 to {len(_LOOKS)} runs, and there are {len(curves)}")
    lengths = {name: len(losses) for name, losses in curves.items()}
    if len(set(lengths.values())) > 1 or min(lengths.values()) < 2:
        raise ValueError(f"each run must have as many steps as the others, and at least 2: {lengths}")
    for name, losses in curves.items():
        if strange := [step for step, loss in enumerate(losses) if not isfinite(loss)]:
            raise ValueError(f"{name}: the loss of step {strange[0]} is {losses[strange[0]]}")
    return curves


def _draw_frame(axes: Axes, place, bottom: int, top: int, steps: int) -> None:
    """The two axes, a number at each whole loss, and at a few steps."""
    by = ceil((top - bottom) / _TICKS)
    for loss in range(bottom, top + 1, by):
        x, y = place(0, loss)
        line(axes, (_LEFT, y), (WIDTH - MARGIN, y), INK, 0.3)
        say(axes, _LEFT - 6, y, str(loss), ha="right", size=SMALL)
    baseline = _TOP + _HEIGHT
    for step in sorted({round((steps - 1) * part / 4) for part in range(5)}):
        x, _ = place(step, bottom)
        line(axes, (x, baseline), (x, baseline + 3), INK, 0.8)
        say(axes, x, baseline + 11, str(step), ha="center", size=SMALL)
    line(axes, (_LEFT, baseline), (WIDTH - MARGIN, baseline), INK, 0.8)
    say(axes, WIDTH - MARGIN, baseline + 24, "step", ha="right", size=SMALL)


def _draw_legend(axes: Axes, names: list[str]) -> None:
    """A row for each run: names side by side would soon be wider than the picture."""
    x = _LEFT + 6
    for row, (name, look) in enumerate(zip(names, _LOOKS)):
        y = _TOP + _HEIGHT + 34 + 6 + _LEGEND * row
        axes.plot([x, x + 14, x + 28], [y] * 3, **{"color": INK, "ls": "-", "marker": "", **look})
        say(axes, x + 38, y, name)


def _in_words(runs: Mapping[str, Sequence[float]], unit: str) -> str:
    ways = [
        f"{name}: {losses[0]:.2f} in step 0, {losses[-1]:.2f} in step {len(losses) - 1}"
        for name, losses in runs.items()
    ]
    first, *others = runs.values()
    apart = max((abs(a - b) for losses in others for a, b in zip(first, losses)), default=0.0)
    together = f" The largest distance from the first curve is {apart:.2f}." if others else ""
    return f"Loss in {unit} over the steps. {'; '.join(ways)}.{together}"
