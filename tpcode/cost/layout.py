"""Which rank is where, which link each axis uses, and which layouts of a model on so many cards are worth trying.

Symbols: t, p and dp the sizes of the axes, m microbatches, v chunks of a stage.

Ranks are numbered as in Megatron-LM: tensor-parallel neighbours first, then context, then data parallelism, stages
last: rank = tp_rank + t (cp_rank + cp (dp_rank + dp · pp_rank)). So a node holds tensor-parallel groups whole, as far
as they fit, and stages lie far apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from tpcode.config import Layout, ModelConfig
from tpcode.cost import memory
from tpcode.cost.flops import RECOMPUTE, layers_of_a_stage
from tpcode.cost.hardware import Card, GiB, card
from tpcode.cost.step_time import Efficiencies, StepTime, step_time
from tpcode.cost.workload import Workload
from tpcode.shapes import head_groups, require_int, require_rank

AXES = ("tp", "cp", "dp", "pp")  # the first varies fastest
INTERLEAVES = (1, 2, 4)  # chunks of a stage that are tried
USABLE = 0.9  # of a card's memory: the rest is the libraries', the collectives', and pieces too small to use


# ---- ranks ----------------------------------------------------------------------------------------------------------


def layout_of(gpus: int, *, tp: int, pp: int = 1, cp: int = 1, sequence_parallel: bool = False) -> Layout:
    """The layout on so many GPUs: dp is what the other axes leave, gpus / (tp pp cp), and is not chosen.

    Raises:
        ValueError: they leave no whole number.
    """
    others = prod(require_int(size, name) for name, size in (("tp", tp), ("pp", pp), ("cp", cp)))
    if require_int(gpus, "gpus") % others:
        raise ValueError(
            f"tp · pp · cp = {tp} · {pp} · {cp} = {others} does not divide {gpus} GPUs: dp = {gpus} / {others} must be "
            f"a whole number"
        )
    return Layout(tp=tp, pp=pp, cp=cp, dp=gpus // others, sequence_parallel=sequence_parallel)


def require_world(layout: Layout, gpus: int) -> None:
    """Refuse a layout that is not for so many GPUs.

    Raises:
        ValueError: tp pp dp cp is another number.
    """
    if layout.world_size != gpus:
        sizes = " · ".join(str(getattr(layout, axis)) for axis in AXES)
        raise ValueError(f"tp · cp · dp · pp = {sizes} = {layout.world_size} ranks, and there are {gpus} GPUs")


def require_fit(config: ModelConfig, layout: Layout) -> None:
    """Refuse a layout over which this model does not split.

    Raises:
        ValueError: t is beyond the heads, or does not divide them; p does not divide the layers.
    """
    if layout.tp > config.heads:
        raise ValueError(f"tp = {layout.tp} is more than the {config.heads} query heads, and a head is not cut")
    head_groups(config.heads, config.kv_heads, layout.tp)
    layers_of_a_stage(config, layout)


def groups(layout: Layout, axis: str) -> list[list[int]]:
    """The groups of an axis, each the ranks that differ along it alone.

    >>> groups(Layout(tp=2, dp=2, pp=2), "dp")
    [[0, 2], [1, 3], [4, 6], [5, 7]]

    Raises:
        ValueError: there is no such axis.
    """
    stride = _stride(layout, axis)
    size = getattr(layout, axis)
    firsts = (rank for rank in range(layout.world_size) if rank // stride % size == 0)
    return [[first + i * stride for i in range(size)] for first in firsts]


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank stands along each axis.

    >>> coordinates(Layout(tp=8, dp=2, pp=4), 27)
    {'tp': 3, 'cp': 0, 'dp': 1, 'pp': 1}
    """
    rank = require_rank(rank, layout.world_size)
    return {axis: rank // _stride(layout, axis) % getattr(layout, axis) for axis in AXES}


def link(layout: Layout, on: str | Card, axis: str) -> str:
    """What the ranks of an axis talk over: "nvlink" if each group lies in one node, "network" if one does not, "none"
    where the axis has one rank."""
    node = card(on).gpus_per_node
    if getattr(layout, axis, None) == 1:
        return "none"
    inside = all(group[0] // node == group[-1] // node for group in groups(layout, axis))
    return "nvlink" if inside else "network"


def _stride(layout: Layout, axis: str) -> int:
    if axis not in AXES:
        raise ValueError(f"axis must be one of {', '.join(AXES)} and is {axis!r}")
    return prod(getattr(layout, faster) for faster in AXES[: AXES.index(axis)])


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """What training takes on the fullest rank, in bytes.

    Attributes:
        state: weights, gradients, optimizer.
        activations: of the microbatches on their way, and of the one layer whose forward runs again.
    """

    state: int
    activations: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.activations


def memory_use(config: ModelConfig, layout: Layout, workload: Workload) -> MemoryUse:
    """State of the largest stage, in half precision with fp32 gradients (18 bytes a parameter; 6 + 12/dp with a
    distributed optimizer), and activations of the first stage, which keeps most (`tpcode.cost.memory`)."""
    b, s, core = workload.microbatch, workload.sequence, workload.core_of(config)
    options = {"recompute": workload.recompute, "core": core}
    state = max(
        memory.state_bytes(
            config,
            layout,
            "mixed, fp32 gradients",
            distributed_optimizer=workload.distributed_optimizer,
            stage=stage,
        ).total
        for stage in {0, layout.pp - 1}
    )
    kept = memory.activation_bytes(config, b, s, layout, **options, m=workload.interleave).total
    return MemoryUse(state, kept + memory.rebuilt_bytes(config, b, s, layout, **options))


# ---- the planner ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with what it costs.

    Attributes:
        layout, workload: what it is, and how it runs.
        memory: on the fullest rank.
        step: how long a step takes.
    """

    layout: Layout
    workload: Workload
    memory: MemoryUse
    step: StepTime


@dataclass(frozen=True)
class Refusal:
    """A layout that does not fit, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class Plans:
    """Layouts that fit, best first, and the others.

    Attributes:
        fitting: one for each (tp, pp, dp), the fastest way to run it.
        refused: the rest, with the reason that stops the way that needs least memory.
    """

    fitting: list[Candidate]
    refused: list[Refusal]

    @property
    def reasons(self) -> dict[str, list[Layout]]:
        """The refused layouts by reason, what came nearest first."""
        found: dict[str, list[Layout]] = {}
        for one in self.refused:
            found.setdefault(str(one.reason), []).append(one.layout)
        return found

    @property
    def best(self) -> Candidate:
        """The fastest.

        Raises:
            ValueError: none fits; the message has the reason that came nearest.
        """
        if not self.fitting:
            raise ValueError(f"no layout fits; {'; '.join(one.reason for one in self.refused[:1])}")
        return self.fitting[0]


def plan(
    config: ModelConfig,
    on: str | Card,
    gpus: int,
    *,
    batch: int,
    sequence: int | None = None,
    microbatches: Iterable[int] = (1, 2, 4),
    distributed_optimizer: bool = True,
    usable: float = USABLE,
    efficiencies: Efficiencies | None = None,
) -> Plans:
    """Every (tp, pp, dp) of so many GPUs: those that fit, fastest first, and why the others fall out.

    For each it tries plain TP and TP with sequence parallelism, each kind of recomputation, microbatches of 1, 2 and 4
    sequences, and 1, 2 and 4 chunks of a stage, and keeps the fastest that fits.

    Args:
        on: a card or its name.
        batch: B, sequences in a step.
        sequence: s; None is the model's longest.
        microbatches: the b that are tried.
        distributed_optimizer: whether dp ranks share the optimizer's state.
        usable: which part of the card's memory training may take.

    Raises:
        ValueError: no such card; a size makes no sense.
    """
    here, gpus = card(on), require_int(gpus, "gpus")
    limit = usable * here.memory_bytes
    sequence = config.max_seq if sequence is None else sequence
    workloads = [
        Workload(batch=batch, sequence=sequence, microbatch=b, distributed_optimizer=distributed_optimizer)
        for b in microbatches
    ]
    fitting, refused = [], []
    for layout in _layouts(gpus):
        try:
            require_fit(config, layout)
            here.nodes(layout.tp)
        except ValueError as reason:
            refused.append(Refusal(layout, str(reason)))
            continue
        found = _fastest(config, layout, workloads, here, limit, efficiencies)
        (fitting if isinstance(found, Candidate) else refused).append(found)
    fitting.sort(key=lambda one: one.step.seconds)
    return Plans(fitting, sorted(refused, key=_by_shortage))


def _layouts(gpus: int) -> list[Layout]:
    """Every (tp, pp, dp) that multiplies to so many GPUs."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    return [layout_of(gpus, tp=t, pp=p) for t in sizes for p in sizes if gpus // t % p == 0]


def _fastest(
    config: ModelConfig,
    layout: Layout,
    workloads: list[Workload],
    here: Card,
    limit: float,
    efficiencies: Efficiencies | None,
) -> Candidate | Refusal:
    """The fastest way to run this layout in so much memory, or what stops it."""
    found, least, reasons = [], None, []
    for way, workload in _ways(config, layout, workloads):
        try:
            workload.microbatches(way)
            use = memory_use(config, way, workload)
            if use.total <= limit:
                step = step_time(config, way, workload, here, efficiencies)
                found.append(Candidate(way, workload, use, step))
            elif least is None or use.total < least:
                least = use.total
        except ValueError as reason:
            reasons.append(str(reason))
    if found:
        return min(found, key=lambda one: one.step.seconds)
    if least is None:
        return Refusal(layout, reasons[0])
    return Refusal(layout, _Shortage(f"needs {least / GiB:.1f} GiB at least, and {limit / GiB:.1f} GiB are to be had"))


class _Shortage(str):
    """A reason that is a lack of memory."""


def _by_shortage(refusal: Refusal) -> tuple:
    """Lack of memory first, the smallest need before others: what comes nearest to fitting."""
    if isinstance(refusal.reason, _Shortage):
        return 0, float(refusal.reason.split()[1])
    return 1, refusal.layout.tp, refusal.layout.pp


def _ways(config: ModelConfig, layout: Layout, workloads: list[Workload]) -> list[tuple[Layout, Workload]]:
    """Ways to run a layout: with SP and without, recomputation, microbatches, chunks of a stage."""
    layouts = [layout] if layout.tp == 1 else [layout, replace(layout, sequence_parallel=True)]
    layers = config.layers // layout.pp
    chunks = [v for v in INTERLEAVES if layout.pp > 1 and layers % v == 0] or [1]
    return [
        (way, replace(workload, recompute=recompute, interleave=v))
        for way in layouts
        for workload in workloads
        for recompute in RECOMPUTE
        if recompute != "selective" or workload.core_of(config) == "explicit"
        for v in chunks
    ]
