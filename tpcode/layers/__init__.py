"""Floor 3: layers that are split over ranks, and how each of their parameters lies."""

from tpcode.dense import KVCache, set_dropout_step
from tpcode.layers.attention import ParallelAttention
from tpcode.layers.chunked import ChunkedFFN
from tpcode.layers.dropout import Dropout
from tpcode.layers.ffn import ParallelFFN, ParallelSwiGLU
from tpcode.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpcode.layers.norm import AllHeadsNorm, HeadNorm, LayerNorm, RMSNorm
from tpcode.layers.placement import Placement, placements
from tpcode.layers.vocab import (
    TiedHead,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabPlacement,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "AllHeadsNorm",
    "ChunkedFFN",
    "ColumnParallelLinear",
    "Dropout",
    "HeadNorm",
    "KVCache",
    "LayerNorm",
    "ParallelAttention",
    "ParallelFFN",
    "ParallelSwiGLU",
    "Placement",
    "RMSNorm",
    "RowParallelLinear",
    "TiedHead",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabPlacement",
    "placements",
    "set_dropout_step",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
]
