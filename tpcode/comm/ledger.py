"""The ledger: what the ranks said to each other, in which phase, and how many bytes that is.

    with record() as ledger:
        layer(x).sum().backward()
    ledger.count("all_reduce", phase="backward")

It notes the collectives of `tpcode.comm` as this rank calls them. Bytes are a model and not a measurement: a ring is
assumed, whatever the backend does (gloo builds its reduce-scatter from an all-reduce).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch

PHASES = ("forward", "backward", "recompute")

# What one rank sends, in payloads, on a ring of t ranks. A broadcast counts once, as in nccl-tests (PERFORMANCE.md).
_WIRE_FACTOR = {
    "all_reduce": lambda t: Fraction(2 * (t - 1), t),
    "all_gather": lambda t: Fraction(t - 1, t),
    "reduce_scatter": lambda t: Fraction(t - 1, t),
    "broadcast": lambda t: Fraction(1),
}
OPS = tuple(_WIRE_FACTOR)


@dataclass(frozen=True)
class Event:
    """One collective, as one rank called it.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter" or "broadcast".
        phase: "forward", "backward" or "recompute" (a forward that activation checkpointing runs again).
        group: the ranks that took part, by their numbers in the world.
        dtype, shape: of the whole tensor: what an all-gather returns and what a reduce-scatter takes.
        reduce_op: "sum", "avg", "max" or "min" of an all-reduce.
    """

    op: str
    phase: str
    group: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    reduce_op: str = "sum"

    @property
    def call(self) -> str:
        """The op, with what it reduces by where that is not the sum: "all_reduce max"."""
        return self.op if self.reduce_op == "sum" else f"{self.op} {self.reduce_op}"

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def wire_bytes(self) -> int | Fraction:
        """Bytes that one rank sends on a ring: 2(t-1)/t payloads for an all-reduce, (t-1)/t for an all-gather or a
        reduce-scatter, 1 for a broadcast. Exact: a Fraction where it is not whole."""
        return _exact(_WIRE_FACTOR[self.op](len(self.group)) * self.payload_bytes)


class Ledger:
    """The collectives that one rank called, in order."""

    def __init__(self, events: Iterable[Event] = ()):
        self.events: list[Event] = list(events)

    def count(self, op: str | None = None, phase: str | None = None) -> int:
        """How many collectives; of one op or one phase, where given.

        Raises:
            ValueError: there is no such op or phase (so that a misspelt name does not count 0).
        """
        return len(self._select(op, phase))

    def payload_bytes(self, op: str | None = None, phase: str | None = None) -> int:
        """Bytes of the tensors, whole."""
        return sum(event.payload_bytes for event in self._select(op, phase))

    def wire_bytes(self, op: str | None = None, phase: str | None = None) -> int | Fraction:
        """Bytes that this rank sends, on a ring."""
        return _exact(sum((Fraction(event.wire_bytes) for event in self._select(op, phase)), Fraction(0)))

    def table(self) -> str:
        """Plain text: a line for each kind of event, in order of first appearance, and the total."""
        if not self.events:
            return "no collectives"
        head = ("phase", "op", "ranks", "shape", "dtype", "calls", "payload bytes", "wire bytes per rank")
        rows = [_row(event, calls) for event, calls in Counter(self.events).items()]
        total = _numbers(len(self.events), self.payload_bytes(), self.wire_bytes())
        return _aligned([head, *rows, ("total", "", "", "", "", *total)], right=3)

    __repr__ = table

    def _select(self, op: str | None, phase: str | None) -> list[Event]:
        for name, value, known in (("op", op, OPS), ("phase", phase, PHASES)):
            if value is not None and value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)} and is {value!r}")
        return [event for event in self.events if op in (None, event.op) and phase in (None, event.phase)]


_open: list[Ledger] = []  # of the process, not of a thread: autograd runs CUDA's backward on threads of its own
_opening = threading.Lock()


@contextmanager
def record() -> Iterator[Ledger]:
    """Note every collective of this process, on whichever thread, until the block ends. Blocks may be nested."""
    ledger = Ledger()
    with _opening:
        _open.append(ledger)
    try:
        yield ledger
    finally:
        with _opening:
            _open.remove(ledger)


def note(op: str, dtype: torch.dtype, shape: Iterable[int], group: Iterable[int], reduce_op: str = "sum") -> None:
    """Enter a collective in every open ledger; `collectives` calls it before each one."""
    if _open:
        event = Event(op, current_phase(), tuple(group), dtype, tuple(shape), reduce_op)
        for ledger in tuple(_open):
            ledger.events.append(event)


def current_phase() -> str:
    """Where this thread is: "forward", "backward" or "recompute".

    Outside of autograd's engine it is forward. Inside, it is backward, unless a forward runs there again: then
    gradients are enabled, or, within the forward of an `autograd.Function`, forward-mode gradients disabled. So a
    recomputation's own `no_grad` block counts as backward, and code under `create_graph=True` as recompute; the
    conjugates' backward is `once_differentiable` and counts as backward there too.
    """
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    forward_again = torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled()
    return "recompute" if forward_again else "backward"


def _exact(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number


def _row(event: Event, calls: int) -> tuple[str, ...]:
    ranks = ",".join(map(str, event.group))
    shape, dtype = str(list(event.shape)), str(event.dtype).removeprefix("torch.")
    numbers = _numbers(calls, calls * event.payload_bytes, calls * event.wire_bytes)
    return (event.phase, event.call, ranks, shape, dtype, *numbers)


def _numbers(calls: int, payload: int, wire: int | Fraction) -> tuple[str, str, str]:
    return str(calls), f"{payload:,}", f"{wire:,}" if isinstance(wire, int) else f"{float(wire):,.1f}"


def _aligned(rows: list[tuple[str, ...]], right: int) -> str:
    """Columns padded to a common width, the last `right` of them flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    flush_right = [i >= len(widths) - right for i in range(len(widths))]

    def line(row):
        cells = (cell.rjust(w) if flush else cell.ljust(w) for cell, w, flush in zip(row, widths, flush_right))
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
