"""One model, four devices, three ways: data, pipeline and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from tpcode.figures.style import INK, RED, Picture, canvas, render, tile


@dataclass(frozen=True)
class Tile:
    """What one device holds of one row (row 0 is the batch, row n + 1 layer n): from `start` to `stop` of 1."""

    row: int
    label: str
    kind: str
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True)
class Sum:
    """Parts that all devices add up together, after the given row."""

    after_row: int


@dataclass(frozen=True)
class Hop:
    """What one device hands to the next: from this device and row to the following ones."""

    device: int
    row: int


@dataclass(frozen=True)
class Split:
    """One way to use the devices: who holds what, what passes between them, and both in words."""

    name: str
    holds: str
    sends: str
    devices: tuple[tuple[Tile, ...], ...]
    traffic: tuple[Sum | Hop, ...]


def data_parallel(layers: int, devices: int) -> Split:
    """Every device holds every layer and sees its own part of the batch; gradients are added up once a step."""
    whole = tuple(Tile(row, f"layer {row - 1}", "replicated") for row in range(1, layers + 1))
    return Split(
        "Data parallel",
        "every device has all layers, and its own part of the batch",
        "once a step: gradients, to be added up",
        tuple((Tile(0, f"batch·{r}", "sharded"), *whole) for r in range(devices)),
        (Sum(layers),),
    )


def pipeline_parallel(layers: int, devices: int) -> Split:
    """Every device holds its own layers; activations go on to the next device, their gradients come back."""
    stages = [[Tile(0, "batch", "sharded")], *([] for _ in range(devices - 1))]
    stage_of = {row: (row - 1) * devices // layers for row in range(1, layers + 1)}
    for row, stage in stage_of.items():
        stages[stage].append(Tile(row, f"layer {row - 1}", "sharded"))
    hops = tuple(Hop(stage, row) for row, stage in stage_of.items() if stage_of.get(row + 1, stage) != stage)
    return Split(
        "Pipeline parallel",
        "every device has its own layers, whole",
        "at each boundary: activations on, their gradients back",
        tuple(map(tuple, stages)),
        hops,
    )


def tensor_parallel(layers: int, devices: int) -> Split:
    """Every device holds a slice of every layer and sees the whole batch; every layer adds up partial sums."""

    def slices(r: int) -> tuple[Tile, ...]:
        rows = range(1, layers + 1)
        return tuple(Tile(row, f"{row - 1}·{r}", "sharded", r / devices, (r + 1) / devices) for row in rows)

    return Split(
        "Tensor parallel",
        "every device has a slice of every layer, and the whole batch",
        "in every layer, forward and backward: partial sums",
        tuple((Tile(0, "batch", "replicated"), *slices(r)) for r in range(devices)),
        tuple(Sum(row) for row in range(1, layers + 1)),
    )


def three_splits(layers: int = 4, devices: int = 4) -> Picture:
    """The same model on the same devices three ways, one panel each.

    Raises:
        ValueError: not 2 to 4 devices (a slice would be too narrow for its label), or fewer layers than devices.
    """
    if not 2 <= devices <= 4 or layers < devices:
        raise ValueError(f"three_splits draws 2 to 4 devices and at least as many layers, got {devices=}, {layers=}")
    splits = [make(layers, devices) for make in (data_parallel, pipeline_parallel, tensor_parallel)]
    width = _LEFT + devices * (_BOX + _GAP)
    panel = _HEAD + (layers + 1) * _ROW + _FOOT
    with canvas(width, len(splits) * panel + _LEGEND) as (figure, axes):
        for number, split in enumerate(splits):
            _draw_split(axes, split, number * panel, layers)
        _draw_legend(axes, len(splits) * panel)
        return render(figure, "three-splits", describe(splits))


def describe(splits: list[Split]) -> str:
    """The picture in words."""
    many = len(splits[0].devices)
    ways = " ".join(f"{split.name}: {split.holds}; {split.sends}." for split in splits)
    return f"The same model on {many} devices, three ways. {ways}"


# ---- drawing, in points ---------------------------------------------------------------------------------------------

_LEFT, _BOX, _GAP = 8.0, 80.0, 8.0
_HEAD, _ROW, _TILE, _FOOT, _LEGEND = 56.0, 29.0, 15.0, 34.0, 46.0


def _left(device: int) -> float:
    return _LEFT + device * (_BOX + _GAP)


def _draw_split(axes: Axes, split: Split, top: float, layers: int) -> None:
    axes.text(_LEFT, top + 14, split.name, color=INK, weight="bold", size=10.5)
    axes.text(_LEFT, top + 28, split.holds, color=INK)
    rows_top = top + _HEAD
    for device, tiles in enumerate(split.devices):
        x = _left(device)
        axes.text(x + _BOX / 2, top + 45, f"device {device}", color=INK, ha="center", size=8)
        box = (x, rows_top - 6), _BOX, (layers + 1) * _ROW + 6
        axes.add_patch(Rectangle(*box, facecolor="none", edgecolor=INK, alpha=0.6, lw=0.8))
        for row in range(1, layers + 1):  # the whole layer's outline: what this device does not hold is seen too
            ghost = (x + 6, rows_top + row * _ROW), _BOX - 12, _TILE
            axes.add_patch(Rectangle(*ghost, facecolor="none", edgecolor=INK, alpha=0.45, lw=0.6, ls=(0, (2, 2))))
        for held in tiles:
            full = _BOX - 12
            left, y = x + 6 + held.start * full, rows_top + held.row * _ROW
            tile(axes, left, y, (held.stop - held.start) * full, _TILE, held.kind, held.label)
    for sent in split.traffic:
        draw = _draw_sum if isinstance(sent, Sum) else _draw_hop
        draw(axes, sent, rows_top, len(split.devices))
    axes.text(_LEFT, rows_top + (layers + 1) * _ROW + 13, f"Sent {split.sends}", color=INK)


def _draw_sum(axes: Axes, sent: Sum, rows_top: float, devices: int) -> None:
    """A red line through all devices, with a "+" where each puts its part in."""
    y = rows_top + sent.after_row * _ROW + (_TILE + _ROW) / 2  # midway to the next row
    _arrow(axes, (_left(0) + 6, y), (_left(devices - 1) + _BOX - 6, y))
    for device in range(devices):
        _plus(axes, _left(device) + _BOX / 2, y)


def _draw_hop(axes: Axes, sent: Hop, rows_top: float, devices: int) -> None:
    start = _left(sent.device) + _BOX - 6, rows_top + sent.row * _ROW + _TILE / 2
    end = _left(sent.device + 1) + 6, rows_top + (sent.row + 1) * _ROW + _TILE / 2
    _arrow(axes, start, end)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Two heads: what is sent forward has its counterpart backward."""
    look = {"arrowstyle": "<|-|>", "mutation_scale": 8, "color": RED, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, **look))


def _plus(axes: Axes, x: float, y: float) -> None:
    tile(axes, x - 5.5, y - 5.5, 11, 11, "partial", "+")


def _draw_legend(axes: Axes, top: float) -> None:
    y = top + 8
    x = _LEFT
    tile(axes, x, y, 34, 14, "replicated", "all")
    axes.text(x + 40, y + 7, "the same on every device", color=INK, va="center_baseline", size=8)
    tile(axes, x + 174, y, 34, 14, "sharded", "own")
    axes.text(x + 214, y + 7, "on this device only", color=INK, va="center_baseline", size=8)
    y += 22
    _plus(axes, x + 17, y + 7)
    axes.text(x + 40, y + 7, "parts of a sum, to be added", color=INK, va="center_baseline", size=8)
    _arrow(axes, (x + 174, y + 7), (x + 208, y + 7))
    axes.text(x + 214, y + 7, "passes between devices", color=INK, va="center_baseline", size=8)
