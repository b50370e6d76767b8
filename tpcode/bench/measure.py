"""The measurements, on every rank: each group of t ranks works as the others do, at the same time."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpcode.bench.settings import LAYERS, Settings
from tpcode.bench.trace import chrome_events
from tpcode.comm import record
from tpcode.cost.communication import algbw, busbw
from tpcode.dense import MODELS
from tpcode.layers import ParallelAttention, ParallelFFN, ParallelSwiGLU
from tpcode.meter import saved_for_backward
from tpcode.model import Block

WARM_UP = 2
OPS = ("all_reduce", "all_gather", "reduce_scatter")
SMALLEST_BYTES, GROWTH = 4096, 8  # of a collective's payload
MANY, MANY_UP_TO = 4, 64 * 2**10  # so many times as many rounds of payloads up to this size


def measure(settings: Settings) -> dict[str, Any]:
    """Everything that the settings ask for. Rank 0's report is that of the group of the first t ranks; a time is that
    of the slowest of them."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    report: dict[str, Any] = {"machine": _machine(device), "collectives": [], "layers": [], "trace": []}
    report["settings"] = {name: value for name, value in asdict(settings).items() if name != "trace"}
    groups = {t: Group.of(t, device) for t in settings.tp}
    if "collectives" in settings.parts:
        for t in (t for t in settings.tp if t > 1):
            _say(f"collectives, t = {t}")
            report["collectives"] += _collectives(groups[t], settings)
    layers = [part for part in LAYERS if part in settings.parts]
    for part in layers:
        for t in settings.tp:
            for sequence_parallel in (False, True)[: 1 + (t > 1)]:
                _say(f"{part}, t = {t}{', sequence parallel' if sequence_parallel else ''}")
                last = (part, t, sequence_parallel) == (layers[-1], max(settings.tp), False)
                row, events = _layer(part, groups[t], settings, sequence_parallel, settings.trace and last)
                report["layers"] += [row] if row else []
                report["trace"] += events
    return report


def _say(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"measuring {what}", file=sys.stderr, flush=True)


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }


@dataclass
class Group:
    """The t ranks that this rank works with; None where it is left over and only waits."""

    t: int
    device: torch.device
    group: dist.ProcessGroup | None
    first: bool  # whether these are the ranks that report

    @classmethod
    def of(cls, t: int, device: torch.device) -> Group:
        """Ranks 0 to t - 1, the next t, and so on. Every rank of the world makes all groups."""
        rank, made = dist.get_rank(), {}
        for begin in range(0, dist.get_world_size() - t + 1, t):
            made[begin] = dist.new_group(list(range(begin, begin + t)))
        own = rank // t * t
        return cls(t, device, made.get(own), own == 0)

    def barrier(self) -> None:
        """Until all t are here, and their devices have nothing to do."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.synchronize()

    def synchronize(self) -> None:
        """Until this rank's device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def every(self, number: float) -> list[float]:
        """Every rank's number."""
        out = torch.empty(self.t, device=self.device, dtype=torch.float64)
        dist.all_gather_single(out, torch.tensor([number], device=self.device, dtype=torch.float64), group=self.group)
        return out.tolist()


# ---- collectives ----------------------------------------------------------------------------------------------------


def payloads(largest: int) -> list[int]:
    """4 KiB, 32 KiB and so on, and the largest."""
    found, size = [], SMALLEST_BYTES
    while size < largest:
        found.append(size)
        size *= GROWTH
    return [*found, largest]


def _collectives(group: Group, settings: Settings) -> list[dict[str, Any]]:
    """As nccl-tests: the payload is the whole tensor, what an all-gather returns and what a reduce-scatter takes."""
    if group.group is None:
        return []
    rows = []
    for op in OPS:
        for size in payloads(settings.largest_bytes):
            elements = max(1, size // 4 // group.t) * group.t
            rounds = settings.rounds * (MANY if size <= MANY_UP_TO else 1)
            seconds = _call_seconds(_call(op, elements, group), group, rounds)
            payload = 4 * elements
            rows.append(
                {
                    "op": op,
                    "tp": group.t,
                    "payload_bytes": payload,
                    "seconds": seconds,
                    "algbw_bytes_per_second": algbw(payload, seconds),
                    "busbw_bytes_per_second": busbw(op, payload, seconds, group.t),
                }
            )
    return rows if group.first else []


def _call(op: str, elements: int, group: Group) -> Callable[[], object]:
    whole = torch.zeros(elements, device=group.device)
    share = torch.zeros(elements // group.t, device=group.device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group.group)
    if op == "all_gather":
        return lambda: dist.all_gather_single(whole, share, group=group.group)
    return lambda: dist.reduce_scatter_single(share, whole, group=group.group)


def _call_seconds(call: Callable[[], object], group: Group, rounds: int) -> float:
    """Median of calls one after another, on the slowest rank."""
    seconds = []
    group.barrier()
    for _ in range(WARM_UP + rounds):
        begin = time.perf_counter()
        call()
        group.synchronize()
        seconds.append(time.perf_counter() - begin)
    return max(group.every(median(seconds[WARM_UP:])))


# ---- layers ---------------------------------------------------------------------------------------------------------


@dataclass
class Spent:
    """Seconds in collectives: from each call until its result may be used. What an asynchronous one takes while other
    work goes on does not count."""

    device: torch.device
    intervals: list = field(default_factory=list)

    @contextmanager
    def during(self) -> Iterator[None]:
        """One call, or one wait."""
        begin = self._now()
        yield
        self.intervals.append((begin, self._now()))

    def _now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """The sum, and begin anew. On CUDA the device must have finished."""
        done, self.intervals = self.intervals, []
        if self.device.type == "cpu":
            return sum(end - begin for begin, end in done)
        return sum(begin.elapsed_time(end) for begin, end in done) / 1e3


class _Waited:
    """A collective under way, whose waiting is timed."""

    def __init__(self, work, spent: Spent):
        self.work, self.spent = work, spent

    def wait(self):
        with self.spent.during():
            return self.work.wait()


@contextmanager
def timed_collectives(device: torch.device) -> Iterator[Spent]:
    """Time every collective of `tpcode.comm`, which calls them by these names."""
    spent = Spent(device)
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast")
    originals = {name: getattr(dist, name) for name in names}

    def timed(original):
        def call(*args, **kwargs):
            with spent.during():
                work = original(*args, **kwargs)
            return work if work is None else _Waited(work, spent)

        return call

    try:
        for name, original in originals.items():
            setattr(dist, name, timed(original))
        yield spent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _layer(
    part: str, group: Group, settings: Settings, sequence_parallel: bool, keep: bool
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """A row of the report, and the timeline of one step if it is kept."""
    if group.group is None:
        return None, []
    layer = build(part, group, settings, sequence_parallel)
    share = settings.sequence // group.t if sequence_parallel else settings.sequence
    shape = (settings.batch, share, settings.layer.hidden)
    dtype = getattr(torch, settings.dtype)
    x, dy = (torch.randn(shape, device=group.device, dtype=dtype) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        layer(x).backward(dy)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    seconds, in_collectives = _step_seconds(step, group, settings.rounds)
    with record() as ledger:
        step()
    weights = sum(parameter.nbytes for parameter in layer.parameters())
    with saved_for_backward(layer) as meter:
        layer(x)
    sizes = {"weights": weights, "gradients": weights, "kept_for_backward": meter.nbytes}
    sizes["peak"] = _peak_bytes(step, group, [*layer.parameters(), x, dy])
    sizes = {f"{name}_bytes": int(max(group.every(size))) for name, size in sizes.items()}
    calls = Counter((event.op, event.payload_bytes) for event in ledger.events)
    row = {
        "layer": part,
        "tp": group.t,
        "sequence_parallel": sequence_parallel,
        "seconds": max(group.every(seconds)),
        "collective_seconds": mean(group.every(in_collectives)),
        "calls": [{"op": op, "payload_bytes": payload, "calls": n} for (op, payload), n in calls.items()],
        **sizes,
    }
    row["collective_share"] = row["collective_seconds"] / row["seconds"]
    row["tokens_per_second"] = settings.tokens / row["seconds"]
    row["flops_per_second_per_rank"] = settings.flops(part) / group.t / row["seconds"]
    events = chrome_events(step, dist.get_rank(), group) if keep and group.first else []
    return (row if group.first else None), events


def build(part: str, group: Group, settings: Settings, sequence_parallel: bool) -> nn.Module:
    """This rank's share of a layer, with the weights that a new model has. The dense one is gone when this returns."""
    model_of = MODELS[settings.layer.family]
    dense = model_of(settings.layer, dtype=getattr(torch, settings.dtype), device=group.device)
    [block], names, options = dense.part("blocks"), dense.names, {"sequence_parallel": sequence_parallel}
    if part == "block":
        layer = Block.from_dense(block, names, group.group, **options)
    elif part == "attention":
        layer = ParallelAttention.from_dense(getattr(block, names["attention"]), group.group, **options)
    else:
        cls = ParallelSwiGLU if settings.layer.gated else ParallelFFN
        layer = cls.from_dense(getattr(block, names["ffn"]), group.group, pad=True, **options)
    del dense, block
    gc.collect()
    return layer


def _step_seconds(step: Callable[[], None], group: Group, rounds: int) -> tuple[float, float]:
    """Medians of this rank's: of a step, and of what it spends in collectives."""
    seconds, inside = [], []
    with timed_collectives(group.device) as spent:
        for _ in range(WARM_UP + rounds):
            group.barrier()
            spent.take()
            begin = time.perf_counter()
            step()
            group.synchronize()
            seconds.append(time.perf_counter() - begin)
            inside.append(spent.take())
    return median(seconds[WARM_UP:]), median(inside[WARM_UP:])


# ---- memory ---------------------------------------------------------------------------------------------------------


def _peak_bytes(step: Callable[[], None], group: Group, before: list[Tensor]) -> int:
    """Most bytes in tensors at any moment of a step. On CUDA as its allocator counts; on the CPU, whose allocator does
    not tell, by following every tensor that an operation returns (scratch memory inside an operation is not seen)."""
    gc.collect()
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with Peak(before) as peak:
        step()
    return peak.most


class Peak(TorchDispatchMode):
    """Bytes of the tensors that are alive, and the most there were. A storage counts once, as long as it lives."""

    def __init__(self, before: list[Tensor]):
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()
        for tensor in before:
            self._follow(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size
