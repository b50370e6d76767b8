"""Ranks as lanes with their collectives, read from ledgers; and an FFN's way from X to Z and back, with placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcode.comm.ledger import Event, Ledger
from tpcode.figures.marks import MARGIN, SMALL, WIDTH, arrow, line, of_rank, require_ranks, say
from tpcode.figures.style import INK, RED, Picture, canvas, render, tile

# ---- lanes ----------------------------------------------------------------------------------------------------------


def ranks_as_lanes(ledgers: Sequence[Ledger | Sequence[Event]], work: Sequence[str] = ()) -> Picture:
    """Ranks below each other, time to the right: every collective of their ledgers, and the local work in between.

    Args:
        ledgers: `[rank 0's, rank 1's, …]`: each rank's `Ledger`, or its events.
        work: what each rank does before the first collective, between two, and after the last; "{r}" becomes the
            rank, "A_{r}" its A₀, A₁, …, and "" leaves a gap empty. As many as there are collectives and one more;
            none at all is allowed.

    Raises:
        ValueError: the ranks have not called the same collectives in the same order, all of them in each; not as many
            words as gaps, or some too long; not 2 to 8 ranks.
    """
    t = require_ranks(len(ledgers), 8)
    events = same_events(ledgers)
    work = _require_work(tuple(work), len(events))
    staves = _staves(_spans(len(events), work, t))
    staff = _LANES_HEAD + t * _LANE + 12
    legend = len(staves) * staff + 4
    with canvas(WIDTH, legend + max(len(events), 1) * _LINE + 6) as (figure, axes):
        for number, spans in enumerate(staves):
            _draw_staff(axes, number * staff, spans, t)
        _draw_events(axes, legend, events)
        return render(figure, "lanes", _lanes_in_words(events, work, t))


def same_events(ledgers: Sequence[Ledger | Sequence[Event]]) -> list[Event]:
    """The collectives of all ranks, if each has called the same ones, in the same order and with all the others.

    Raises:
        ValueError: it has not; the message names the first rank and the first collective that differ.
    """
    calls = [list(ledger.events if isinstance(ledger, Ledger) else ledger) for ledger in ledgers]
    for rank, events in enumerate(calls):
        if len(events) != len(calls[0]):
            raise ValueError(f"rank 0 called {len(calls[0])} collectives and rank {rank} called {len(events)}")
        for number, (event, first) in enumerate(zip(events, calls[0]), start=1):
            if event != first:
                raise ValueError(
                    f"collective {number} differs: rank 0 called {in_words(first)}, rank {rank} {in_words(event)}"
                )
    for number, event in enumerate(calls[0], start=1):
        if event.group != tuple(range(len(calls))):
            raise ValueError(f"collective {number} is of the ranks {event.group}, and there are {len(calls)} lanes")
    return calls[0]


def in_words(event: Event) -> str:
    """An event in one line: "all-reduce, forward, [1, 2], 16 bytes of payload"."""
    op = event.call.replace("_", "-")
    return f"{op}, {event.phase}, {list(event.shape)}, {event.payload_bytes:,} bytes of payload"


def _require_work(work: tuple[str, ...], collectives: int) -> tuple[str, ...]:
    if not work:
        return ("",) * (collectives + 1)
    if len(work) != collectives + 1:
        raise ValueError(f"{collectives} collectives leave {collectives + 1} gaps for work, and there are {len(work)}")
    longest = max(work, key=len)
    if len(longest) > _MOST_LETTERS:
        raise ValueError(f"a box has room for {_MOST_LETTERS} characters, and {longest!r} has {len(longest)}")
    return work


def _for_rank(words: str, rank: int | str) -> str:
    """The words with the rank in them, at the foot of a letter where "_{r}" stands."""
    return words.replace("_{r}", of_rank("", rank)).replace("{r}", str(rank))


@dataclass(frozen=True)
class Span:
    """A stretch of time: a collective, by its number from 1, or local work in words (0)."""

    width: float
    words: str = ""
    collective: int = 0


def _spans(collectives: int, work: tuple[str, ...], t: int) -> list[Span]:
    """Work and collectives by turns, in the order of time."""
    spans = []
    for number, words in enumerate(work):
        longest = len(_for_rank(words, t - 1))
        spans.append(Span(max(_GAP, longest * _LETTER + 12) if words else _GAP, words))
        if number < collectives:
            spans.append(Span(_BAR, collective=number + 1))
    return spans


def _staves(spans: list[Span]) -> list[list[Span]]:
    """Spans in rows as wide as a phone, as music is set in staves."""
    staves, room = [[]], 0.0
    for span in spans:
        if staves[-1] and span.width > room:
            staves.append([])
        if not staves[-1]:
            room = WIDTH - _SIDE - MARGIN
        staves[-1].append(span)
        room -= span.width
    return staves


def _lanes_in_words(events: list[Event], work: tuple[str, ...], t: int) -> str:
    sentences = [f"{t} ranks as lanes, time to the right; collectives of all ranks across them: {len(events)}."]
    for number, words in enumerate(work):
        if words:
            sentences.append(f"Each rank alone: {_for_rank(words, 'r')}.")
        if number < len(events):
            sentences.append(f"Collective {number + 1}: {in_words(events[number])}.")
    return " ".join(sentences)


# ---- lanes: drawing, in points --------------------------------------------------------------------------------------

_LANES_HEAD, _LANE, _SIDE, _LINE = 20.0, 26.0, 46.0, 16.0
_GAP, _BAR, _LETTER, _MOST_LETTERS = 24.0, 22.0, 5.6, 48


def _draw_staff(axes: Axes, top: float, spans: list[Span], t: int) -> None:
    lanes = [top + _LANES_HEAD + (rank + 0.5) * _LANE for rank in range(t)]
    for rank, y in enumerate(lanes):
        say(axes, MARGIN, y, f"rank {rank}")
    x = _SIDE
    for span in spans:
        draw = _draw_collective if span.collective else _draw_work
        draw(axes, x, lanes, span)
        x += span.width


def _draw_work(axes: Axes, x: float, lanes: list[float], span: Span) -> None:
    """In each lane a box with the words, or the bare lane."""
    for rank, y in enumerate(lanes):
        if not span.words:
            line(axes, (x, y), (x + span.width, y), INK, 0.8)
            continue
        line(axes, (x, y), (x + 3, y), INK, 0.8)
        line(axes, (x + span.width - 3, y), (x + span.width, y), INK, 0.8)
        box = (x + 3, y - 9), span.width - 6, 18
        axes.add_patch(Rectangle(*box, facecolor="none", edgecolor=INK, lw=0.8))
        say(axes, x + span.width / 2, y, _for_rank(span.words, rank), ha="center", size=8.5)


def _draw_collective(axes: Axes, x: float, lanes: list[float], span: Span) -> None:
    """A bar over all lanes, with its number above."""
    middle = x + span.width / 2
    for y in lanes:
        line(axes, (x, y), (middle - 4, y), INK, 0.8)
        line(axes, (middle + 4, y), (x + span.width, y), INK, 0.8)
    top, bottom = lanes[0] - 10, lanes[-1] + 10
    axes.add_patch(Rectangle((middle - 4, top), 8, bottom - top, facecolor=RED, lw=0))
    say(axes, middle, top - 7, str(span.collective), ha="center", weight="bold")


def _draw_events(axes: Axes, top: float, events: list[Event]) -> None:
    """What each number stands for."""
    if not events:
        say(axes, MARGIN, top + _LINE / 2, "no collectives")
    for number, event in enumerate(events):
        y = top + (number + 0.5) * _LINE
        say(axes, MARGIN, y, str(number + 1), weight="bold")
        say(axes, MARGIN + 16, y, in_words(event))


# ---- the FFN's placements -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A tensor on its way: what a rank holds of it.

    Attributes:
        name: with "ᵣ" where it is rank r's own.
        whole, local: shapes, in the book's letters.
        placement: "replicated", "sharded" or "partial".
    """

    name: str
    whole: tuple[str, ...]
    local: tuple[str, ...]
    placement: str


@dataclass(frozen=True)
class Passage:
    """What stands between two states: the work forward and backward, and which of the two is a collective."""

    forward: str
    backward: str
    collective: str = ""


_BSH, _BSF, _SHARD = ("b", "s", "h"), ("b", "s", "F"), ("b", "s", "F/t")

# From the input down to the output; backward goes up. State i of both is on the same side of the same passages.
FFN_FORWARD = (
    State("X", _BSH, _BSH, "replicated"),
    State("X", _BSH, _BSH, "replicated"),
    State("Zᵣ", _BSF, _SHARD, "sharded"),
    State("Yᵣ", _BSH, _BSH, "partial"),
    State("Y", _BSH, _BSH, "replicated"),
)
FFN_BACKWARD = (
    State("dX", _BSH, _BSH, "replicated"),
    State("dXᵣ", _BSH, _BSH, "partial"),
    State("dZᵣ", _BSF, _SHARD, "sharded"),
    State("dY", _BSH, _BSH, "replicated"),
    State("dY", _BSH, _BSH, "replicated"),
)
FFN_PASSAGES = (
    Passage("copy (f): identity", "copy (f): all-reduce", "backward"),
    Passage("Zᵣ = GeLU(X Aᵣ)", "dXᵣ = (dZᵣ ⊙ GeLU′) Aᵣᵀ"),
    Passage("Yᵣ = Zᵣ Bᵣ", "dZᵣ = dY Bᵣᵀ"),
    Passage("reduce (g): all-reduce", "reduce (g): identity", "forward"),
)


def ffn_placements() -> Picture:
    """The FFN split by columns, then rows: X → Zᵣ → Yᵣ → Y downwards, and the gradients back up beside it."""
    height = _TOP + len(FFN_FORWARD) * _STATE + len(FFN_PASSAGES) * _PASSAGE + 8
    with canvas(WIDTH, height) as (figure, axes):
        for x, direction in zip(_COLUMNS, ("forward, down", "backward, up")):
            say(axes, x, 12, direction, weight="bold", size=10)
        for row, states in enumerate(zip(FFN_FORWARD, FFN_BACKWARD)):
            for x, state in zip(_COLUMNS, states):
                _draw_state(axes, x, _TOP + row * (_STATE + _PASSAGE), state)
        for row, passage in enumerate(FFN_PASSAGES):
            _draw_passage(axes, _TOP + row * (_STATE + _PASSAGE) + _STATE, passage)
        return render(figure, "ffn-placements", _ffn_in_words())


def _ffn_in_words() -> str:
    def way(states, works):
        steps = [f"{state.name} {_shape(state.local)} {state.placement}" for state in states]
        return "; ".join([steps[0], *(f"{work}, so {step}" for work, step in zip(works, steps[1:]))])

    forward = way(FFN_FORWARD, [passage.forward for passage in FFN_PASSAGES])
    backward = way(FFN_BACKWARD[::-1], [passage.backward for passage in FFN_PASSAGES[::-1]])
    return f"The FFN on t ranks, A cut by columns and B by rows. Forward: {forward}. Backward: {backward}."


def _shape(sizes: tuple[str, ...]) -> str:
    return f"[{', '.join(sizes)}]"


# ---- the FFN's placements: drawing, in points -----------------------------------------------------------------------

_TOP, _STATE, _PASSAGE = 26.0, 34.0, 30.0
_COLUMNS, _COLUMN = (MARGIN, WIDTH / 2 + 4), WIDTH / 2 - MARGIN - 8


def _draw_state(axes: Axes, x: float, y: float, state: State) -> None:
    """A tile with the local shape, and below it the placement in words, with the whole's shape where that differs."""
    tile(axes, x, y, _COLUMN, 20, state.placement, f"{state.name}  {_shape(state.local)}")
    whole = {
        "replicated": "the same on every rank",
        "sharded": f"a piece of {_shape(state.whole)}",
        "partial": "a summand",
    }[state.placement]
    say(axes, x + _COLUMN, y + 27, f"{state.placement}: {whole}", size=SMALL, ha="right")


def _draw_passage(axes: Axes, y: float, passage: Passage) -> None:
    """Arrows: down for forward, up for backward; red where ranks talk, ink where each works alone."""
    ends = (y - 10, y + _PASSAGE - 3)
    for x, direction, words, (start, end) in zip(
        _COLUMNS, ("forward", "backward"), (passage.forward, passage.backward), (ends, ends[::-1])
    ):
        colour = RED if passage.collective == direction else INK
        arrow(axes, (x + 10, start), (x + 10, end), colour)
        say(axes, x + 18, y + _PASSAGE / 2 - 1, words, size=8)
