"""Parameters and FLOPs of a model: exactly, and as the papers count them.

Symbols: B sequences in the batch, b in a microbatch, s sequence, h hidden, F FFN width, a query heads, k KV heads, d
head size, V vocabulary, L layers, t, p and dp the axes of a layout, Psi parameters, n GPUs, X FLOP/s of one.

A product of [m, k] and [k, n] takes 2mkn FLOPs; norms, softmax, GeLU and dropout are not counted. Attention is counted
in full, all s² scores, though a causal mask leaves half of them. So do the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpcode.config import Layout, ModelConfig
from tpcode.shapes import head_groups, padded, require_int

RECOMPUTE = ("none", "selective", "full")


# ---- one model ------------------------------------------------------------------------------------------------------


def forward_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """FLOPs of one forward pass of `batch` sequences: L layers and the head."""
    return config.layers * layer_flops(config, batch, sequence) + head_flops(config, batch, sequence)


def layer_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """FLOPs of one layer, forward. For a GPT 24 B s h² + 4 B s² h."""
    tokens = batch * sequence
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = 2 * tokens * config.hidden * (2 * query + 2 * kv)
    ffn = 2 * tokens * config.hidden * config.ffn * (3 if config.gated else 2)
    return projections + core_flops(config, batch, sequence) + ffn


def core_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """FLOPs of one layer's attention core, forward: Q Kᵀ and the scores times V, 2 B s² a d each."""
    return 2 * 2 * batch * sequence**2 * config.heads * config.head_dim


def head_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """FLOPs of the output head, forward: 2 B s h V."""
    return 2 * batch * sequence * config.hidden * config.vocab


def model_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """FLOPs that one training step needs: forward once, and twice as much backward (dX and dW of every product).

    For a GPT with F = 4h it is K22's equation 7, 72 B L s h² (1 + s/(6h) + V/(12hL)).
    """
    return 3 * forward_flops(config, batch, sequence)


def hardware_flops(config: ModelConfig, batch: int, sequence: int, recompute: str = "none") -> int:
    """FLOPs that one training step does: those that it needs, and what recomputation does again.

    "full" runs every layer's forward again (the head's not): N21's equation 3. "selective" runs the attention core's
    forward again: 4 B s² h for each layer of a GPT. K22's equation 8 has three times that (`k22_hardware_flops`).

    Raises:
        ValueError: recompute is none of "none", "selective", "full".
    """
    again = {
        "none": 0,
        "selective": core_flops(config, batch, sequence),
        "full": layer_flops(config, batch, sequence),
    }
    return model_flops(config, batch, sequence) + config.layers * again[require_recompute(recompute)]


def require_recompute(recompute: str) -> str:
    """recompute, if it is one of "none", "selective", "full".

    Raises:
        ValueError: it is not.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)} and is {recompute!r}")
    return recompute


# ---- as the papers have it ------------------------------------------------------------------------------------------


def n21_parameters(layers: int, hidden: int, vocab: int, sequence: int) -> int:
    """12 L h² (1 + 13/(12h) + (V+s)/(12Lh)): parameters of a GPT (N21, equation 2). It leaves out the last norm's 2h,
    which `ModelConfig.num_parameters` counts."""
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + sequence) * hidden


def n21_flops(config: ModelConfig, batch: int, sequence: int) -> float:
    """96 B s L h² (1 + s/(6h) + V/(16Lh)): FLOPs of a step with full recomputation (N21, equation 3)."""
    h, L, V = config.hidden, config.layers, config.vocab
    return 96 * batch * sequence * L * h**2 * (1 + sequence / (6 * h) + V / (16 * L * h))


def k22_model_flops(config: ModelConfig, batch: int, sequence: int) -> float:
    """72 B L s h² (1 + s/(6h) + V/(12hL)) (K22, equation 7)."""
    return _k22(config, batch, sequence, sequence / (6 * config.hidden))


def k22_hardware_flops(config: ModelConfig, batch: int, sequence: int) -> float:
    """72 B L s h² (1 + s/(3h) + V/(12hL)): with selective recomputation (K22, equation 8).

    It adds 12 B s² h for each layer, the core's forward *and* backward; what is run again is the forward, 4 B s² h.
    The published HFU follow this equation.
    """
    return _k22(config, batch, sequence, sequence / (3 * config.hidden))


def _k22(config: ModelConfig, batch: int, sequence: int, attention: float) -> float:
    h, L = config.hidden, config.layers
    return 72 * batch * L * sequence * h**2 * (1 + attention + config.vocab / (12 * h * L))


def training_seconds(parameters: float, tokens: float, gpus: int, flops_per_second: float) -> float:
    """8 T Psi / (n X): how long T tokens take, with full recomputation (N21, equation 4). X is per GPU, achieved."""
    return 8 * tokens * parameters / (gpus * flops_per_second)


def utilization(flops: float, seconds: float, gpus: int, flops_per_second: float) -> float:
    """Which part of what n GPUs could do is done: FLOPs / (seconds · n · peak of one).

    It is the MFU with `model_flops`, and the HFU with `hardware_flops`.
    """
    return flops / (seconds * gpus * flops_per_second)


# ---- what one rank has ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankParameters:
    """What one rank of a stage holds, in elements.

    Attributes:
        sharded: its shares of what is cut over the tensor-parallel ranks (padding of the vocabulary included).
        replicated: what each of them has whole: norms, biases of rows, positions.
    """

    sharded: int
    replicated: int

    @property
    def elements(self) -> int:
        """Both."""
        return self.sharded + self.replicated


def rank_parameters(config: ModelConfig, layout: Layout, stage: int = 0) -> RankParameters:
    """Parameters of one rank of a pipeline stage: L/p layers; the embedding and positions with the first stage, the
    last norm and the head with the last. A tied head is the embedding, of which the last stage, where it is not the
    first, has a copy.

    Raises:
        ValueError: layers, heads, FFN or stage do not fit the layout.
    """
    stage = require_int(stage, "stage", minimum=0)
    if stage >= layout.pp:
        raise ValueError(f"stage must be below pp = {layout.pp} and is {stage}")
    layers = layers_of_a_stage(config, layout)
    sharded, replicated = _of_a_layer(config, layout.tp)
    sharded, replicated = layers * sharded, layers * replicated
    first, last = stage == 0, stage == layout.pp - 1
    table = padded(config.vocab, layout.tp, "vocabulary V") // layout.tp * config.hidden
    if first:
        sharded += table
        replicated += config.max_seq * config.hidden if config.family == "gpt2" else 0
    if last:
        sharded += 0 if first and config.tied else table
        replicated += norm_parameters(config)
    return RankParameters(sharded, replicated)


def layers_of_a_stage(config: ModelConfig, layout: Layout, interleave: int = 1) -> int:
    """L/p, in v chunks of as many layers.

    Raises:
        ValueError: p stages of v chunks do not hold the layers evenly; there is one stage, in several chunks.
    """
    p, v = layout.pp, require_int(interleave, "interleave")
    if v > 1 and p == 1:
        raise ValueError(f"interleave = {v} cuts the stages of a pipeline in chunks, and there is one stage: pp = 1")
    if config.layers % (p * v):
        chunks = f" in {v} chunks each" if v > 1 else ""
        works = ", ".join(str(size) for size in range(1, config.layers + 1) if config.layers % (size * v) == 0)
        raise ValueError(f"pp = {p} stages{chunks} do not hold {config.layers} layers evenly; pp that work: {works}")
    return config.layers // p


def norm_parameters(config: ModelConfig) -> int:
    """Of one norm: 2h with a bias, else h."""
    return (2 if config.bias else 1) * config.hidden


def _of_a_layer(config: ModelConfig, t: int) -> tuple[int, int]:
    """Sharded and replicated elements of one layer on one rank."""
    groups = head_groups(config.heads, config.kv_heads, t)
    columns = (groups.heads_per_rank + 2 * groups.kv_heads_per_rank) * config.head_dim
    rows = groups.heads_per_rank * config.head_dim
    width = padded(config.ffn, t, "FFN width F") // t
    columns_of_ffn = (2 if config.gated else 1) * width
    sharded = config.hidden * (columns + rows + columns_of_ffn + width)
    replicated = 2 * norm_parameters(config)
    if config.bias:
        sharded += columns + columns_of_ffn
        replicated += 2 * config.hidden
    return sharded, replicated
