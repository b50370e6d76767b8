"""Floor 3: layers that are split over ranks, and how each of their parameters lies."""

from tpcode.layers.ffn import ParallelFFN, ParallelSwiGLU
from tpcode.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpcode.layers.placement import Placement, placements

__all__ = [
    "ColumnParallelLinear",
    "ParallelFFN",
    "ParallelSwiGLU",
    "Placement",
    "RowParallelLinear",
    "placements",
]
