"""What is sent, by which axis, in which phase: elements, payload bytes and wire bytes; and how long that takes.

Symbols: b microbatch, s sequence, h hidden, V vocabulary, L layers, m microbatches of a step, v chunks of a stage, Psi
parameters of a rank, t, p and dp the axes of a layout.

*Elements* are numbers of the whole tensor, *payload* is its bytes, *wire* is what one rank sends in one direction. The
wire is the ring's: 2(n-1)/n payloads for an all-reduce over n ranks, (n-1)/n for an all-gather or a reduce-scatter, 1
for sending to a neighbour. It is the ledger's model too (`tpcode.comm.ledger`), and the two agree to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import log2

from tpcode.config import Layout, ModelConfig
from tpcode.cost.flops import layers_of_a_stage, rank_parameters, require_recompute
from tpcode.cost.hardware import (
    ALGORITHMS,
    NCCL_BASE_SECONDS,
    NCCL_HOP_SECONDS,
    NCCL_PROTOCOL_SHARE,
    NCCL_TREE_SHARE,
    PROTOCOLS,
    Card,
    card,
)
from tpcode.cost.workload import Workload
from tpcode.shapes import divide, head_groups, padded, require_int

WIRE_FACTOR = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1),
    "send": lambda n: Fraction(1),
}
OPS = tuple(WIRE_FACTOR)
AXES = ("tp", "pp", "dp")
PHASES = ("forward", "recompute", "backward", "update")
LOSS_BYTES = 4  # of one number in the loss, which is computed in fp32 at least


# ---- volumes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One kind of collective, called so many times by one rank.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "broadcast", or "send" to one neighbour.
        axis: "tp", "pp" or "dp".
        phase: "forward", "recompute", "backward", or "update", once a step after the last backward.
        what: which tensor it is.
        elements: of the whole tensor, in one call.
        element_bytes: bytes of one.
        ranks: that take part.
        calls: how many times.
    """

    op: str
    axis: str
    phase: str
    what: str
    elements: int
    element_bytes: int
    ranks: int
    calls: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor, in all calls."""
        return self.calls * self.elements * self.element_bytes

    @property
    def wire_elements(self) -> int | Fraction:
        """Numbers that one rank sends on a ring, in all calls; a Fraction where that is not whole."""
        return _exact(self.calls * self.elements * WIRE_FACTOR[self.op](self.ranks))

    @property
    def wire_bytes(self) -> int | Fraction:
        """Bytes that one rank sends on a ring, in all calls; a Fraction where that is not whole."""
        return _exact(self.payload_bytes * WIRE_FACTOR[self.op](self.ranks))


class Volume(tuple):
    """Transfers of one rank. They add up with `+`, are repeated with `n * volume`, and are asked like a ledger."""

    def __new__(cls, transfers: Iterable[Transfer] = ()):
        return super().__new__(cls, (one for one in transfers if one.ranks > 1 and one.calls and one.elements))

    def __add__(self, other: Volume) -> Volume:
        return Volume((*self, *other))

    def __mul__(self, times: int) -> Volume:
        return Volume(replace(one, calls=times * one.calls) for one in self)

    __rmul__ = __mul__

    def select(self, op: str | None = None, phase: str | None = None, axis: str | None = None) -> Volume:
        """Those of one op, phase or axis, where given.

        Raises:
            ValueError: there is no such op, phase or axis.
        """
        wanted = {"op": (op, OPS), "phase": (phase, PHASES), "axis": (axis, AXES)}
        for name, (value, known) in wanted.items():
            if value is not None and value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)} and is {value!r}")
        chosen = {name: value for name, (value, _) in wanted.items() if value is not None}
        return Volume(one for one in self if all(getattr(one, name) == value for name, value in chosen.items()))

    def count(self, op: str | None = None, phase: str | None = None, axis: str | None = None) -> int:
        """How many calls."""
        return sum(one.calls for one in self.select(op, phase, axis))

    def payload_bytes(self, op: str | None = None, phase: str | None = None, axis: str | None = None) -> int:
        """Bytes of the tensors, whole."""
        return sum(one.payload_bytes for one in self.select(op, phase, axis))

    def wire_elements(self, op: str | None = None, phase: str | None = None, axis: str | None = None):
        """Numbers that one rank sends, on a ring: an int, or a Fraction where it is not whole."""
        return _exact(sum((Fraction(one.wire_elements) for one in self.select(op, phase, axis)), Fraction(0)))

    def wire_bytes(self, op: str | None = None, phase: str | None = None, axis: str | None = None):
        """Bytes that one rank sends, on a ring: an int, or a Fraction where it is not whole."""
        return _exact(sum((Fraction(one.wire_bytes) for one in self.select(op, phase, axis)), Fraction(0)))


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def tp_layer(
    config: ModelConfig,
    layout: Layout,
    *,
    microbatch: int,
    sequence: int,
    recompute: str = "none",
    element_bytes: int = 2,
) -> Volume:
    """One layer and microbatch, over the tensor-parallel ranks. The tensors are [b, s, h].

        TP       forward 2 all-reduces (g), backward 2 (f), recompute 2: 8 (t-1)/t bsh wire elements, or 12
        TP + SP  forward 2 all-gathers and 2 reduce-scatters, backward the same and 2 all-gathers of what was saved as
                 a slice, recompute 2 and 2: 10 (t-1)/t bsh, or 14

    (N21, section 3.2; K22, section 4.2.2.) Selective recomputation repeats the attention core, which sends nothing.
    Where there are fewer KV heads than ranks, the t/k replicas of one sum its gradient: 2dh elements.
    """
    t = layout.tp
    stream = _stream(config, layout, microbatch, sequence)
    passes = ["forward", "backward"] + ["recompute"] * (require_recompute(recompute) == "full")

    def over_tp(op, phase, what):
        return Transfer(op, "tp", phase, what, stream, element_bytes, t, calls=2)

    if layout.sequence_parallel:
        transfers = [over_tp(op, phase, "X, Y") for phase in passes for op in ("all_gather", "reduce_scatter")]
        transfers.append(over_tp("all_gather", "backward", "X again"))
    else:
        names = {"forward": "Y: reduce (g)", "recompute": "Y: reduce (g)", "backward": "dX: copy (f)"}
        transfers = [over_tp("all_reduce", phase, names[phase]) for phase in passes]
    return Volume([*transfers, _replicated_kv(config, t, element_bytes)])


def tp_ends(
    config: ModelConfig, layout: Layout, *, microbatch: int, sequence: int, element_bytes: int = 2
) -> tuple[Volume, Volume]:
    """What one microbatch sends before the first layer, and after the last, over the tensor-parallel ranks.

    embedding  forward   all-reduce of [b, s, h]; with SP reduce-scatter, and backward all-gather
    head       backward  all-reduce of dX; with SP forward all-gather, backward the same again and reduce-scatter
    loss       forward   3 all-reduces of [b, s], in fp32 (MAX, SUM, SUM)
    """
    stream = _stream(config, layout, microbatch, sequence)

    def over_tp(op, phase, what):
        return Transfer(op, "tp", phase, what, stream, element_bytes, layout.tp)

    token_bytes = max(LOSS_BYTES, element_bytes)
    loss = Transfer("all_reduce", "tp", "forward", "loss", microbatch * sequence, token_bytes, layout.tp, calls=3)
    if not layout.sequence_parallel:
        first = Volume([over_tp("all_reduce", "forward", "embedding")])
        return first, Volume([over_tp("all_reduce", "backward", "head: dX"), loss])
    first = Volume(
        [over_tp("reduce_scatter", "forward", "embedding"), over_tp("all_gather", "backward", "embedding: dX")]
    )
    last = Volume(
        [
            over_tp("all_gather", "forward", "head: X"),
            over_tp("all_gather", "backward", "head: X again"),
            over_tp("reduce_scatter", "backward", "head: dX"),
            loss,
        ]
    )
    return first, last


def tp_model(
    config: ModelConfig,
    layout: Layout,
    *,
    microbatch: int,
    sequence: int,
    recompute: str = "none",
    element_bytes: int = 2,
) -> Volume:
    """A whole model and microbatch, over the tensor-parallel ranks: L layers and both ends.

    `record()` around `model.loss(ids, targets).backward()` finds these bytes.
    """
    sizes = {"microbatch": microbatch, "sequence": sequence, "element_bytes": element_bytes}
    first, last = tp_ends(config, layout, **sizes)
    return first + config.layers * tp_layer(config, layout, recompute=recompute, **sizes) + last


def tp_update(config: ModelConfig, layout: Layout, *, stage: int = 0, element_bytes: int = 2) -> Volume:
    """Once a step, over the tensor-parallel ranks: with SP the gradients of norms, biases of rows and positions, of
    which each rank has only its tokens' part, are summed (`finalize_grads`). Without SP nothing."""
    if not layout.sequence_parallel:
        return Volume()
    partial = rank_parameters(config, layout, stage).replicated
    return Volume([Transfer("all_reduce", "tp", "update", "partial gradients", partial, element_bytes, layout.tp)])


def _replicated_kv(config: ModelConfig, t: int, element_bytes: int) -> Transfer:
    """The gradient of a KV head's rows, [2d, h], over the ranks that hold it."""
    elements = 2 * config.head_dim * config.hidden
    replicas = head_groups(config.heads, config.kv_heads, t).replicas
    return Transfer("all_reduce", "tp", "backward", "dK, dV of replicas", elements, element_bytes, replicas)


def _stream(config: ModelConfig, layout: Layout, microbatch: int, sequence: int) -> int:
    """bsh, elements of the residual stream; with SP, t must divide s."""
    b, s = require_int(microbatch, "microbatch"), require_int(sequence, "sequence")
    if layout.sequence_parallel:
        divide(s, layout.tp, "sequence")
    return b * s * config.hidden


# ---- pipeline parallelism -------------------------------------------------------------------------------------------


def bubble_fraction(pp: int, microbatches: int, interleave: int = 1) -> float:
    """(p-1) / (v m): the time that a stage waits, over the time that it works (N21, section 2.2)."""
    return (pp - 1) / (interleave * microbatches)


def pp_microbatch(
    config: ModelConfig, layout: Layout, workload: Workload, *, stage: int = 0, element_bytes: int = 2
) -> Volume:
    """What one rank of a stage sends to its neighbours for one microbatch: bsh forward to the next stage, and the
    gradient of as much backward to the one before; v times, when interleaved, for then the last stage has a next one.

    With scatter-gather each of the t ranks sends its 1/t of it, and the next stage gathers it over its own t ranks
    (N21, section 4.1). Under SP each rank has 1/t anyway, and needs no gather.
    """
    stream = _stream(config, layout, workload.microbatch, workload.sequence)
    p, v, t = layout.pp, workload.interleave, layout.tp
    cut = layout.sequence_parallel or (workload.scatter_gather and t > 1)
    own = divide(stream, t, "elements bsh of a stage's output") if cut else stream
    sends = {"forward": v - (stage == p - 1), "backward": v - (stage == 0)}
    transfers = [
        Transfer("send", "pp", phase, "stage's output", own, element_bytes, p, calls) for phase, calls in sends.items()
    ]
    if cut and not layout.sequence_parallel and p > 1:
        received = {"forward": sends["backward"], "backward": sends["forward"]}
        transfers += [
            Transfer("all_gather", "tp", phase, "pieces of a stage's output", stream, element_bytes, t, calls)
            for phase, calls in received.items()
        ]
    return Volume(transfers)


def pp_update(config: ModelConfig, layout: Layout, *, stage: int = 0, gradient_bytes: int = 4) -> Volume:
    """Once a step, between the first stage and the last: the two copies of a tied table sum their gradients, V/t · h
    elements. Nothing with an untied head, with one stage, or on a stage between."""
    if not config.tied or layout.pp == 1 or stage not in (0, layout.pp - 1):
        return Volume()
    elements = padded(config.vocab, layout.tp, "vocabulary V") // layout.tp * config.hidden
    return Volume([Transfer("all_reduce", "pp", "update", "gradient of the tied table", elements, gradient_bytes, 2)])


# ---- data parallelism -----------------------------------------------------------------------------------------------


def dp_update(
    config: ModelConfig,
    layout: Layout,
    *,
    stage: int = 0,
    gradient_bytes: int = 4,
    parameter_bytes: int = 2,
    distributed_optimizer: bool = False,
) -> Volume:
    """Once a step, over the data-parallel ranks: an all-reduce of the rank's Psi gradients, 2 Psi (dp-1)/dp elements.

    With a distributed optimizer (ZeRO, stage 1) a reduce-scatter of the gradients and an all-gather of the new
    parameters: as many elements.

    Args:
        gradient_bytes: of one gradient: 4 for Megatron's fp32 main gradients.
        parameter_bytes: of one parameter in the all-gather.
    """
    elements = rank_parameters(config, layout, stage).elements
    ops = [("all_reduce", "gradients", gradient_bytes)]
    if distributed_optimizer:
        ops = [("reduce_scatter", "gradients", gradient_bytes), ("all_gather", "parameters", parameter_bytes)]
    return Volume(Transfer(op, "dp", "update", what, elements, size, layout.dp) for op, what, size in ops)


def zero3_step(
    config: ModelConfig,
    layout: Layout,
    *,
    microbatches: int = 1,
    stage: int = 0,
    gradient_bytes: int = 2,
    parameter_bytes: int = 2,
) -> Volume:
    """A step of ZeRO-3 or FSDP over the data-parallel ranks: parameters are gathered before each layer's forward and
    again before its backward, gradients reduce-scattered after it: 3 Psi (dp-1)/dp elements, in each microbatch.

    (Rajbhandari et al. 2020, section 7.2.2.) Psi counts the parameters of a tensor-parallel rank and stage.
    """
    elements = rank_parameters(config, layout, stage).elements

    calls = require_int(microbatches, "microbatches")

    def over_dp(op, phase, what, size):
        return Transfer(op, "dp", phase, what, elements, size, layout.dp, calls)

    return Volume(
        [
            over_dp("all_gather", "forward", "parameters", parameter_bytes),
            over_dp("all_gather", "backward", "parameters", parameter_bytes),
            over_dp("reduce_scatter", "backward", "gradients", gradient_bytes),
        ]
    )


# ---- a step ---------------------------------------------------------------------------------------------------------


def step(
    config: ModelConfig,
    layout: Layout,
    workload: Workload,
    *,
    stage: int = 0,
    element_bytes: int = 2,
    gradient_bytes: int = 4,
) -> Volume:
    """Everything that one rank of a stage sends in one training step, along all axes.

    Raises:
        ValueError: sizes do not fit the layout; the message says which. Context parallelism is not counted here.
    """
    require_no_context_parallelism(layout)
    sizes = {"microbatch": workload.microbatch, "sequence": workload.sequence, "element_bytes": element_bytes}
    layers = layers_of_a_stage(config, layout, workload.interleave)
    first, last = tp_ends(config, layout, **sizes)
    volume = layers * tp_layer(config, layout, recompute=workload.recompute, **sizes)
    if stage == 0:
        volume = first + volume
    if stage == layout.pp - 1:
        volume = volume + last
    volume = volume + pp_microbatch(config, layout, workload, stage=stage, element_bytes=element_bytes)
    volume = workload.microbatches(layout) * volume
    volume = volume + tp_update(config, layout, stage=stage, element_bytes=gradient_bytes)
    volume = volume + pp_update(config, layout, stage=stage, gradient_bytes=gradient_bytes)
    return volume + dp_update(
        config,
        layout,
        stage=stage,
        gradient_bytes=gradient_bytes,
        parameter_bytes=element_bytes,
        distributed_optimizer=workload.distributed_optimizer,
    )


def require_no_context_parallelism(layout: Layout) -> None:
    """Refuse cp > 1.

    Raises:
        ValueError: it is.
    """
    if layout.cp > 1:
        raise ValueError(f"costs are counted for tp, pp and dp, and this layout has cp = {layout.cp}; take cp = 1")


# ---- time: alpha and beta -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlphaBeta:
    """A collective's time as alpha + bytes / speed.

    Attributes:
        alpha_seconds: what it takes with nothing to send.
        bytes_per_second: payload bytes in a second, alpha apart: nccl-tests' algbw of a large message.
    """

    alpha_seconds: float
    bytes_per_second: float

    def seconds(self, payload_bytes: float) -> float:
        """Of a payload."""
        return self.alpha_seconds + payload_bytes / self.bytes_per_second


def fit_alpha_beta(measured: Sequence[tuple[float, float]]) -> AlphaBeta:
    """alpha and beta that explain these times of one collective, (payload bytes, seconds), best in relative terms:
    least squares of (alpha + bytes / speed) / seconds - 1. A small message counts as much as a large one.

    Raises:
        ValueError: fewer than two sizes, a time that is not positive, or times that do not grow with the size.
    """
    if len({size for size, _ in measured}) < 2:
        raise ValueError(f"alpha and beta take times of two sizes at least, and there are {len(measured)} of one")
    if any(seconds <= 0 for _, seconds in measured):
        raise ValueError("a time must be positive")
    weights = [(1 / seconds, size / seconds) for size, seconds in measured]  # of alpha, of 1 / speed
    aa, ab, bb = (sum(w[i] * w[j] for w in weights) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(w[i] for w in weights) for i in (0, 1))
    alpha = max(0.0, (a * bb - b * ab) / (aa * bb - ab * ab))
    slope = (b - alpha * ab) / bb
    if slope <= 0:
        raise ValueError("the times do not grow with the size: measure larger messages")
    return AlphaBeta(alpha, 1 / slope)


def alpha_beta(
    op: str,
    ranks: int,
    on: str | Card,
    *,
    ranks_per_node: int | None = None,
    algorithm: str = "ring",
    protocol: str = "Simple",
    efficiency: float = 1.0,
) -> AlphaBeta:
    """alpha and beta of a collective over n ranks, by NCCL's own constants.

    Ring: alpha is the base and a hop for each of 2(n-1) steps of an all-reduce, n-1 of an all-gather or a
    reduce-scatter; in each turn around, one hop fewer than there are nodes crosses the network. Payload goes at the
    link's speed / wire factor. Tree (all-reduce only): up and down, n/nodes - 1 hops inside and log2(nodes) outside;
    each byte goes up once and down once. "send" is one hop, and takes no turn.

    (NVIDIA/nccl, src/graph/tuning.cc.)

    Args:
        op: one of `OPS`.
        ranks: n.
        on: a card or its name.
        ranks_per_node: how many of them share a node; as many as fit, unless said. 1 for data-parallel peers.
        algorithm: "ring" or "tree".
        protocol: "LL", "LL128" or "Simple".
        efficiency: which part of the links' speed is reached.

    Raises:
        ValueError: no such op, algorithm, protocol or card, or a tree of something else than an all-reduce.
    """
    known_names = {"op": (op, OPS), "algorithm": (algorithm, ALGORITHMS), "protocol": (protocol, PROTOCOLS)}
    for name, (value, known) in known_names.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)} and is {value!r}")
    if algorithm == "tree" and op != "all_reduce":
        raise ValueError(f"a tree is for all_reduce; {op} goes around a ring")
    here = card(on)
    if require_int(ranks, "ranks") == 1:
        return AlphaBeta(0.0, float("inf"))
    nodes = here.nodes(ranks, ranks_per_node)
    inside, outside = (NCCL_HOP_SECONDS[link][algorithm][protocol] for link in ("nvlink", "network"))
    speed = here.ring_bytes_per_second(ranks, ranks_per_node) * efficiency * NCCL_PROTOCOL_SHARE[protocol]
    base = NCCL_BASE_SECONDS[algorithm][protocol]
    if algorithm == "tree":
        hops = 2 * ((ranks // nodes - 1) * inside + log2(nodes) * outside)
        return AlphaBeta(base + hops, speed * NCCL_TREE_SHARE / 2)
    factor = WIRE_FACTOR[op](ranks)
    if op == "send":
        return AlphaBeta(base + (outside if nodes > 1 else inside), speed)
    turns = 2 if op == "all_reduce" else 1
    crossings = turns * (nodes - 1)
    hops = (turns * (ranks - 1) - crossings) * inside + crossings * outside
    return AlphaBeta(base + hops, speed / float(factor))


def collective_seconds(
    op: str,
    payload_bytes: float,
    ranks: int,
    on: str | Card,
    *,
    ranks_per_node: int | None = None,
    efficiency: float = 1.0,
) -> float:
    """The time of a collective by the algorithm and protocol that are fastest for it, as NCCL chooses them."""
    ways = _ways(op, ranks, card(on), ranks_per_node)
    return min(way.alpha_seconds + payload_bytes / (way.bytes_per_second * efficiency) for way in ways)


@lru_cache(maxsize=1024)
def _ways(op: str, ranks: int, here: Card, ranks_per_node: int | None) -> tuple[AlphaBeta, ...]:
    """alpha and beta of every algorithm and protocol."""
    algorithms = ALGORITHMS if op == "all_reduce" else ("ring",)
    return tuple(
        alpha_beta(op, ranks, here, ranks_per_node=ranks_per_node, algorithm=algorithm, protocol=protocol)
        for algorithm in algorithms
        for protocol in PROTOCOLS
    )


def compute_bound_tp(ffn: int, on: str | Card, *, ranks_per_node: int | None = None) -> float:
    """F W / C: an FFN of width F on t ranks computes for longer than it sends as long as t is below this.

    Each way two products of [n, h] and [h, F] take 4nhF / t FLOPs of C a second, and an all-gather and a
    reduce-scatter of 2nh bytes each, W a second; n and h drop out. (scaling-book, "How to Scale Your Model".) A gated
    FFN has three products and sends no more: 1.5 F W / C. Heads make attention's share of a layer no better.

    Args:
        ffn: F.
        on: a card or its name: C is its peak, W its NVLink.
        ranks_per_node: for a group that crosses nodes, how many of it are in each: W is then their adapters'.
    """
    here = card(on)
    speed = here.nvlink_bytes_per_second
    if ranks_per_node is not None:
        speed = here.ring_bytes_per_second(2 * ranks_per_node, ranks_per_node)
    return require_int(ffn, "FFN width F") * speed / here.flops_per_second


def algbw(payload_bytes: float, seconds: float) -> float:
    """nccl-tests' algorithm bandwidth: payload bytes a second."""
    return payload_bytes / seconds


def busbw(op: str, payload_bytes: float, seconds: float, ranks: int) -> float:
    """nccl-tests' bus bandwidth: algbw times the wire factor, to be compared with a link's speed."""
    return algbw(payload_bytes, seconds) * float(WIRE_FACTOR[op](ranks))


def _exact(number: Fraction) -> int | Fraction:
    number = Fraction(number)
    return int(number) if number.denominator == 1 else number
