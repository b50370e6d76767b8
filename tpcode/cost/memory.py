"""What training keeps in the memory of one rank: model state, and activations tensor by tensor. All in bytes.

Symbols: b sequences in a microbatch, s tokens of a sequence, h hidden, F FFN width, a query heads, k KV heads, d head
size, V vocabulary, L layers; t, p and dp the axes of a layout, m model chunks on a rank (interleaving).

Activations are those of Korthikanti et al. 2022 (K22), table 2, for any sizes and both families. A mask of dropout is
kept where `config.dropout` is not 0, as the papers' models have it and the presets do not:
`replace(ModelConfig.preset("k22-22b"), dropout=0.1)` is the model of K22's formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from tpcode.config import Layout, ModelConfig
from tpcode.cost.flops import RECOMPUTE, hardware_flops, model_flops, rank_parameters, require_recompute
from tpcode.shapes import divide, head_groups, padded, require_int

# ---- model state ----------------------------------------------------------------------------------------------------

# Bytes of one parameter. What comes after the gradients is the optimizer's.
RECIPES: dict[str, dict[str, int]] = {
    "fp32": {"weights": 4, "gradients": 4, "exp_avg": 4, "exp_avg_sq": 4},
    "mixed": {"weights": 2, "gradients": 2, "master weights": 4, "exp_avg": 4, "exp_avg_sq": 4},
    "mixed, fp32 gradients": {"weights": 2, "gradients": 4, "master weights": 4, "exp_avg": 4, "exp_avg_sq": 4},
}


def bytes_per_parameter(recipe: str = "mixed", dp: int = 1) -> Fraction:
    """16, or 18 with gradients in fp32. Where a distributed optimizer shares its part out over `dp` data-parallel
    ranks, 6 + 12/dp: weights and gradients stay whole on each (Rajbhandari et al. 2020, stage 1; Megatron-LM's
    theoretical_memory_usage.py).

    Raises:
        ValueError: no such recipe; the message lists them.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {'; '.join(RECIPES)}, and is {recipe!r}")
    terms = RECIPES[recipe]
    on_each = terms["weights"] + terms["gradients"]
    return on_each + Fraction(sum(terms.values()) - on_each, require_int(dp, "dp"))


@dataclass(frozen=True)
class State:
    """Weights, gradients and optimizer state of one rank, in bytes.

    Attributes:
        sharded: of its share of what is cut over the tensor-parallel ranks.
        replicated: of what each of them has whole: norms, biases of rows, positions.
    """

    sharded: int
    replicated: int

    @property
    def total(self) -> int:
        """Both."""
        return self.sharded + self.replicated


def state_bytes(
    config: ModelConfig,
    layout: Layout,
    recipe: str = "mixed",
    *,
    distributed_optimizer: bool = False,
    stage: int = 0,
) -> State:
    """Model state of one rank of a pipeline stage.

    Args:
        recipe: a name in `RECIPES`.
        distributed_optimizer: whether master weights and averages are shared out over the `dp` ranks.

    Raises:
        ValueError: no such recipe; sizes that the layout cannot split.
    """
    each = bytes_per_parameter(recipe, layout.dp if distributed_optimizer else 1)
    own = rank_parameters(config, layout, stage)
    return State(_rounded_up(own.sharded * each), _rounded_up(own.replicated * each))


# ---- activations of one layer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A tensor that one rank keeps from a layer's forward until its backward.

    Attributes:
        part: "norms", "attention" or "ffn".
        name: what it is.
        elements: on this rank.
        width: bytes of an element.
        whole: whether tensor parallelism without sequence parallelism leaves it whole on every rank.
        core: whether it belongs to the attention core, of s² scores a head: selective recomputation drops it.
    """

    part: str
    name: str
    elements: int
    width: int
    whole: bool = False
    core: bool = False

    @property
    def nbytes(self) -> int:
        """elements · width."""
        return self.elements * self.width


def kept_tensors(
    config: ModelConfig,
    b: int,
    s: int,
    layout: Layout | None = None,
    *,
    core: str | None = None,
    width: int = 2,
) -> list[Kept]:
    """What one layer keeps on one rank without recomputation, in the order of forward. In 16 bits for a GPT with
    F = 4h and dropout sbh(34 + 5as/h) bytes on one rank, sbh(10 + 24/t + 5as/(ht)) on t, and sbh(34 + 5as/h)/t with
    sequence parallelism (K22, table 2). For a Llama without the scores sbh(12 + 4k/a) + 6sbF.

    Args:
        b, s: sequences in a microbatch and tokens of each, whole.
        layout: None is one rank.
        core: "explicit" keeps the s² scores, "sdpa" runs the core as one operation that does not. None is what the
            layers of `tpcode` do: "explicit" where there is dropout, else "sdpa".
        width: bytes of an activation.

    Raises:
        ValueError: heads or sequence do not split over t ranks; no such core; a layout with cp above 1.
    """
    layout = layout or Layout(tp=1)
    core = _known_core(config, core)
    n, n_own, a, k = _sizes(config, b, s, layout)  # tokens; those of the norms; heads
    h, d, F = config.hidden, config.head_dim, padded(config.ffn, layout.tp, "FFN width F") // layout.tp
    scores, masks = b * a * s * s, config.dropout > 0
    if core == "explicit":
        k = a  # each KV head is copied for the query heads that read it

    def on_all(part: str, name: str, width: int = width) -> Kept:
        return Kept(part, name, n_own * h, width, whole=True)

    def cut(part: str, name: str, elements: int, width: int = width, core: bool = False) -> Kept:
        return Kept(part, name, elements, width, core=core)

    kept = [
        on_all("norms", "input of the first norm"),
        on_all("attention", "input of Q, K and V"),
        cut("attention", "Q", n * a * d),
        cut("attention", "K", n * k * d),
        cut("attention", "V", n * k * d),
    ]
    if core == "explicit":
        kept.append(cut("attention", "softmax's output", scores, core=True))
        if masks:
            kept.append(cut("attention", "dropout's mask of the scores", scores, width=1, core=True))
            kept.append(cut("attention", "what dropout left of them", scores, core=True))
    kept.append(cut("attention", "input of the output projection", n * a * d))
    of_the_stream = masks and config.family == "gpt2"  # Llama drops scores alone
    if of_the_stream:
        kept.append(on_all("attention", "dropout's mask", width=1))
    kept += [on_all("norms", "input of the second norm"), on_all("ffn", "input of the first product")]
    if config.gated:
        kept += [cut("ffn", "gate", n * F), cut("ffn", "up", n * F)]
    else:
        kept.append(cut("ffn", "GeLU's input", n * F))
    kept.append(cut("ffn", "input of the last product", n * F))
    if of_the_stream:
        kept.append(on_all("ffn", "dropout's mask", width=1))
    return kept


def layer_bytes(
    config: ModelConfig,
    b: int,
    s: int,
    layout: Layout | None = None,
    *,
    recompute: str = "none",
    core: str | None = None,
    width: int = 2,
) -> int:
    """What one layer keeps on one rank: `kept_tensors`, and of these

    - all with recompute "none",
    - all but the attention core's with "selective": the core's forward runs again in backward,
    - the layer's input alone with "full": the whole forward runs again. 2sbh in 16 bits, on each rank, and 2sbh/t with
      sequence parallelism (K22's table 2 has the first).

    Raises:
        ValueError: as `kept_tensors`; recompute is none of the three.
    """
    kept = kept_tensors(config, b, s, layout, core=core, width=width)
    if require_recompute(recompute) == "full":
        return kept[0].nbytes
    return sum(tensor.nbytes for tensor in kept if recompute == "none" or not tensor.core)


def rebuilt_bytes(
    config: ModelConfig,
    b: int,
    s: int,
    layout: Layout | None = None,
    *,
    recompute: str = "none",
    core: str | None = None,
    width: int = 2,
) -> int:
    """What is there for a moment besides, while one layer's forward runs again: the tensors that it had dropped. K22's
    formulas leave it out."""
    options = {"core": core, "width": width}
    kept = layer_bytes(config, b, s, layout, **options, recompute=recompute)
    return layer_bytes(config, b, s, layout, **options) - kept


def pytorch_extras(
    config: ModelConfig,
    b: int,
    s: int,
    layout: Layout | None = None,
    *,
    core: str | None = None,
    width: int = 2,
    fused: bool = True,
) -> dict[str, int]:
    """What a layer of `tpcode` keeps on the CPU beyond `kept_tensors`, by reason, in bytes (torch 2.13).

    LayerNorm keeps statistics, RMSNorm works in fp32 and keeps its input and its normed input so. silu(gate) · up is
    two operations, and keeps one product more. Masking scores keeps the mask. With a single head on a rank K needs no
    copy, and as a view it keeps all of Q, K and V, of which Q and V are kept as copies too. SDPA keeps a logarithm for
    each row of scores; in a Llama also its output by heads, which is then copied by tokens. Rotary positions keep their
    table, once for all layers, and make Q and K anew; where V is a view of the product that these came from, it keeps
    that product.

    Args:
        fused: Q, K and V come from one product, as in `ParallelAttention`; `tpcode.dense.Attention` has three.
    """
    layout = layout or Layout(tp=1)
    core = _known_core(config, core)
    n, n_own, a, k = _sizes(config, b, s, layout)
    h, d, F = config.hidden, config.head_dim, padded(config.ffn, layout.tp, "FFN width F") // layout.tp
    if config.family == "gpt2":
        extras = {"LayerNorm's mean and 1/deviation": 2 * 2 * n_own * width}
    else:
        extras = {
            "RMSNorm's work in fp32": 2 * ((4 + 4 - width) * n_own * h + 4 * n_own),
            "silu(gate)": width * n * F,
            "rotary table": 2 * width * s * (d // 2),
        }
    if core == "explicit":
        extras["causal mask"] = s * s
        if config.family == "gpt2" and a == 1:
            extras["Q and V beside K, which is a view of their product"] = 2 * width * n * d
    else:
        extras["a logarithm for each row of scores"] = 4 * b * a * s
        if config.family == "llama":  # turned queries lie by heads, and so does what comes of them
            extras["the core's output by heads"] = width * n * a * d
            extras["Q and K before they are turned"] = width * n * (a + k) * d if fused else 0
    return extras


# ---- activations of a stage -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """What one rank of the first stage keeps when it holds most, in bytes.

    Attributes:
        layers: its layers', for every microbatch in flight.
        ends: masks of the embedding's dropout; and with one stage, the last norm's input, the head's, and the logits in
            fp32.
    """

    layers: int
    ends: int

    @property
    def total(self) -> int:
        """Both."""
        return self.layers + self.ends


def interleaving_factor(p: int, m: int = 1) -> Fraction:
    """1 + (p - 1)/(pm): by how much the first of p stages keeps more when each has m chunks of layers (K22, section
    4.2.3). Without interleaving, m = 1, it is 1: p microbatches in flight, each with L/p layers."""
    p, m = require_int(p, "stages p"), require_int(m, "chunks m")
    return Fraction(1) if m == 1 else 1 + Fraction(p - 1, p * m)


def activation_bytes(
    config: ModelConfig,
    b: int,
    s: int,
    layout: Layout | None = None,
    *,
    recompute: str = "none",
    core: str | None = None,
    width: int = 2,
    m: int = 1,
) -> Activations:
    """Activations of one rank of the first stage, which keeps most: whatever p is, L layers' worth, times
    `interleaving_factor`; at least p microbatches are taken to be on their way (K22, equations 5 and 6, section 4.3).

    Args:
        m: chunks of layers on each stage; above 1 the pipeline is interleaved.

    Raises:
        ValueError: as `kept_tensors`; p·m does not divide L.
    """
    layout = layout or Layout(tp=1)
    options = {"core": core, "width": width}
    layers = config.layers * interleaving_factor(layout.pp, m)
    if config.layers % (layout.pp * m):
        raise ValueError(f"layers = {config.layers} do not split over p·m = {layout.pp} stages · {m} chunks")
    each = layer_bytes(config, b, s, layout, **options, recompute=recompute)
    return Activations(_rounded_up(layers * each), _ends(config, b, s, layout, width))


def _ends(config: ModelConfig, b: int, s: int, layout: Layout, width: int) -> int:
    n, n_own, _, _ = _sizes(config, b, s, layout)
    stream = n_own * config.hidden
    embedding = layout.pp * stream if config.dropout and config.family == "gpt2" else 0
    if layout.pp > 1:
        return embedding
    logits = 4 * n * (padded(config.vocab, layout.tp, "vocabulary V") // layout.tp)
    return embedding + 2 * width * stream + logits


# ---- what fits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A way to train, and what it takes on each card, in bytes.

    Attributes:
        extra_flops: FLOPs run again, as a share of those that a step needs.
        state, activations: of the fullest rank.
        rebuilt: the one layer whose forward runs again.
    """

    layout: Layout
    recompute: str
    extra_flops: float
    state: State
    activations: Activations
    rebuilt: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state.total + self.activations.total + self.rebuilt


def plan(
    config: ModelConfig,
    b: int,
    s: int,
    layout: Layout | None = None,
    *,
    recompute: str = "none",
    core: str | None = None,
    recipe: str = "mixed",
    width: int = 2,
    distributed_optimizer: bool = False,
) -> Plan:
    """What training takes on each card of this layout: arguments as `state_bytes` and `activation_bytes` have them."""
    layout = layout or Layout(tp=1)
    options = {"core": core, "width": width, "recompute": recompute}
    return Plan(
        layout,
        recompute,
        extra_flops(config, s, recompute, core=core),
        state_bytes(config, layout, recipe, distributed_optimizer=distributed_optimizer),
        activation_bytes(config, b, s, layout, **options),
        rebuilt_bytes(config, b, s, layout, **options),
    )


def fits(
    config: ModelConfig,
    card_bytes: int,
    b: int,
    s: int,
    *,
    tp_sizes: Iterable[int] = (1, 2, 4, 8),
    sequence_parallel: bool = False,
    **options,
) -> list[Plan]:
    """Which t, with which recomputation, fits this model on cards of this size: every plan that does, the cheapest
    first. Cheaper is what runs fewer FLOPs again; among equals, what takes fewer cards. Nothing fits: an empty list.

    A card also holds what no formula here counts: the library's own memory, buffers of collectives, pieces too small
    to use. Keep a tenth free: fits(config, 0.9 * card_bytes, ...).

    Args:
        card_bytes: memory of one card. 80 GB are 80 · 10⁹.
        tp_sizes: the t to try; those over which heads or (with sequence parallelism) sequence do not split are left
            out.
        sequence_parallel: of every plan.
        options: as `plan` takes them.

    Raises:
        ValueError: none of `tp_sizes` splits the model; a size makes no sense.
    """
    tp_sizes, refusals, found = list(tp_sizes), [], []
    for t in tp_sizes:
        layout = Layout(tp=t, sequence_parallel=sequence_parallel)
        try:
            _sizes(config, b, s, layout)
        except ValueError as refusal:
            refusals.append(str(refusal))
            continue
        found += [plan(config, b, s, layout, recompute=recompute, **options) for recompute in RECOMPUTE]
    if not found:
        raise ValueError(f"none of the sizes t = {tp_sizes} splits the model: {'; '.join(refusals) or 'none given'}")
    fitting = [one for one in found if one.total <= card_bytes]
    return sorted(fitting, key=lambda one: (one.extra_flops, one.layout.tp))


def extra_flops(config: ModelConfig, s: int, recompute: str, core: str | None = None) -> float:
    """FLOPs that recomputation runs again, as a share of those that a step needs. Selective recomputation of a core
    that keeps no scores has nothing to run again: that core does so by itself, every time."""
    if recompute == "selective" and _known_core(config, core) == "sdpa":
        recompute = "none"
    return hardware_flops(config, 1, s, recompute) / model_flops(config, 1, s) - 1


# ---- shared ---------------------------------------------------------------------------------------------------------


def _sizes(config: ModelConfig, b: int, s: int, layout: Layout) -> tuple[int, int, int, int]:
    """On one rank: tokens of a microbatch; those that norms and dropout see; query heads; KV heads."""
    if layout.cp > 1:
        raise ValueError(f"cp = {layout.cp}: what context parallelism keeps is not counted here; use cp = 1")
    b, s, t = require_int(b, "b"), require_int(s, "s"), layout.tp
    own = divide(s, t, "sequence s") if layout.sequence_parallel else s
    groups = head_groups(config.heads, config.kv_heads, t)
    return b * s, b * own, groups.heads_per_rank, groups.kv_heads_per_rank


def _known_core(config: ModelConfig, core: str | None) -> str:
    if core is None:
        return "explicit" if config.dropout else "sdpa"
    if core not in ("explicit", "sdpa"):
        raise ValueError(f"core must be 'explicit', 'sdpa' or None and is {core!r}")
    return core


def _rounded_up(number: Fraction | int) -> int:
    return -int(-number // 1)
