"""`tpcode plan`: the planner of `tpcode.cost.layout` as a table, or as JSON. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tpcode.config import Layout, ModelConfig
from tpcode.cost.hardware import Card, GiB, card
from tpcode.cost.layout import USABLE, Candidate, Plans, link, plan, require_fit, require_world
from tpcode.cost.step_time import StepTime, efficiencies_of
from tpcode.shapes import require_int

AXES = ("tp", "pp", "dp")
TOKENS = 2**22  # of a step, unless the batch is given: 4 Mi, as large models are trained with
LONGEST = 8192  # sequence, unless given
MICROBATCHES = (1, 2, 4)
_SHOWN_LAYOUTS = 4  # of one reason; the rest is counted


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked for. Sizes that are None are chosen: tp, pp and dp by the planner.

    Raises:
        ValueError: there is no such model or card; a size makes no sense; the axes that are given do not multiply to
            the GPUs, or the model does not split over them.
    """

    model: str
    gpus: int
    gpu: str = "h100"
    batch: int | None = None
    sequence: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    usable: float = USABLE

    def __post_init__(self):
        for name in ("gpus", "batch", "sequence", "tp", "pp", "dp"):
            if getattr(self, name) is not None:
                require_int(getattr(self, name), f"--{name}")
        if not 0 < self.usable <= 1:
            raise ValueError(f"--usable is a part of the card's memory, above 0 and at most 1, and is {self.usable}")
        self._require_axes()
        if self.s > self.config.max_seq:
            raise ValueError(f"--sequence {self.s} is more than the model's context of {self.config.max_seq} tokens")

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return ModelConfig.preset(self.model.lower())

    @property
    def card(self) -> Card:
        """The GPU."""
        return card(self.gpu)

    @property
    def s(self) -> int:
        """Tokens in a sequence: those asked for, else the model's context, at most 8,192."""
        return self.sequence or min(self.config.max_seq, LONGEST)

    @property
    def B(self) -> int:
        """Sequences in a step: those asked for, else about 4 Mi tokens, in a number that every layout can share."""
        return self.batch or self.gpus * max(1, round(TOKENS / self.s / self.gpus))

    def _require_axes(self) -> None:
        """Refuse axes that no layout of so many GPUs has, before any is tried."""
        config, here = self.config, self.card
        if None not in (self.tp, self.pp, self.dp):
            require_world(Layout(tp=self.tp, pp=self.pp, dp=self.dp), self.gpus)
        given = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        if self.gpus % prod(given.values()):
            sizes = " · ".join(f"{axis} {size}" for axis, size in given.items())
            product = f"{sizes} = {prod(given.values())}" if len(given) > 1 else sizes
            raise ValueError(f"{self.gpus} GPUs are no multiple of {product}, and every axis must come out whole")
        require_fit(config, Layout(tp=self.tp or 1, pp=self.pp or 1))
        here.nodes(self.tp or 1)

    def allows(self, layout: Layout) -> bool:
        """Whether a layout has the axes that were given."""
        return all(getattr(self, axis) in (None, getattr(layout, axis)) for axis in AXES)


def answer(question: Question) -> Plans:
    """The layouts that fit, best first, and those that do not."""
    found = plan(
        question.config,
        question.card,
        question.gpus,
        batch=question.B,
        sequence=question.s,
        microbatches=MICROBATCHES,
        usable=question.usable,
    )
    return Plans(
        [one for one in found.fitting if question.allows(one.layout)],
        [one for one in found.refused if question.allows(one.layout)],
    )


# ---- as a table -----------------------------------------------------------------------------------------------------


def show(question: Question, plans: Plans, console: Console, top: int = 10) -> None:
    """Print what was asked, the best `top` layouts, and why the others fall out."""
    config, here = question.config, question.card
    console.print(
        f"{question.model.lower()}, {config.num_parameters / 1e9:.1f} billion parameters, on {question.gpus} × "
        f"{here.name} ({here.gpus_per_node} to a node)\n"
        f"one step: {question.B:,} sequences of {question.s:,} tokens, {question.B * question.s / 1e6:.1f} million "
        "in all"
    )
    if plans.fitting:
        console.print(_fitting(plans.fitting[:top], question))
        if len(plans.fitting) > top:
            console.print(f"{len(plans.fitting) - top} more fit, and are slower; --top {len(plans.fitting)} shows them")
        console.print(_words(plans.best, question))
    else:
        console.print(f"\nNo layout fits. {_enough(question)}")
    if plans.refused:
        console.print(_refused(plans))


def _enough(question: Question) -> str:
    """On how many of these GPUs the model would fit: the first power of two, or doubling of what there are."""
    n, settled = question.gpus, (question.tp or 1) * (question.pp or 1)
    more = {2**i * n for i in range(1, 7)} | {2**i for i in range(13) if 2**i > n and 2**i % settled == 0}
    for gpus in sorted(more):
        if answer(replace(question, gpus=gpus, batch=None, dp=None)).fitting:
            return f"On {gpus:,} of these GPUs one would."
    return f"Nor would one on {gpus:,} of these GPUs."


def _fitting(candidates: Iterable[Candidate], question: Question) -> Table:
    table = Table(title="layouts that fit, fastest first", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in AXES:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("SP", "rerun"):
        table.add_column(name, no_wrap=True)
    for name in ("b", "m", "v", "GiB", "step s", "MFU %", "waits %", "tok/s/GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in candidates:
        layout, work, step = one.layout, one.workload, one.step
        table.add_row(
            *(str(size) for size in (layout.tp, layout.pp, layout.dp)),
            "yes" if layout.sequence_parallel else "no",
            {"none": "-", "selective": "core", "full": "all"}[work.recompute],
            *(str(size) for size in (work.microbatch, work.microbatches(layout), work.interleave)),
            f"{one.memory.total / GiB:.1f}",
            f"{step.seconds:.2f}",
            f"{100 * step.mfu:.1f}",
            f"{100 * waiting(step):.1f}",
            f"{step.tokens_per_second_per_gpu:,.0f}",
        )
    limit = question.usable * question.card.memory_bytes / GiB
    table.caption = (
        "SP sequence parallelism · rerun: which forward runs again in backward · b sequences in a microbatch · m "
        f"microbatches of a replica · v chunks of a stage · GiB of the fullest rank, at most {limit:.0f} · waits: for "
        "other ranks, collectives and bubble"
    )
    table.caption_justify = "left"
    return table


def waiting(step: StepTime) -> float:
    """Which part of a step goes by without arithmetic or memory traffic, from 0 to 1."""
    return (step.tp + step.pp + step.dp + step.bubble) / step.seconds


def _words(best: Candidate, question: Question) -> str:
    """Over what the best layout's axes talk, and what its numbers rest on."""
    over = {"nvlink": "NVLink", "network": "the network"}
    axes = [
        f"{axis} over {over[link(best.layout, question.card, axis)]}" for axis in AXES if getattr(best.layout, axis) > 1
    ]
    gemm, memory, links = efficiencies_of(question.card)
    talk = f"The best: {', '.join(axes)}. " if axes else ""
    return (
        f"{talk}Predicted, not measured: products at {gemm:.0%} of the card's FLOP/s, kernels at {memory:.0%} of its "
        f"memory's speed, collectives at {links:.0%} of its links'. That was fitted to published steps on A100s; other "
        "cards are scaled from them."
    )


def _refused(plans: Plans) -> Table:
    table = Table(title="why the others fall out", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("tp·pp·dp", no_wrap=True)
    table.add_column("because")
    for reason, layouts in plans.reasons.items():
        shown = [f"{one.tp}·{one.pp}·{one.dp}" for one in layouts[:_SHOWN_LAYOUTS]]
        more = [f"and {len(layouts) - _SHOWN_LAYOUTS} more"] if len(layouts) > _SHOWN_LAYOUTS else []
        table.add_row("\n".join([*shown, *more]), reason)
    return table


# ---- as JSON --------------------------------------------------------------------------------------------------------


def as_data(question: Question, plans: Plans) -> dict[str, Any]:
    """The same as plain data, all layouts of it. Times are in seconds, memory in bytes, MFU and waits from 0 to 1."""
    asked = {"model": question.model.lower(), "gpus": question.gpus, "gpu": question.card.name}
    return {
        **asked,
        "parameters": question.config.num_parameters,
        "batch": question.B,
        "sequence": question.s,
        "usable_bytes": round(question.usable * question.card.memory_bytes),
        "fitting": [_candidate(one) for one in plans.fitting],
        "refused": [{**_axes(one.layout), "reason": str(one.reason)} for one in plans.refused],
    }


def _axes(layout: Layout) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in AXES}


def _candidate(one: Candidate) -> dict[str, Any]:
    work, step = one.workload, one.step
    parts = ("gemm", "memory", "tp", "pp", "bubble", "dp", "update")
    return {
        **_axes(one.layout),
        "sequence_parallel": one.layout.sequence_parallel,
        "recompute": work.recompute,
        "microbatch": work.microbatch,
        "microbatches": work.microbatches(one.layout),
        "interleave": work.interleave,
        "memory_bytes": asdict(one.memory) | {"total": one.memory.total},
        "step_seconds": step.seconds,
        "seconds": {name: getattr(step, name) for name in parts},
        "mfu": step.mfu,
        "hfu": step.hfu,
        "waits": waiting(step),
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
    }
