"""What lies where along a layer: seen on real ranks, told from their values, and drawn for several ways side by side.

A region is a stretch of the layer in which activations lie over the ranks in one way; a collective stands at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn.functional import linear

from tpcode.comm import record
from tpcode.comm.ledger import Event
from tpcode.figures.marks import MARGIN, SMALL, WIDTH, arrow, lettering, line, require_ranks, say
from tpcode.figures.style import INK, RED, Picture, canvas, render, tile
from tpcode.layers import ColumnParallelLinear, Placement, RowParallelLinear
from tpcode.model import Block

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Place:
    """An activation on its way through a layer, as one rank has it.

    Attributes:
        name: what the picture calls it.
        tensor: this rank's values.
        used: which parameters are used there, and how each rank's gradient of them lies: "sharded", "replicated" or
            "partial", by the placement.
        forward, backward: the collectives between the place before and this one.
    """

    name: str
    tensor: Tensor
    used: tuple[tuple[str, str], ...] = ()
    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()


def observe_layer(block: Block, x: Tensor, dy: Tensor) -> list[Place]:
    """Run a layer forward and backward, and note what this rank has at each place, and what it sends where.

    Args:
        block: of a GPT-2 or Llama, with or without sequence parallelism.
        x, dy: input, and the gradient of the output: [b, s, h], or this rank's [b, s/t, h].
    """
    first, second = (m for m in block.ffn.children() if isinstance(m, ColumnParallelLinear | RowParallelLinear))
    linears = {"qkv": block.attention.qkv, "o_proj": block.attention.o_proj, "first": first, "second": second}
    seen: dict[str, Tensor] = {}
    sent: dict[tuple[str, str], list[Event]] = {}
    with record() as ledger:
        handles = [_note_values(module, name, seen) for name, module in {**linears, **_norms(block)}.items()]
        for name, module in linears.items():
            handles += _note_events(module, name, ledger.events, sent)
        y = block(x.clone().requires_grad_())
        y.backward(dy)
        for handle in handles:
            handle.remove()

    def at(name: str, tensor: Tensor, used: dict[str, Placement] | None = None, linear_layer: str = "") -> Place:
        kinds = tuple((what, _gradient_kind(placement)) for what, placement in (used or {}).items())
        events = [tuple(sent.get((linear_layer, phase), ())) for phase in ("forward", "backward")]
        return Place(name, tensor.detach(), kinds, *events)

    def parts(name: str) -> Tensor:
        return linear(seen[f"{name}, in"], linears[name].weight)

    def row_bias(name: str) -> dict[str, Placement]:
        return {} if linears[name].bias is None else {"db": linears[name].placements["bias"]}

    def own(name: str) -> dict[str, Placement]:
        return {"dW": linears[name].placements["weight"]}

    def gamma(norm) -> dict[str, Placement]:
        return {"dγ": norm.placements["weight"]}

    return [
        at("X", x),
        at("norm", seen["norm_1"], gamma(block.norm_1)),
        at("Q, K, V", seen["qkv"], own("qkv"), "qkv"),
        at("heads", seen["o_proj, in"]),
        at("summands of Y", parts("o_proj"), own("o_proj")),
        at("X + Y", seen["norm_2, in"], row_bias("o_proj"), "o_proj"),
        at("norm", seen["norm_2"], gamma(block.norm_2)),
        at("H", seen["first"], own("first"), "first"),
        at("Z", seen["second, in"]),
        at("summands of Y", parts("second"), own("second")),
        at("X + Y", y, row_bias("second"), "second"),
    ]


def kind_of(by_rank: Sequence[Tensor], whole: Tensor) -> str:
    """How a tensor lies over the ranks: "replicated", "sharded" or "partial", told from the values.

    Raises:
        ValueError: they are not the whole on each rank, nor pieces of it, nor summands.
    """
    shapes = {tuple(tensor.shape) for tensor in by_rank}
    if shapes == {tuple(whole.shape)}:
        if all(_close(tensor, whole) for tensor in by_rank):
            return "replicated"
        if _close(torch.stack(list(by_rank)).sum(0), whole):
            return "partial"
    elif sum(tensor.numel() for tensor in by_rank) == whole.numel():
        pieces = torch.cat([tensor.flatten() for tensor in by_rank]).sort().values
        if _close(pieces, whole.flatten().sort().values):
            return "sharded"
    raise ValueError(
        f"{len(by_rank)} tensors {sorted(map(list, shapes))} are not the whole {list(whole.shape)} on each rank, nor "
        f"pieces of it, nor summands"
    )


def regions(ways: Mapping[str, Sequence[Sequence[Place]]], whole: Sequence[Place]) -> Picture:
    """A layer downwards, each way in a column: what a rank has at each place, and the collectives in between.

    Args:
        ways: by name, what `observe_layer` returned on each rank: one or two ways.
        whole: what it returned on one rank alone.

    Raises:
        ValueError: not one or two ways, or not 2 to 8 ranks; ranks that used or sent different things; values that are
            neither the whole, nor pieces, nor summands.
    """
    if not 1 <= len(ways) <= 2:
        raise ValueError(f"the picture has room for one way or two, and there are {len(ways)}")
    columns = {name: _column(by_rank, whole) for name, by_rank in ways.items()}
    rows = max(len(column) for column in columns.values())
    gaps = [any(column[i].forward or column[i].backward for column in columns.values()) for i in range(rows)]
    tops, y = [], _TOP
    for gap in gaps:
        y += _GAP if gap else 4.0
        tops.append(y)
        y += _TILE
    with canvas(WIDTH, y + _LEGEND) as (figure, axes), lettering(8):
        for number, (name, column) in enumerate(columns.items()):
            left = MARGIN + number * (_COLUMN + 8)
            say(axes, left, 12, name, weight="bold", size=10)
            say(axes, left + _COLUMN, 12, "gradients", ha="right", size=SMALL)
            for cell, top, gap in zip(column, tops, gaps, strict=True):
                _draw_cell(axes, left, top, cell, gap)
        _draw_legend(axes, y + 8)
        return render(figure, "regions", _in_words(columns))


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """One place of one way, as it is drawn."""

    label: str
    kind: str
    used: tuple[tuple[str, str], ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def _column(by_rank: Sequence[Sequence[Place]], whole: Sequence[Place]) -> list[_Cell]:
    require_ranks(len(by_rank), 8)
    cells = []
    for number, dense in enumerate(whole):
        places = [rank[number] for rank in by_rank]
        first = places[0]
        if any(_apart_from_values(place) != _apart_from_values(first) for place in places) or first.name != dense.name:
            raise ValueError(f"at place {number}, {dense.name!r}, the ranks used or sent different things")
        kind = kind_of([place.tensor for place in places], dense.tensor)
        cells.append(
            _Cell(
                f"{first.name}  {list(first.tensor.shape)}",
                kind,
                first.used,
                tuple(event.op.replace("_", "-") for event in first.forward),
                tuple(event.op.replace("_", "-") for event in first.backward),
            )
        )
    return cells


def _apart_from_values(place: Place) -> tuple:
    return place.name, place.used, place.forward, place.backward


def _gradient_kind(placement: Placement) -> str:
    return "partial" if placement.partial_grad else "replicated" if placement.dim is None else "sharded"


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() < TOLERANCE)


def _norms(block: Block) -> dict:
    return {"norm_1": block.norm_1, "norm_2": block.norm_2}


def _note_values(module, name: str, seen: dict[str, Tensor]):
    """Note what goes in and what comes out."""

    def note(module, args, output):
        seen[f"{name}, in"], seen[name] = args[0].detach(), output.detach()

    return module.register_forward_hook(note)


def _note_events(module, name: str, events: list[Event], sent: dict[tuple[str, str], list[Event]]) -> list:
    """Note the collectives of a module's forward, and of its backward."""
    before: dict[str, int] = {}

    def enter(phase):
        def note(*_):
            before[phase] = len(events)

        return note

    def leave(phase):
        def note(*_):
            sent[name, phase] = events[before[phase] :]

        return note

    return [
        module.register_forward_pre_hook(enter("forward")),
        module.register_forward_hook(leave("forward")),
        module.register_full_backward_pre_hook(enter("backward")),
        module.register_full_backward_hook(leave("backward")),
    ]


def _in_words(columns: Mapping[str, Sequence[_Cell]]) -> str:
    ways = []
    for name, column in columns.items():
        steps = []
        for cell in column:
            if cell.forward or cell.backward:
                ways_of = [("forward", cell.forward), ("backward", cell.backward)]
                told = [f"{way} {' and '.join(ops)}" for way, ops in ways_of if ops]
                steps.append(f"({', '.join(told)})")
            used = "".join(f", {what} {kind}" for what, kind in cell.used)
            steps.append(f"{cell.label} {cell.kind}{used};")
        ways.append(f"{name}: {' '.join(steps)}")
    return f"A layer from top to bottom, with what one rank has. {' '.join(ways)}"


# ---- drawing, in points ---------------------------------------------------------------------------------------------

_TOP, _TILE, _GAP, _LEGEND = 20.0, 18.0, 30.0, 40.0
_COLUMN = (WIDTH - 2 * MARGIN - 8) / 2
_SIDE = 30.0  # the gradient's tile


def _draw_cell(axes: Axes, left: float, top: float, cell: _Cell, gap: bool) -> None:
    if gap:
        _draw_collectives(axes, left, top - _GAP, cell)
    tile(axes, left, top, _COLUMN - _SIDE - 4, _TILE, cell.kind, cell.label)
    for what, kind in cell.used:
        tile(axes, left + _COLUMN - _SIDE, top, _SIDE, _TILE, kind, what)


def _draw_collectives(axes: Axes, left: float, top: float, cell: _Cell) -> None:
    """An arrow down with what forward sends, one up with what backward does; ink, where nothing is sent."""
    for number, (ops, ends) in enumerate(((cell.forward, (0, 1)), (cell.backward, (1, 0)))):
        x = left + 6 + 10 * number
        heights = (top + 4, top + _GAP - 4)
        arrow(axes, (x, heights[ends[0]]), (x, heights[ends[1]]), RED if ops else INK)
        words = " + ".join(ops) if ops else "nothing"
        say(axes, left + 26, top + 9 + 12 * number, words, size=SMALL, color=RED if ops else INK)


def _draw_legend(axes: Axes, top: float) -> None:
    x = MARGIN
    for kind, words in (("sharded", "own share"), ("replicated", "the same"), ("partial", "a summand")):
        tile(axes, x, top, 52, 13, kind, kind)
        say(axes, x + 56, top + 6.5, words, size=SMALL)
        x += 116
    line(axes, (MARGIN, top + 22), (MARGIN + 14, top + 22), RED)
    say(axes, MARGIN + 20, top + 22, "arrows down: sent forward; up: sent backward", size=SMALL)
