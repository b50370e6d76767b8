"""How long a training step takes: every operation's time from what it computes, moves and sends.

Symbols: b microbatch, s sequence, h hidden, F FFN width, a query heads, k KV heads, d head size, V vocabulary, L
layers, t, p and dp the axes of a layout, m microbatches, v chunks of a stage, n tokens of a microbatch (bs).

Three things take time, and each has one efficiency, the part of the card's best that is reached:

- a product: its multiplications at `gemm` of the peak, in whole waves of tiles; then its output to memory,
- an elementwise kernel: the bytes that it reads and writes, at `memory` of the memory's speed,
- a collective: NCCL's latencies, and its wire bytes at `link` of the link's speed.

Nothing else is fitted. Sizes of kernels are those of Megatron-LM's fused ones (N21, section 4.2), in mixed precision: 2
bytes an activation or weight, 4 a gradient that is accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, gcd

from tpcode.config import Layout, ModelConfig
from tpcode.cost import communication, flops
from tpcode.cost.communication import Volume
from tpcode.cost.hardware import CARDS, Card, card
from tpcode.cost.workload import Workload
from tpcode.shapes import divide, head_groups, padded

HALF, FULL, MASK = 2, 4, 1  # bytes: of bf16, of fp32, of an entry of dropout's mask
TILE = (256, 128)  # of a GEMM's output, that one SM computes: cuBLAS's most efficient one (NVIDIA, Matrix
# Multiplication Background User's Guide, section 2.3; waves of tiles: section 3.2)

# Bytes to and from memory for one parameter in the optimizer's step, once in it (Megatron-LM, 2022). With a distributed
# optimizer each of dp ranks does the second kind for its share.
UPDATE_BYTES = {"average the gradient over dp": 2 * FULL, "set it to zero": FULL}
SHARED_UPDATE_BYTES = {
    "norm of the gradient": FULL,
    "clip it": 2 * FULL,
    "Adam: read 4 tensors, write 3": 7 * FULL,
    "copy to half": FULL + HALF,
}


@dataclass(frozen=True)
class Efficiencies:
    """Parts of a card's best that are reached, from 0 to 1: of its FLOP/s, its memory's speed, its links' speed."""

    gemm: float
    memory: float
    link: float

    def __iter__(self):
        return iter((self.gemm, self.memory, self.link))


# What single operations have been measured to reach. Products: ml-engineering, "maximum achievable matmul FLOPS".
# Memory: 1.80 of 2.04 TB/s on an A100 (forums.developer.nvidia.com, topic 339083), and the same share for the others.
# Links: bus bandwidth of an all-reduce over 8, by rings (ml-engineering, network; for the H100 scaling-book, gpus.md).
MEASURED = {
    "a100": Efficiencies(gemm=271.2 / 312, memory=1.80 / 2.039, link=235 / 300),
    "h100": Efficiencies(gemm=794.5 / 989, memory=1.80 / 2.039, link=370 / 450),
    "h200": Efficiencies(gemm=794.5 / 989, memory=1.80 / 2.039, link=365.6 / 450),
}

# What whole training steps reach on A100s: fitted to the eight iteration times of K22's table 5 by `tpcode.cost.fit`. A
# test fits them again.
FITTED = Efficiencies(gemm=0.869, memory=0.722, link=0.673)


def efficiencies_of(on: str | Card) -> Efficiencies:
    """What training reaches of this card: what it reaches of an A100, times how the two compare where single operations
    have been measured on both. Of a V100, or a card of your own, what it reaches of an A100.

    Raises:
        ValueError: no such card; the message lists them.
    """
    here = card(on)
    names = [name for name in MEASURED if CARDS[name] == here]
    if not names:
        return FITTED
    there, a100 = MEASURED[names[0]], MEASURED["a100"]
    return Efficiencies(*(fitted * ours / theirs for fitted, ours, theirs in zip(FITTED, there, a100)))


@dataclass(frozen=True)
class Machine:
    """A card, and how much of it is reached."""

    card: Card
    efficiencies: Efficiencies

    def memory_seconds(self, moved_bytes: float) -> float:
        """Of bytes read and written."""
        return moved_bytes / (self.card.memory_bytes_per_second * self.efficiencies.memory)

    def flops_seconds(self, count: float) -> float:
        """Of multiplications and additions on the tensor cores."""
        return count / (self.card.flops_per_second * self.efficiencies.gemm)


# ---- operations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gemm:
    """`count` products of [m, k] and [k, n].

    The output is cut in tiles, and each SM computes one at a time: the last wave takes as long as a full one. A tile's
    output goes to memory after its last multiplication, when nothing is left to hide it: so its bytes come on top. Its
    inputs stream in meanwhile, and count where they take longer than the multiplications.

    Attributes:
        output_bytes: moved for one entry of the output: 2 where it is written, 8 where it is added to fp32.
    """

    name: str
    phase: str
    m: int
    n: int
    k: int
    count: int = 1
    output_bytes: int = HALF

    @property
    def flops(self) -> int:
        """2 mkn for each."""
        return 2 * self.m * self.n * self.k * self.count

    def tiled_flops(self, multiprocessors: int) -> float:
        """With the padding of tiles and of the last wave, by the better orientation of a tile."""
        return 2 * TILE[0] * TILE[1] * self.k * multiprocessors * _waves(self.m, self.n, self.count, multiprocessors)

    def seconds(self, machine: Machine) -> float:
        """On this machine."""
        multiplying = machine.flops_seconds(self.tiled_flops(machine.card.multiprocessors))
        reading = machine.memory_seconds(HALF * self.count * self.k * (self.m + self.n))
        return max(multiplying, reading) + machine.memory_seconds(self.output_bytes * self.count * self.m * self.n)


@lru_cache(maxsize=4096)
def _waves(m: int, n: int, count: int, multiprocessors: int) -> int:
    """How often all SMs take a tile, for so many outputs [m, n]."""
    orientations = (TILE, TILE[::-1])
    return min(ceil(ceil(m / rows) * ceil(n / columns) * count / multiprocessors) for rows, columns in orientations)


@dataclass(frozen=True)
class FusedCore:
    """Attention in one kernel that writes no scores (FlashAttention): the triangle's FLOPs, or Q, K, V and the output
    to and from memory, whichever takes longer."""

    name: str
    phase: str
    flops: int
    moved_bytes: int

    def seconds(self, machine: Machine) -> float:
        """On this machine."""
        return max(machine.flops_seconds(self.flops), machine.memory_seconds(self.moved_bytes))


@dataclass(frozen=True)
class Kernel:
    """An elementwise kernel: the bytes that it reads and writes."""

    name: str
    phase: str
    moved_bytes: int

    def seconds(self, machine: Machine) -> float:
        """On this machine."""
        return machine.memory_seconds(self.moved_bytes)


@dataclass(frozen=True)
class Collective:
    """A collective over the tensor-parallel ranks; `behind` is a product that runs meanwhile."""

    name: str
    phase: str
    op: str
    payload_bytes: int
    ranks: int
    behind: Gemm | None = None

    def whole_seconds(self, machine: Machine) -> float:
        """What it takes by itself."""
        if self.ranks == 1:
            return 0.0
        return communication.collective_seconds(
            self.op, self.payload_bytes, self.ranks, machine.card, efficiency=machine.efficiencies.link
        )

    def seconds(self, machine: Machine) -> float:
        """What it adds: what is left of it once the product behind which it hides is done."""
        hidden = 0.0 if self.behind is None else self.behind.seconds(machine)
        return max(0.0, self.whole_seconds(machine) - hidden)


Operation = Gemm | FusedCore | Kernel | Collective


def seconds(operations: Iterable[Operation], machine: Machine, phase: str | None = None) -> float:
    """Of operations one after another; of one phase, where given."""
    return sum(one.seconds(machine) for one in operations if phase in (None, one.phase))


# ---- a layer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rank:
    """Sizes of one rank's work on one microbatch."""

    config: ModelConfig
    layout: Layout
    workload: Workload
    n: int = field(init=False)  # tokens
    own: int = field(init=False)  # entries of the residual stream that norms and dropout see
    heads: int = field(init=False)
    kv_heads: int = field(init=False)
    width: int = field(init=False)  # F/t

    def __post_init__(self):
        t, config = self.layout.tp, self.config
        groups = head_groups(config.heads, config.kv_heads, t)
        n = self.workload.microbatch * self.workload.sequence
        if self.layout.sequence_parallel:
            divide(self.workload.sequence, t, "sequence")
        sizes = {
            "n": n,
            "own": n * config.hidden // (t if self.layout.sequence_parallel else 1),
            "heads": groups.heads_per_rank,
            "kv_heads": groups.kv_heads_per_rank,
            "width": padded(config.ffn, t, "FFN width F") // t,
        }
        for name, size in sizes.items():
            object.__setattr__(self, name, size)

    @property
    def stream(self) -> int:
        """nh, entries of the whole residual stream."""
        return self.n * self.config.hidden

    @property
    def qkv(self) -> int:
        """Columns of this rank's fused Q, K and V."""
        return (self.heads + 2 * self.kv_heads) * self.config.head_dim

    @property
    def mixed(self) -> int:
        """Columns of what its heads put out."""
        return self.heads * self.config.head_dim


def layer_operations(config: ModelConfig, layout: Layout, workload: Workload) -> list[Operation]:
    """What one rank does for one layer and microbatch, in phases forward, recompute and backward."""
    rank = _Rank(config, layout, workload)
    forward = _layer_forward(rank, "forward")
    again = []
    if workload.recompute == "full":
        again = _layer_forward(rank, "recompute")
    elif workload.recompute == "selective" and workload.core_of(config) == "explicit":
        again = _core_forward(rank, "recompute")
    return [*forward, *again, *_layer_backward(rank)]


def _layer_forward(r: _Rank, phase: str) -> list[Operation]:
    c = r.config
    columns = r.width * (2 if c.gated else 1)
    return [
        Kernel("norm 1", phase, 2 * HALF * r.own),
        *_into(r, "QKV", phase),
        Gemm("QKV", phase, r.n, r.qkv, c.hidden),
        *_core_forward(r, phase),
        Gemm("output projection", phase, r.n, c.hidden, r.mixed),
        *_out_of(r, "attention", phase),
        _residual(r, "attention", phase),
        Kernel("norm 2", phase, 2 * HALF * r.own),
        *_into(r, "FFN in", phase),
        Gemm("FFN in", phase, r.n, columns, c.hidden),
        Kernel("activation", phase, (3 if c.gated else 2) * HALF * r.n * r.width),
        Gemm("FFN out", phase, r.n, c.hidden, r.width),
        *_out_of(r, "FFN", phase),
        _residual(r, "FFN", phase),
    ]


def _layer_backward(r: _Rank) -> list[Operation]:
    c = r.config
    columns = r.width * (2 if c.gated else 1)
    activation = (5 if c.gated else 3) * HALF * r.n * r.width  # SwiGLU: read dz, gate, up, write two; GeLU: 2, 1
    operations = []
    for block in ("FFN", "attention"):
        operations += [_residual_backward(r, block), *_row_bias(r, block)]
        if r.layout.sequence_parallel:
            operations.append(_over_tp(r, "all_gather", f"{block}: dY", "backward"))
        if block == "FFN":
            operations += _dgrad_and_wgrad("FFN out", r.n, c.hidden, r.width)
            operations.append(Kernel("activation", "backward", activation))
            operations += _column_bias(r, "FFN in", columns)
            operations += _column_backward(r, "FFN in", columns)
        else:
            operations += _dgrad_and_wgrad("output projection", r.n, c.hidden, r.mixed)
            operations += _core_backward(r)
            operations.append(Kernel("dQ, dK, dV side by side", "backward", 2 * HALF * r.n * r.qkv))
            operations += _column_bias(r, "QKV", r.qkv)
            operations += _column_backward(r, "QKV", r.qkv)
        operations += _norm_backward(r, "norm 2" if block == "FFN" else "norm 1")
        operations.append(Kernel("two gradients of X added", "backward", 3 * HALF * r.own))
    return operations


def _core_forward(r: _Rank, phase: str) -> list[Operation]:
    c, b, s, d = r.config, r.workload.microbatch, r.workload.sequence, r.config.head_dim
    rotary = []
    if c.family == "llama":
        rotary = [Kernel("rotary positions", phase, 2 * HALF * r.n * (r.heads + r.kv_heads) * d)]
    if r.workload.core_of(c) == "sdpa":
        moved = HALF * r.n * (r.qkv + r.mixed)
        return [*rotary, FusedCore("attention core", phase, flops.core_flops(c, b, s) // (2 * r.layout.tp), moved)]
    scores = b * r.heads * s * s
    operations = [
        *rotary,
        Gemm("scores", phase, s, s, d, count=b * r.heads),
        Kernel("scale, mask, softmax", phase, 2 * HALF * scores),
    ]
    if c.dropout:
        operations.append(Kernel("dropout of scores", phase, (2 * HALF + MASK) * scores))
    operations.append(Gemm("scores times V", phase, s, d, s, count=b * r.heads))
    operations.append(Kernel("heads side by side", phase, 2 * HALF * r.n * r.mixed))
    return operations


def _core_backward(r: _Rank) -> list[Operation]:
    c, b, s, d = r.config, r.workload.microbatch, r.workload.sequence, r.config.head_dim
    rotary = []
    if c.family == "llama":
        rotary = [Kernel("rotary positions", "backward", 2 * HALF * r.n * (r.heads + r.kv_heads) * d)]
    if r.workload.core_of(c) == "sdpa":
        # Five products where forward has two: the scores again, then dV, dP, dQ and dK.
        products = 5 * flops.core_flops(c, b, s) // (2 * 2 * r.layout.tp)
        return [FusedCore("attention core", "backward", products, HALF * r.n * 2 * (r.qkv + r.mixed)), *rotary]
    scores, heads = b * r.heads * s * s, b * r.heads
    operations = [
        Kernel("heads side by side", "backward", 2 * HALF * r.n * r.mixed),
        Gemm("d scores", "backward", s, s, d, count=heads),
        Gemm("dV", "backward", s, d, s, count=heads),
    ]
    if c.dropout:
        operations.append(Kernel("dropout of scores", "backward", (2 * HALF + MASK) * scores))
    operations.append(Kernel("scale, mask, softmax", "backward", 3 * HALF * scores))
    operations += [Gemm(name, "backward", s, d, s, count=heads) for name in ("dQ", "dK")]
    return [*operations, *rotary]


def _into(r: _Rank, layer: str, phase: str) -> list[Operation]:
    """Before a column layer: with SP its input is gathered."""
    return [_over_tp(r, "all_gather", f"{layer}: X", phase)] if r.layout.sequence_parallel else []


def _out_of(r: _Rank, block: str, phase: str) -> list[Operation]:
    """After a row layer: its parts are summed; with SP each rank keeps its tokens."""
    return [_over_tp(r, "reduce_scatter" if r.layout.sequence_parallel else "all_reduce", f"{block}: Y", phase)]


def _over_tp(r: _Rank, op: str, name: str, phase: str, behind: Gemm | None = None) -> Collective:
    return Collective(name, phase, op, HALF * r.stream, r.layout.tp, behind)


def _dgrad_and_wgrad(layer: str, n: int, out: int, into: int) -> list[Gemm]:
    """dX = dY W, [n, out] -> [n, into], and dW = dYᵀ X, [out, into], added to what is there in fp32."""
    dgrad = Gemm(f"{layer}: dX", "backward", n, into, out)
    return [dgrad, Gemm(f"{layer}: dW", "backward", out, into, n, output_bytes=2 * FULL)]


def _column_backward(r: _Rank, layer: str, columns: int) -> list[Operation]:
    """A column layer sends while it multiplies: dX's sum hides behind dW, and with SP X's second gather behind dX."""
    dgrad, wgrad = _dgrad_and_wgrad(layer, r.n, columns, r.config.hidden)
    if not r.layout.sequence_parallel:
        return [dgrad, wgrad, _over_tp(r, "all_reduce", f"{layer}: dX", "backward", behind=wgrad)]
    return [
        dgrad,
        _over_tp(r, "all_gather", f"{layer}: X again", "backward", behind=dgrad),
        wgrad,
        _over_tp(r, "reduce_scatter", f"{layer}: dX", "backward", behind=wgrad),
    ]


def _residual(r: _Rank, block: str, phase: str) -> Kernel:
    """Bias, dropout and addition in one: read two, write one and the mask."""
    return Kernel(f"{block}: bias, dropout, add", phase, (3 * HALF + _mask(r)) * r.own)


def _residual_backward(r: _Rank, block: str) -> Kernel:
    """Read dY and the mask, write one; without dropout the gradient passes as it is."""
    return Kernel(f"{block}: dropout", "backward", (2 * HALF + MASK) * r.own if _mask(r) else 0)


def _mask(r: _Rank) -> int:
    """Bytes of the residual's mask for one entry: GPT-2 drops there, Llama does not."""
    return MASK if r.config.dropout and r.config.family == "gpt2" else 0


def _norm_backward(r: _Rank, name: str) -> list[Kernel]:
    """dX: read dY and X, write dX. The weights': read both again."""
    return [
        Kernel(f"{name}: dX", "backward", 3 * HALF * r.own),
        Kernel(f"{name}: weights", "backward", 2 * HALF * r.own),
    ]


def _row_bias(r: _Rank, block: str) -> list[Kernel]:
    return [Kernel(f"{block}: bias", "backward", HALF * r.own)] if r.config.bias else []


def _column_bias(r: _Rank, layer: str, columns: int) -> list[Kernel]:
    return [Kernel(f"{layer}: bias", "backward", HALF * r.n * columns)] if r.config.bias else []


# ---- the ends -------------------------------------------------------------------------------------------------------


def embedding_operations(config: ModelConfig, layout: Layout, workload: Workload) -> list[Operation]:
    """What the first stage does besides its layers, for one microbatch."""
    r = _Rank(config, layout, workload)
    cut, gpt2 = layout.tp > 1, config.family == "gpt2"
    sp = layout.sequence_parallel
    operations = [Kernel("look up", "forward", 2 * HALF * r.stream)]
    operations += [Kernel("zero other ranks' rows", "forward", 2 * HALF * r.stream)] if cut else []
    operations.append(_over_tp(r, "reduce_scatter" if sp else "all_reduce", "embedding", "forward"))
    operations += [Kernel("add positions", "forward", 2 * HALF * r.own)] if gpt2 else []
    dropout = (2 * HALF + MASK) * r.own if _mask(r) else 0
    operations += [Kernel("dropout", phase, dropout) for phase in ("forward", "backward")]
    operations += [Kernel("positions", "backward", HALF * r.own)] if gpt2 else []
    operations += [_over_tp(r, "all_gather", "embedding: dX", "backward")] if sp else []
    operations.append(Kernel("add to rows", "backward", (HALF + 2 * FULL) * r.stream))
    return operations


def head_operations(config: ModelConfig, layout: Layout, workload: Workload) -> list[Operation]:
    """What the last stage does besides its layers, for one microbatch: norm, head, loss.

    The loss reads and writes its [n, V/t] logits in fp32 again and again: convert, maximum, subtract, exponential, sum,
    divide; backward multiply, convert.
    """
    r = _Rank(config, layout, workload)
    V = padded(config.vocab, layout.tp, "vocabulary V") // layout.tp
    passes = {
        "forward": (HALF + FULL) + FULL + 2 * FULL + 2 * FULL + FULL + 2 * FULL,
        "backward": 2 * FULL + (FULL + HALF),
    }
    return [
        Kernel("last norm", "forward", 2 * HALF * r.own),
        *_into(r, "head", "forward"),
        Gemm("head", "forward", r.n, V, config.hidden),
        *(Kernel("loss", phase, moved * r.n * V) for phase, moved in passes.items()),
        *_column_backward(r, "head", V),
        *_norm_backward(r, "last norm"),
    ]


# ---- a step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """A training step, in seconds of the slowest stage; they add up to `seconds`.

    Attributes:
        gemm, memory, tp, pp: products; elementwise kernels; what of the tensor-parallel collectives is not hidden; what
            stages send each other.
        bubble: waiting for the pipeline to fill and to empty.
        dp: sums of gradients: what of those over the replicas is not hidden, and those over stages and tensor-parallel
            ranks.
        update: the optimizer's step.
        model_flops, hardware_flops: of the whole step, over all ranks.
        peak_flops_per_second: of all ranks.
        tokens, gpus: of the step.
    """

    gemm: float
    memory: float
    tp: float
    pp: float
    bubble: float
    dp: float
    update: float
    model_flops: int
    hardware_flops: int
    peak_flops_per_second: float
    tokens: int
    gpus: int

    @property
    def seconds(self) -> float:
        """The step."""
        return self.gemm + self.memory + self.tp + self.pp + self.bubble + self.dp + self.update

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, from 0 to 1."""
        return self.model_flops / (self.seconds * self.peak_flops_per_second)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization, from 0 to 1: FLOPs run again count."""
        return self.hardware_flops / (self.seconds * self.peak_flops_per_second)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens trained on, per second and GPU."""
        return self.tokens / (self.seconds * self.gpus)


def step_time(
    config: ModelConfig,
    layout: Layout,
    workload: Workload,
    on: str | Card,
    efficiencies: Efficiencies | None = None,
) -> StepTime:
    """How long one training step takes.

    The first microbatch goes through every stage; the others follow at the slowest stage's pace: m stages' time of the
    slowest, and the time of all others once, divided by v where interleaving fills the pipeline sooner (N21, equation 1
    and section 2.2). Stages send when a chunk is done, and wait for it.

    Args:
        on: a card or its name.
        efficiencies: parts of its best that are reached; None is `efficiencies_of(on)`.

    Raises:
        ValueError: sizes do not fit the layout; no such card.
    """
    machine = Machine(card(on), efficiencies or efficiencies_of(on))
    communication.require_no_context_parallelism(layout)
    flops.layers_of_a_stage(config, layout, workload.interleave)
    m, p = workload.microbatches(layout), layout.pp

    stages = [_stage(config, layout, workload, machine, stage) for stage in _kinds_of_stages(p)]
    middle = max(p - 2, 0)
    times = [sum(one.values()) for one in stages]
    slowest = max(range(len(stages)), key=times.__getitem__)
    passing = times[0] + (times[-1] if p > 1 else 0) + middle * (times[1] if p > 2 else 0)
    bubble = (passing - times[slowest]) / workload.interleave
    parts = {kind: m * seconds for kind, seconds in stages[slowest].items()}

    ideal = {"batch": workload.batch, "sequence": workload.sequence}
    return StepTime(
        **parts,
        bubble=bubble,
        dp=_gradient_seconds(config, layout, workload, machine),
        update=_update_seconds(config, layout, workload, machine),
        model_flops=flops.model_flops(config, **ideal),
        hardware_flops=flops.hardware_flops(config, **ideal, recompute=workload.recompute),
        peak_flops_per_second=layout.world_size * machine.card.flops_per_second,
        tokens=workload.tokens,
        gpus=layout.world_size,
    )


def _kinds_of_stages(p: int) -> list[int]:
    """The first, one of those between, the last: as far as there are any."""
    return sorted({0, min(1, p - 1), p - 1})


@lru_cache(maxsize=1024)
def _stage_operations(
    config: ModelConfig, layout: Layout, workload: Workload, stage: int
) -> tuple[tuple[int, Operation], ...]:
    """What one rank of a stage does for one microbatch, and how many times."""
    layers = config.layers // layout.pp
    operations = [(layers, one) for one in layer_operations(config, layout, workload)]
    if stage == 0:
        operations += [(1, one) for one in embedding_operations(config, layout, workload)]
    if stage == layout.pp - 1:
        operations += [(1, one) for one in head_operations(config, layout, workload)]
    return tuple(operations)


def _stage(config: ModelConfig, layout: Layout, workload: Workload, machine: Machine, stage: int) -> dict[str, float]:
    """Seconds of one microbatch on one stage, by kind."""
    parts = {"gemm": 0.0, "memory": 0.0, "tp": 0.0}
    kinds = {Gemm: "gemm", FusedCore: "gemm", Kernel: "memory", Collective: "tp"}
    for times, one in _stage_operations(config, layout, workload, stage):
        parts[kinds[type(one)]] += times * one.seconds(machine)
    sends = communication.pp_microbatch(config, layout, workload, stage=stage, element_bytes=HALF)
    parts["pp"] = _volume_seconds(sends, layout, machine)
    return parts


def _volume_seconds(volume: Volume, layout: Layout, machine: Machine) -> float:
    """Of transfers one after another, each over the link that its axis uses."""
    total = 0.0
    for one in volume:
        total += one.calls * communication.collective_seconds(
            one.op,
            one.elements * one.element_bytes,
            2 if one.axis == "pp" else one.ranks,
            machine.card,
            ranks_per_node=ranks_in_a_node(layout, machine.card, one.axis),
            efficiency=machine.efficiencies.link,
        )
    return total


def ranks_in_a_node(layout: Layout, on: Card, axis: str) -> int:
    """How many of an axis's ranks share a node, in Megatron's order: tp innermost, then dp, then pp. Of a pipeline's
    neighbours two or one."""
    node = on.gpus_per_node
    if axis == "tp":
        return min(layout.tp, node)
    if axis == "dp":
        return gcd(layout.dp, max(1, node // layout.tp))
    return 2 if layout.world_size <= node else 1


def _gradient_seconds(config: ModelConfig, layout: Layout, workload: Workload, machine: Machine) -> float:
    """What of the data-parallel collectives is not hidden by the last microbatch's backward; and the sums over stages
    and tensor-parallel ranks that follow it once a step."""
    hidden = _backward_seconds(config, layout, workload, machine) if workload.overlap_gradients else 0.0
    totals = []
    for stage in _kinds_of_stages(layout.pp):
        over_dp = communication.dp_update(
            config,
            layout,
            stage=stage,
            gradient_bytes=FULL,
            parameter_bytes=HALF,
            distributed_optimizer=workload.distributed_optimizer,
        )
        after = communication.tp_update(config, layout, stage=stage, element_bytes=FULL)
        after += communication.pp_update(config, layout, stage=stage, gradient_bytes=FULL)
        shown = max(0.0, _volume_seconds(over_dp, layout, machine) - hidden)
        totals.append(shown + _volume_seconds(after, layout, machine))
    return max(totals)


def _backward_seconds(config: ModelConfig, layout: Layout, workload: Workload, machine: Machine) -> float:
    """Backward of one microbatch on one stage: what gradients can hide behind."""
    again = ("recompute", "backward")
    operations = _stage_operations(config, layout, workload, layout.pp - 1)
    return sum(times * one.seconds(machine) for times, one in operations if one.phase in again)


def _update_seconds(config: ModelConfig, layout: Layout, workload: Workload, machine: Machine) -> float:
    own = max(flops.rank_parameters(config, layout, stage).elements for stage in _kinds_of_stages(layout.pp))
    sharers = layout.dp if workload.distributed_optimizer else 1
    each = sum(UPDATE_BYTES.values()) + sum(SHARED_UPDATE_BYTES.values()) / sharers
    return machine.memory_seconds(own * each)
