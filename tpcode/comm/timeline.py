"""A timeline of one rank: when each product began and ended, when each collective was launched and was done, and where
the rank stood waiting for one.

    with timeline() as seen:
        layer(x).sum().backward()
    seen.order()  # what came after what, without times

It sees the products and the collectives of this process, whichever code calls them, forward and in autograd's backward.
Nothing is installed outside of the block, so that it costs nothing there. Inside, each operator takes some microseconds
more. On CUDA an operator returns before its kernel is done: the order is right there, and the lengths say little;
`tpcode bench` writes a trace of kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tpcode.comm.ledger import current_phase

KINDS = ("product", "collective", "wait")

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)

# Method of c10d's ProcessGroup: the collective's name, as the ledger has it.
_METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: "product", "collective" (from its launch until it is done) or "wait" (the rank stands still for one).
        name: of a product the shapes that were multiplied, "[8, 4] [4, 6]"; of the others the collective's op.
        start, end: in seconds, on a clock that all processes of one machine share.
        phase: "forward", "backward" or "recompute".
        number: of a collective, and of the wait for it, counted from 1; 0 for a product.
    """

    kind: str
    name: str
    start: float
    end: float
    phase: str = "forward"
    number: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Timeline:
    """What one rank did, in the order in which it began."""

    def __init__(self):
        self._products: list[Span] = []
        self._waits: list[Span] = []
        self._calls: list[tuple[str, str, float]] = []  # name, phase, launched
        self._done: dict[int, float] = {}

    @property
    def spans(self) -> list[Span]:
        """Products, collectives and waits. One that nobody waited for and that is not done has no end: nan."""
        return sorted([*self._products, *self._collectives(), *self._waits], key=lambda one: one.start)

    def order(self) -> list[str]:
        """What came after what: "backward: product [8, 4] [4, 6]", "backward: launch 1, all_reduce", "backward: wait
        for 1". The same on every machine."""
        words = {
            "product": lambda one: f"product {one.name}",
            "collective": lambda one: f"launch {one.number}, {one.name}",
            "wait": lambda one: f"wait for {one.number}",
        }
        return [f"{one.phase}: {words[one.kind](one)}" for one in self.spans]

    def seconds(self, kind: str, phase: str | None = None) -> float:
        """Of all spans of one kind, and of one phase where given.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)} and is {kind!r}")
        return sum(one.seconds for one in self.spans if one.kind == kind and phase in (None, one.phase))

    def _collectives(self) -> list[Span]:
        ends = {one.number: one.end for one in self._waits[::-1]}  # where its end was not told in time
        return [
            Span("collective", name, launched, self._done.get(number, ends.get(number, float("nan"))), phase, number)
            for number, (name, phase, launched) in enumerate(self._calls, start=1)
        ]


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Note products and collectives of this process until the block ends."""
    seen = Timeline()
    with ExitStack() as stack:
        if dist.is_available():
            for method, name in _METHODS.items():
                stack.enter_context(_watched(method, name, seen))
        stack.enter_context(_Products(seen))
        yield seen


class _Products(TorchDispatchMode):
    """Sees every operator, on autograd's threads too."""

    def __init__(self, seen: Timeline):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket not in _PRODUCTS:
            return func(*args, **kwargs)
        phase, start = current_phase(), perf_counter()
        out = func(*args, **kwargs)
        factors = args[1:3] if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.baddbmm) else args[:2]
        shapes = " ".join(str(list(factor.shape)) for factor in factors)
        self.seen._products.append(Span("product", shapes, start, perf_counter(), phase))
        return out


class _Handle:
    """c10d's handle of a collective, that notes when it is waited for. Everything else it leaves to the handle."""

    def __init__(self, work, number: int, name: str, seen: Timeline):
        self._work, self._number, self._name, self._seen = work, number, name, seen

    def wait(self, *args, **kwargs):
        phase, start = current_phase(), perf_counter()
        result = self._work.wait(*args, **kwargs)
        self._seen._waits.append(Span("wait", self._name, start, perf_counter(), phase, self._number))
        return result

    def __getattr__(self, name: str):
        return getattr(self._work, name)


@contextmanager
def _watched(method: str, name: str, seen: Timeline) -> Iterator[None]:
    """Put a stopwatch before one of ProcessGroup's methods."""
    original = getattr(dist.ProcessGroup, method, None)
    if original is None:  # a method that this release of torch does not have
        yield
        return

    @functools.wraps(original)
    def launched(group, *args, **kwargs):
        seen._calls.append((name, current_phase(), perf_counter()))
        number = len(seen._calls)
        work = original(group, *args, **kwargs)
        if work is None:
            return None
        with suppress(RuntimeError):  # gloo's reduce-scatter has no future: its end is then that of the wait
            work.get_future().then(lambda _: seen._done.setdefault(number, perf_counter()))
        return _Handle(work, number, name, seen)

    setattr(dist.ProcessGroup, method, launched)
    try:
        yield
    finally:
        setattr(dist.ProcessGroup, method, original)
