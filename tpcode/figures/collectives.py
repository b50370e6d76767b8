"""The four collectives before and after, and the ring that makes an all-reduce: all computed from what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy import ndarray

from tpcode import byhand
from tpcode.figures.marks import (
    MARGIN,
    SMALL,
    WIDTH,
    arrow,
    heading,
    lettering,
    line,
    number,
    outline,
    require_ranks,
    say,
)
from tpcode.figures.style import RED, Picture, canvas, render, tile
from tpcode.shapes import divide

_MOST_RANKS = 4
_MOST_VALUES = 8
_LONGEST = {2: 30, 3: 18, 4: 15}  # characters that a tile of the ring holds, by the number of ranks


@dataclass(frozen=True)
class _Kind:
    """What one collective is called and does, and the placements of what it takes and gives."""

    name: str
    does: str
    before: str
    after: str
    adds: bool = False


_KINDS = {
    "all_reduce": _Kind("all-reduce", "every rank gets the sum", "partial", "replicated", adds=True),
    "all_gather": _Kind("all-gather", "every rank gets all pieces, in rank order", "sharded", "replicated"),
    "reduce_scatter": _Kind("reduce-scatter", "every rank gets its piece of the sum", "partial", "sharded", adds=True),
    "broadcast": _Kind("broadcast", "every rank gets what rank 0 holds", "", "replicated"),
}

# ---- what ranks hold ------------------------------------------------------------------------------------------------


def after(op: str, held: Sequence[ndarray]) -> list[ndarray]:
    """What each rank holds after a collective: `[rank 0's, rank 1's, …]` as before it, vectors of numbers.

    A reduce-scatter gives rank r piece r of the sum; a broadcast comes from rank 0.

    Raises:
        ValueError: no such op; vectors of different lengths; a reduce-scatter of a length that t does not divide.
    """
    if op not in _KINDS:
        raise ValueError(f"op must be one of {', '.join(_KINDS)} and is {op!r}")
    held, t = _vectors(held), len(held)
    if op == "all_reduce":
        return byhand.all_reduce(held)
    if op == "all_gather":
        return byhand.all_gather(held, axis=0)
    if op == "broadcast":
        return byhand.replicate(held[0], t)
    divide(len(held[0]), t, "values on each rank")
    return np.split(sum(held), t)


@dataclass(frozen=True)
class Message:
    """In one step of the ring: which rank sends which chunk to which, and whether it is added there or kept."""

    source: int
    target: int
    chunk: int
    adds: bool


@dataclass(frozen=True)
class Held:
    """One chunk as one rank holds it: the ranks whose summands are in it, in the order they were added; its value."""

    ranks: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Step:
    """One step of the ring: messages that are under way together, and `held[rank][chunk]` when they have arrived."""

    messages: tuple[Message, ...]
    held: tuple[tuple[Held, ...], ...]


def ring_steps(values) -> list[Step]:
    """A ring all-reduce of t chunks on t ranks, step by step; the first step has no messages: it is the start.

    Each rank sends to the next, t-1 times a chunk to be added (reduce-scatter), then t-1 times a finished one
    (all-gather): 2(t-1) messages of one chunk each (Patarasuk and Yuan 2009).

    Args:
        values: `values[rank][chunk]`.

    Raises:
        ValueError: there are not as many chunks as ranks.
    """
    held = [[Held((rank,), value) for value in row] for rank, row in enumerate(_vectors(values))]
    t = len(held)
    if len(held[0]) != t:
        raise ValueError(f"a ring of {t} ranks has {t} chunks on each, and values has {len(held[0])}")
    steps = [Step((), _frozen(held))]
    for turn in range(2 * (t - 1)):
        adds = turn < t - 1
        # Rank r begins with chunk r, and then sends on what has just arrived. After t - 1 steps that is finished.
        messages = tuple(Message(r, (r + 1) % t, (r - turn) % t, adds) for r in range(t))
        sent = [held[message.source][message.chunk] for message in messages]
        for message, arrived in zip(messages, sent):
            own = held[message.target][message.chunk]
            held[message.target][message.chunk] = _added(arrived, own) if adds else arrived
        steps.append(Step(messages, _frozen(held)))
    return steps


def _added(arrived: Held, own: Held) -> Held:
    return Held(arrived.ranks + own.ranks, arrived.value + own.value)


def _frozen(held: list[list[Held]]) -> tuple[tuple[Held, ...], ...]:
    return tuple(map(tuple, held))


def _vectors(values) -> list[ndarray]:
    """One vector a rank, all of one length.

    Raises:
        ValueError, TypeError: they are not.
    """
    vectors = [np.asarray(vector) for vector in values]
    if not vectors:
        raise ValueError("values has no ranks: it must be [rank 0's, rank 1's, …]")
    for rank, vector in enumerate(vectors):
        if vector.ndim != 1 or vector.shape != vectors[0].shape or not vector.size:
            raise ValueError(
                f"every rank holds a vector of as many values: rank 0's shape is {list(vectors[0].shape)} and rank "
                f"{rank}'s is {list(vector.shape)}"
            )
        if vector.dtype.kind not in "iuf":
            raise TypeError(f"rank {rank} must hold numbers and holds {vector.dtype}")
    return vectors


# ---- pictures -------------------------------------------------------------------------------------------------------


def before_after(op: str, values) -> Picture:
    """What each rank holds before and after one collective: "all_reduce", "all_gather", "reduce_scatter", "broadcast".

    Args:
        values: `[rank 0's, rank 1's, …]`, vectors of as many numbers.

    Raises:
        ValueError: no such op, not 2 to 4 ranks, more than 8 values on a rank, or as `after` says.
    """
    require_ranks(len(values), _MOST_RANKS)
    then = after(op, values)
    before, kind = _vectors(values), _KINDS[op]
    most = max(len(before[0]), len(then[0]))
    if most > _MOST_VALUES:
        raise ValueError(f"the picture has room for {_MOST_VALUES} values on a rank, and {op} makes it {most}")
    _require_room([number(value) for vector in [*before, *then] for value in vector], 9)
    top = _HEAD + len(before[0]) * _ROW
    with canvas(WIDTH, top + _BUS + max(len(then[0]) * _ROW, 28) + 6) as (figure, axes):
        heading(axes, 12, kind.name)
        say(axes, MARGIN, 27, kind.does)
        for rank in range(len(before)):
            say(axes, _middle(rank, len(before)), _HEAD - 9, f"rank {rank}", ha="center")
        _draw_held(axes, before, _HEAD, kind.before, "before")
        _draw_bus(axes, top, len(before), kind)
        _draw_held(axes, then, top + _BUS, kind.after, "after")
        return render(figure, op, _in_words(kind, before, then))


def ring(values) -> Picture:
    """A ring all-reduce step by step: what each rank holds, and in red what it sends to the next one.

    Chunks are a, b, c, …; a0 + a1 is the sum of rank 0's and rank 1's chunk a; Σa is the sum of all.

    Args:
        values: `values[rank][chunk]`: t ranks with t chunks, one number each.

    Raises:
        ValueError: not 2 to 4 ranks, or not as many chunks as ranks.
    """
    t = require_ranks(len(values), _MOST_RANKS)
    steps = ring_steps(values)
    _require_room([label(c, held, t) for step in steps for row in step.held for c, held in enumerate(row)], _LONGEST[t])
    legend = _RING_HEAD + len(steps) * (t * _ROW + _RING_GAP)
    with canvas(WIDTH, legend + 20) as (figure, axes):
        for rank in range(t):
            say(axes, _ring_left(rank, t) + _ring_width(t) / 2, 10, f"rank {rank}", ha="center", weight="bold")
        for turn, step in enumerate(steps):
            y = _RING_HEAD + turn * (t * _ROW + _RING_GAP)
            say(axes, MARGIN, y + 7, _ring_title(turn, t))
            _draw_ring_step(axes, y + 16, step)
            if turn + 1 < len(steps):
                for message in steps[turn + 1].messages:
                    _draw_message(axes, y + 16, message, t)
        _draw_legend(axes, legend)
        return render(figure, "ring", _ring_in_words(steps))


def label(chunk: int, held: Held, t: int) -> str:
    """A chunk's name as a tile shows it: "a0+a1" for a part, "Σa" for the sum of all t, with its value."""
    letter = "abcdefgh"[chunk]
    name = f"Σ{letter}" if len(held.ranks) == t else "+".join(f"{letter}{rank}" for rank in sorted(held.ranks))
    return f"{name} = {number(held.value)}"


def kind_of(chunk: int, rank: int, step: Step) -> str:
    """A part of a sum is partial; a finished sum is sharded until every rank has it."""
    t = len(step.held)
    if len(step.held[rank][chunk].ranks) < t:
        return "partial"
    return "replicated" if all(len(held[chunk].ranks) == t for held in step.held) else "sharded"


def _require_room(labels: list[str], most: int) -> None:
    longest = max(labels, key=len)
    if len(longest) > most:
        raise ValueError(
            f"a tile has room for {most} characters, and {longest!r} has {len(longest)}: take smaller numbers"
        )


# ---- words ----------------------------------------------------------------------------------------------------------


def _in_words(kind: _Kind, before: list[ndarray], then: list[ndarray]) -> str:
    def listed(held):
        return "; ".join(f"rank {rank} [{', '.join(map(number, vector))}]" for rank, vector in enumerate(held))

    does = f"{kind.name.capitalize()} on {len(before)} ranks: {kind.does}."
    return f"{does} Before: {listed(before)}. After: {listed(then)}."


def _ring_in_words(steps: list[Step]) -> str:
    t = len(steps[0].held)
    sentences = [f"A ring all-reduce on {t} ranks with {t} chunks each; every rank sends {len(steps) - 1} messages."]
    for turn, step in enumerate(steps[1:], start=1):
        does = "is added to its own" if step.messages[0].adds else "replaces its own"
        sent = ", ".join(f"{m.source} to {m.target} chunk {'abcdefgh'[m.chunk]}" for m in step.messages)
        sentences.append(f"Step {turn}, rank {sent}; what arrives {does}.")
    sums = ", ".join(f"{'abcdefgh'[chunk]} {number(held.value)}" for chunk, held in enumerate(steps[-1].held[0]))
    return " ".join([*sentences, f"In the end every rank has the sums {sums}."])


def _ring_title(turn: int, t: int) -> str:
    if turn == 0:
        return "start: a red arrow sends its chunk on"
    half = "reduce-scatter: arrivals are added" if turn < t else "all-gather: arrivals are kept"
    return f"after step {turn} of {2 * (t - 1)}, {half}"


# ---- drawing, in points ---------------------------------------------------------------------------------------------

_HEAD, _ROW, _BUS, _SIDE = 54.0, 20.0, 44.0, 52.0
_RING_HEAD, _RING_GAP, _ARROW = 20.0, 28.0, 15.0


def _middle(rank: int, t: int) -> float:
    """Where a rank's column has its middle; at the left there is room for "before" and "after"."""
    return _SIDE + (rank + 0.5) * (WIDTH - _SIDE) / t


def _draw_held(axes: Axes, held: list[ndarray], y: float, kind: str, when: str) -> None:
    say(axes, MARGIN, y + 8, when)
    say(axes, MARGIN, y + 20, kind, size=SMALL)
    width = 60.0
    for rank, vector in enumerate(held):
        x = _middle(rank, len(held)) - width / 2
        for i, value in enumerate(vector):
            box = x, y + i * _ROW, width, _ROW - 1
            if kind:
                tile(axes, *box, kind, number(value))
            else:
                outline(axes, *box, number(value))


def _draw_bus(axes: Axes, top: float, t: int, kind: _Kind) -> None:
    """Who puts in, at the left of its column, and who takes out, at the right of it."""
    y = top + _BUS / 2
    senders = range(t) if kind.before else [0]
    receivers = range(t) if kind.before else range(1, t)
    line(axes, (_middle(0, t) - 14, y), (_middle(t - 1, t) + 14, y))
    for rank in senders:
        x = _middle(rank, t) - 14
        line(axes, (x, top + 4), (x, y))
        if kind.adds:
            tile(axes, x - 5.5, y - 5.5, 11, 11, "partial", "+")
    for rank in receivers:
        x = _middle(rank, t) + 14
        arrow(axes, (x, y), (x, top + _BUS - 4))


def _ring_width(t: int) -> float:
    return (WIDTH - 2 * MARGIN - (t + 1) * _ARROW) / t


def _ring_left(rank: int, t: int) -> float:
    return MARGIN + _ARROW + rank * (_ring_width(t) + _ARROW)


def _draw_ring_step(axes: Axes, y: float, step: Step) -> None:
    """Every rank's chunks; what has just arrived has a red edge."""
    t = len(step.held)
    arrived = {(message.target, message.chunk) for message in step.messages}
    for rank, chunks in enumerate(step.held):
        for chunk, held in enumerate(chunks):
            box = _ring_left(rank, t), y + chunk * _ROW, _ring_width(t), _ROW - 2
            with lettering(7.0 if t == _MOST_RANKS else 8.5):
                tile(axes, *box, kind_of(chunk, rank, step), label(chunk, held, t))
            if (rank, chunk) in arrived:
                axes.add_patch(Rectangle(box[:2], *box[2:], facecolor="none", edgecolor=RED, lw=1.6))


def _draw_message(axes: Axes, y: float, message: Message, t: int) -> None:
    """An arrow into the gap at the right; the last rank's leaves the picture and comes in again at the left."""
    height = y + message.chunk * _ROW + _ROW / 2 - 1
    right = _ring_left(message.source, t) + _ring_width(t)
    arrow(axes, (right + 1, height), (right + _ARROW - 1, height))
    if message.target == 0:
        arrow(axes, (MARGIN, height), (MARGIN + _ARROW - 1, height))


def _draw_legend(axes: Axes, y: float) -> None:
    for x, kind, sign, words in (
        (MARGIN, "partial", "a0", "part of a sum"),
        (MARGIN + 112, "sharded", "Σa", "finished"),
        (MARGIN + 202, "replicated", "Σa", "finished everywhere"),
    ):
        tile(axes, x, y, 24, 14, kind, sign)
        say(axes, x + 30, y + 7, words, size=8)
