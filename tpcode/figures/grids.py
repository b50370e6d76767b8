"""Ranks on their nodes, with the groups of one of them; and a pipeline's stages as lanes, with the bubble."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcode.config import Layout
from tpcode.cost.hardware import Card, card
from tpcode.cost.layout import coordinates, groups, link
from tpcode.figures.marks import MARGIN, SMALL, WIDTH, lettering, line, say
from tpcode.figures.style import INK, Picture, canvas, render, tile
from tpcode.shapes import require_int, require_rank

# ---- ranks on nodes -------------------------------------------------------------------------------------------------

MOST_RANKS = 128
_NODES_IN_A_ROW, _HEAD, _CELL, _ROW, _KEY = 2, 16.0, 17.0, 42.0, 17.0
_MEANING = {
    "tp": "tensor-parallel group, a shard each",
    "dp": "replicas of it, the same weights",
    "pp": "its pipeline, other layers",
}
_LINK = {"nvlink": "NVLink, inside a node", "network": "network, between nodes", "none": "nobody else"}


def rank_grid(layout: Layout, on: str | Card, rank: int = 0) -> Picture:
    """Every rank on its node, in Megatron's order, and of one rank the groups along each axis, with the link they use.

    Args:
        layout: cp must be 1; at most 128 ranks, in whole nodes of up to 8.
        on: a card or its name.
        rank: whose groups are marked.

    Raises:
        ValueError: no such card, rank or room.
    """
    here = card(on)
    node = here.gpus_per_node
    if layout.cp > 1 or layout.world_size > MOST_RANKS or layout.world_size % node or node > 8:
        raise ValueError(
            f"the picture has room for up to {MOST_RANKS} ranks in whole nodes of up to 8, with cp = 1; there are "
            f"{layout.world_size} on nodes of {node}, with cp = {layout.cp}"
        )
    rank = require_rank(rank, layout.world_size)
    own = {axis: next(group for group in groups(layout, axis) if rank in group) for axis in _MEANING}
    nodes = layout.world_size // node
    rows = -(-nodes // _NODES_IN_A_ROW)
    foot = _HEAD / 2 + rows * _ROW
    with canvas(WIDTH, foot + len(own) * _KEY + 8) as (figure, axes), lettering(SMALL):
        for number in range(nodes):
            _draw_node(axes, layout, number, node, own)
        for line_number, (axis, group) in enumerate(own.items()):
            _draw_key(axes, foot + (line_number + 0.5) * _KEY, axis, group, link(layout, here, axis))
        return render(figure, f"rank-grid-{rank}", _grid_in_words(layout, here, rank, own))


def _draw_node(axes: Axes, layout: Layout, number: int, size: int, own: dict[str, list[int]]) -> None:
    row, column = divmod(number, _NODES_IN_A_ROW)
    wide = (WIDTH - 2 * MARGIN) / _NODES_IN_A_ROW
    x, y = MARGIN + column * wide, _HEAD / 2 + row * _ROW
    say(axes, x, y + 6, _node_in_words(layout, number, size), size=SMALL)
    cell = (wide - 8) / size
    for place in range(size):
        _draw_rank(axes, x + place * cell, y + _HEAD, cell - 1.5, number * size + place, own)


def _draw_rank(axes: Axes, x: float, y: float, width: float, rank: int, own: dict[str, list[int]]) -> None:
    kind = "sharded" if rank in own["tp"] else "replicated" if rank in own["dp"] else ""
    if kind:
        tile(axes, x, y, width, _CELL, kind, str(rank))
    else:
        heavy = 2.0 if rank in own["pp"] else 0.5
        axes.add_patch(Rectangle((x, y), width, _CELL, facecolor="none", edgecolor=INK, lw=heavy))
        say(axes, x + width / 2, y + _CELL / 2, str(rank), ha="center", size=SMALL)


def _draw_key(axes: Axes, y: float, axis: str, group: list[int], over: str) -> None:
    """A sample of how the axis is drawn, its ranks, the link."""
    box = MARGIN, y - 6, 18.0, 12.0
    if axis == "pp":
        axes.add_patch(Rectangle(box[:2], *box[2:], facecolor="none", edgecolor=INK, lw=2.0))
        say(axes, MARGIN + 9, y, axis, ha="center", size=SMALL)
    else:
        tile(axes, *box, {"tp": "sharded", "dp": "replicated"}[axis], axis)
    say(axes, MARGIN + 24, y, f"{_MEANING[axis]}: {_LINK[over]}", size=8.5)


def _node_in_words(layout: Layout, number: int, size: int) -> str:
    """ "node 2: stage 1, replica 0"."""
    there = [coordinates(layout, rank) for rank in range(number * size, (number + 1) * size)]
    return f"node {number}: {_some('stage', {c['pp'] for c in there})}, {_some('replica', {c['dp'] for c in there})}"


def _some(what: str, numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{what} {low}" if low == high else f"{what}s {low} to {high}"


def _grid_in_words(layout: Layout, here: Card, rank: int, own: dict[str, list[int]]) -> str:
    node = here.gpus_per_node
    nodes = "; ".join(
        f"{_node_in_words(layout, n, node)}, ranks {n * node} to {(n + 1) * node - 1}"
        for n in range(layout.world_size // node)
    )
    marked = "; ".join(
        f"{axis} {', '.join(map(str, group))} ({_LINK[link(layout, here, axis)]})" for axis, group in own.items()
    )
    sizes = f"tp {layout.tp}, dp {layout.dp}, pp {layout.pp}"
    return f"{layout.world_size} ranks, {sizes}, on nodes of {node}. {nodes}. Groups of rank {rank}: {marked}."


# ---- a pipeline's schedule ------------------------------------------------------------------------------------------

FORWARD, BACKWARD = 1, 2  # time of a microbatch on a stage: backward has twice the products


@dataclass(frozen=True)
class Slot:
    """What a stage does for a while.

    Attributes:
        way: "forward" or "backward".
        microbatch, chunk: of which, and which of the stage's chunks of layers.
        start, end: in forwards of one microbatch on one stage.
    """

    way: str
    microbatch: int
    chunk: int
    start: Fraction
    end: Fraction


def pipeline_schedule(p: int, m: int, v: int = 1) -> list[list[Slot]]:
    """What each of p stages does with m microbatches, in order: one forward, one backward by turns, after as many
    forwards as it takes to fill the pipeline (1F1B; N21, figures 3 and 4). Sending takes no time here, and a backward
    takes as long as two forwards. With v > 1 chunks stage d has the chunks d, p + d, … of the model.

    Raises:
        ValueError: v > 1, and m is no multiple of p.
    """
    p, m, v = require_int(p, "p"), require_int(m, "m"), require_int(v, "v")
    if v > 1 and m % p:
        raise ValueError(f"with v = {v} the microbatches come in groups of p = {p}, and m = {m} is no multiple of it")
    orders = [_order(stage, p, m, v) for stage in range(p)]
    done: dict[tuple, Fraction] = {}
    stages: list[list[Slot]] = [[] for _ in orders]
    while any(len(slots) < len(order) for slots, order in zip(stages, orders)):
        for stage, (slots, order) in enumerate(zip(stages, orders)):
            if len(slots) < len(order):
                _try(stage, slots, order[len(slots)], done, p, v)
    return stages


def bubble(stages: list[list[Slot]]) -> Fraction:
    """The time that a stage waits, over the time that it works. All work equally long, so it is one number."""
    whole = max(slots[-1].end for slots in stages)
    work = sum(slot.end - slot.start for slot in stages[0])
    return (whole - work) / work


def most_under_way(slots: list[Slot]) -> int:
    """How many microbatches (or chunks of one) have gone forward on this stage, and not yet backward, at most."""
    now, most = 0, 0
    for slot in slots:
        now += 1 if slot.way == "forward" else -1
        most = max(most, now)
    return most


def _order(stage: int, p: int, m: int, v: int) -> list[tuple[str, int, int]]:
    """(way, microbatch, chunk) one after another."""
    ahead = p - stage - 1 if v == 1 else 2 * (p - stage - 1) + (v - 1) * p
    ahead = min(ahead, m * v)

    def numbered(k: int, way: str) -> tuple[str, int, int]:
        chunk = k % (p * v) // p
        return way, k // (p * v) * p + k % p, chunk if way == "forward" else v - 1 - chunk

    # With one chunk groups of p make no difference: the k-th is microbatch k.
    order = [numbered(k, "forward") for k in range(ahead)]
    for k in range(m * v):
        if ahead + k < m * v:
            order.append(numbered(ahead + k, "forward"))
        order.append(numbered(k, "backward"))
    return order


def _try(stage: int, slots: list[Slot], what: tuple[str, int, int], done: dict, p: int, v: int) -> None:
    """Do it, if what it needs is there."""
    way, microbatch, chunk = what
    part = chunk * p + stage  # of p·v parts of the model
    if way == "forward":
        needs = [] if part == 0 else [("forward", microbatch, part - 1)]
    else:
        needs = [("forward", microbatch, part)]
        needs += [] if part == p * v - 1 else [("backward", microbatch, part + 1)]
    if all(need in done for need in needs):
        free = slots[-1].end if slots else Fraction(0)
        start = max([free, *(done[need] for need in needs)])
        end = start + Fraction(FORWARD if way == "forward" else BACKWARD, v)
        slots.append(Slot(way, microbatch, chunk, start, end))
        done[way, microbatch, part] = end


# ---- a pipeline's lanes: drawing ------------------------------------------------------------------------------------

_SIDE, _LANE, _BOX = 42.0, 22.0, 16.0
_DIGIT = 4.6  # of a number in a box, at the smaller size


def pipeline_lanes(p: int, m: int, v: int = 1) -> Picture:
    """Stages below each other, time to the right: numbered microbatches forward, shaded backward, a line where a stage
    waits. With chunks the first has its number in plain, the others in bold.

    Raises:
        ValueError: see `pipeline_schedule`; more than 8 stages, or more boxes than there is room for.
    """
    stages = pipeline_schedule(p, m, v)
    whole = max(slots[-1].end for slots in stages)
    unit = (WIDTH - _SIDE - MARGIN) / float(whole)
    if p > 8 or unit / v < _DIGIT * len(str(m - 1)):
        raise ValueError(f"there is no room for {p} stages with {m} microbatches in {v} chunks each; take fewer")
    foot = 4 + p * _LANE
    waits = bubble(stages)
    with canvas(WIDTH, foot + 38) as (figure, axes):
        for stage, slots in enumerate(stages):
            y = 4 + (stage + 0.5) * _LANE
            say(axes, MARGIN, y, f"stage {stage}", size=SMALL)
            for start, end in zip([0, *(slot.end for slot in slots)], [*(slot.start for slot in slots), whole]):
                line(axes, (_SIDE + float(start) * unit, y), (_SIDE + float(end) * unit, y), INK, 0.5)
            for slot in slots:
                _draw_slot(axes, _SIDE + float(slot.start) * unit, y, float(slot.end - slot.start) * unit, slot)
        say(axes, _SIDE, foot + 9, "time →; forward: a number; backward: on grey; line: waiting", size=8.5)
        say(axes, _SIDE, foot + 26, f"waiting / working = {_share(waits)} on every stage", size=8.5, weight="bold")
        return render(figure, f"pipeline-{p}-{m}-{v}", _lanes_in_words(p, m, v, stages))


def _draw_slot(axes: Axes, x: float, y: float, width: float, slot: Slot) -> None:
    corner = x, y - _BOX / 2
    if slot.way == "backward":
        axes.add_patch(Rectangle(corner, width, _BOX, facecolor=INK, alpha=0.3, lw=0))
    axes.add_patch(Rectangle(corner, width, _BOX, facecolor="none", edgecolor=INK, lw=0.6))
    weight = "bold" if slot.chunk else "normal"
    say(axes, x + width / 2, y, str(slot.microbatch), ha="center", size=SMALL - 1, weight=weight)


def _share(waits: Fraction) -> str:
    return f"{waits.numerator}/{waits.denominator}" if waits.denominator > 1 else str(waits.numerator)


def _lanes_in_words(p: int, m: int, v: int, stages: list[list[Slot]]) -> str:
    chunks = f", {v} chunks of layers on each" if v > 1 else ""
    orders = "; ".join(
        f"stage {stage}: "
        + " ".join(f"{'F' if slot.way == 'forward' else 'B'}{slot.microbatch}" for slot in slots)
        + f", from {float(slots[0].start):g} to {float(slots[-1].end):g}"
        for stage, slots in enumerate(stages)
    )
    batch = f"{m} microbatch{'es' if m > 1 else ''}"
    return (
        f"{p} stages as lanes with {batch}{chunks}, time to the right, F forward (1 unit), B backward (2). "
        f"{orders}. {_waiting_in_words(bubble(stages))}."
    )


def _waiting_in_words(waits: Fraction) -> str:
    """ "Each stage waits 3/8 of the time that it works", "Each stage waits 3 times as long as it works"."""
    if waits == 0:
        return "No stage waits"
    if waits.denominator > 1:
        return f"Each stage waits {_share(waits)} of the time that it works"
    times = f"{_share(waits)} times " if waits > 1 else ""
    return f"Each stage waits {times}as long as it works"
