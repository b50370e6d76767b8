"""Sizes of a model and of a layout of ranks, checked when they are made.

Symbols: h hidden, F FFN width, a query heads, k KV heads, d head size, L layers, V vocabulary, s sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpcode.shapes import require_int

FAMILIES = ("gpt2", "llama")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder.

    Families: "gpt2" has learned positions, LayerNorm, biases everywhere and an FFN of two matrices (GeLU); "llama" has
    rotary positions, RMSNorm, no bias and an FFN of three (SwiGLU).

    Args:
        family: "gpt2" or "llama".
        hidden: h, the width of the residual stream.
        ffn: F, the FFN's width.
        heads: a, query heads.
        kv_heads: k, KV heads; None is one per query head. k divides a.
        head_dim: d; None is h / a, which must then be whole.
        layers: L.
        vocab: V, without padding.
        max_seq: the longest sequence.
        dropout: probability of dropping, from 0 up to but not including 1.
        tied: whether the embedding is also the output head.
        norm_eps: what the norms add to the variance.
        rope_theta: base of the rotary positions ("llama" only).

    Raises:
        ValueError, TypeError: a size makes no sense; the message has the numbers.
    """

    family: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: int
    vocab: int
    max_seq: int
    dropout: float = 0.0
    tied: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)} and is {self.family!r}")
        for size in ("hidden", "ffn", "heads", "layers", "vocab", "max_seq"):
            self._set(size, require_int(getattr(self, size), size))
        self._set("kv_heads", self._checked_kv_heads())
        self._set("head_dim", self._checked_head_dim())
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, and is {self.dropout}")
        if not isinstance(self.tied, bool):
            raise TypeError(f"tied must be True or False and is {self.tied!r}")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ValueError(f"norm_eps = {self.norm_eps} and rope_theta = {self.rope_theta} must be positive")

    def _set(self, name: str, value) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen, except to its own __post_init__

    def _checked_kv_heads(self) -> int:
        kv_heads = self.heads if self.kv_heads is None else require_int(self.kv_heads, "kv_heads")
        if self.heads % kv_heads:
            raise ValueError(f"kv_heads = {kv_heads} must divide heads = {self.heads}")
        return kv_heads

    def _checked_head_dim(self) -> int:
        if self.head_dim is not None:
            head_dim = require_int(self.head_dim, "head_dim")
        elif self.hidden % self.heads == 0:
            head_dim = self.hidden // self.heads
        else:
            raise ValueError(f"heads = {self.heads} must divide hidden = {self.hidden}, unless head_dim is given")
        if self.family == "llama" and head_dim % 2:
            raise ValueError(f"head_dim = {head_dim} must be even: rotary positions turn pairs")
        return head_dim

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A model of the literature by name, see `PRESETS`.

        Raises:
            ValueError: no such name; the message lists them.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return PRESETS[name]

    @property
    def gated(self) -> bool:
        """Whether the FFN has three matrices (gate, up, down) instead of two."""
        return self.family == "llama"

    @property
    def bias(self) -> bool:
        """Whether linear layers and norms have a bias."""
        return self.family == "gpt2"

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block: query, key, value and output, without its norm."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden * q + 2 * self.hidden * kv
        return weights + (q + 2 * kv + self.hidden if self.bias else 0)

    @property
    def ffn_parameters(self) -> int:
        """Parameters of one FFN, without its norm."""
        weights = (3 if self.gated else 2) * self.hidden * self.ffn
        return weights + (self.ffn + self.hidden if self.bias else 0)

    @property
    def num_parameters(self) -> int:
        """Every parameter of the model, counted once where it is shared, without padding."""
        norm = (2 if self.bias else 1) * self.hidden
        layer = self.attention_parameters + self.ffn_parameters + 2 * norm
        vocabulary = (1 if self.tied else 2) * self.vocab * self.hidden
        positions = self.max_seq * self.hidden if self.family == "gpt2" else 0
        return vocabulary + positions + self.layers * layer + norm


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks along each axis, and whether norms and dropout are split along the sequence.

    Raises:
        ValueError, TypeError: a size is no positive integer, sequence_parallel no bool.
    """

    tp: int
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self):
        for axis in ("tp", "pp", "dp", "cp"):
            object.__setattr__(self, axis, require_int(getattr(self, axis), axis))
        if not isinstance(self.sequence_parallel, bool):
            raise TypeError(f"sequence_parallel must be True or False and is {self.sequence_parallel!r}")

    @property
    def world_size(self) -> int:
        """Ranks in all: tp · pp · dp · cp."""
        return self.tp * self.pp * self.dp * self.cp


def _gpt(hidden: int, heads: int, layers: int, vocab: int = 51_200, max_seq: int = 2048) -> ModelConfig:
    """A model of the GPT-2 family with F = 4h."""
    return ModelConfig(
        family="gpt2", hidden=hidden, ffn=4 * hidden, heads=heads, layers=layers, vocab=vocab, max_seq=max_seq
    )


def _llama3(hidden: int, ffn: int, heads: int, layers: int, max_seq: int = 8192) -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=8,
        layers=layers,
        vocab=128_256,
        max_seq=max_seq,
        tied=False,
        rope_theta=500_000.0,
    )


PRESETS: dict[str, ModelConfig] = {
    # Radford et al. 2019, as released
    "gpt2": _gpt(768, 12, 12, vocab=50_257, max_seq=1024),
    "gpt2-medium": _gpt(1024, 16, 24, vocab=50_257, max_seq=1024),
    "gpt2-large": _gpt(1280, 20, 36, vocab=50_257, max_seq=1024),
    "gpt2-xl": _gpt(1600, 25, 48, vocab=50_257, max_seq=1024),
    # Brown et al. 2020, table 2.1
    "gpt3-175b": _gpt(12_288, 96, 96, vocab=50_257),
    # Grattafiori et al. 2024 (Llama 3), table 3; 405B is its version 3.1 without the scaling of rotary frequencies
    "llama-3-8b": _llama3(4096, 14_336, 32, 32),
    "llama-3-70b": _llama3(8192, 28_672, 64, 80),
    "llama-3-405b": _llama3(16_384, 53_248, 128, 126, max_seq=131_072),
    # Allal et al. 2025
    "smollm2-135m": ModelConfig(
        family="llama",
        hidden=576,
        ffn=1536,
        heads=9,
        kv_heads=3,
        layers=30,
        vocab=49_152,
        max_seq=8192,
        rope_theta=100_000.0,
    ),
    # Shoeybi et al. 2019, table 1 (V padded to 51,200)
    "m19-1.2b": _gpt(1536, 16, 40, max_seq=1024),
    "m19-2.5b": _gpt(1920, 20, 54, max_seq=1024),
    "m19-4.2b": _gpt(2304, 24, 64, max_seq=1024),
    "m19-8.3b": _gpt(3072, 32, 72, max_seq=1024),
    # Narayanan et al. 2021, table 1
    "n21-1.7b": _gpt(2304, 24, 24),
    "n21-3.6b": _gpt(3072, 32, 30),
    "n21-7.5b": _gpt(4096, 32, 36),
    "n21-18.4b": _gpt(6144, 48, 40),
    "n21-39.1b": _gpt(8192, 64, 48),
    "n21-76.1b": _gpt(10_240, 80, 60),
    "n21-145.6b": _gpt(12_288, 96, 80),
    "n21-310.1b": _gpt(16_384, 128, 96),
    "n21-529.6b": _gpt(20_480, 128, 105),
    "n21-1t": _gpt(25_600, 160, 128),
    # Korthikanti et al. 2022, table 3
    "k22-22b": _gpt(6144, 64, 48),
    "k22-175b": _gpt(12_288, 96, 96),
    "k22-530b": _gpt(20_480, 128, 105),
    "k22-1t": _gpt(25_600, 160, 128),
}
