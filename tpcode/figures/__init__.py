"""Pictures. Each is a function that returns a `Picture`, which a notebook shows and a test can read."""

from tpcode.figures.collectives import before_after, ring
from tpcode.figures.curves import loss_curves
from tpcode.figures.grids import pipeline_lanes, rank_grid
from tpcode.figures.heads import heads_to_ranks
from tpcode.figures.lanes import ffn_placements, ranks_as_lanes
from tpcode.figures.matrices import cut, product
from tpcode.figures.regions import observe_layer, regions
from tpcode.figures.splits import three_splits
from tpcode.figures.stacked import stacked_bars
from tpcode.figures.state import state_bars
from tpcode.figures.style import Picture
from tpcode.figures.timeline import timelines

__all__ = [
    "Picture",
    "before_after",
    "cut",
    "ffn_placements",
    "heads_to_ranks",
    "loss_curves",
    "observe_layer",
    "pipeline_lanes",
    "product",
    "rank_grid",
    "ranks_as_lanes",
    "regions",
    "ring",
    "stacked_bars",
    "state_bars",
    "three_splits",
    "timelines",
]
