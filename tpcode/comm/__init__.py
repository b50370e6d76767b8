"""Floor 2: what ranks say to each other, what autograd makes of it, and the ledger that notes it."""

from tpcode.comm.collectives import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    broadcast,
    group_rank,
    group_size,
    reduce_scatter,
    reduce_scatter_async,
)
from tpcode.comm.conjugates import (
    SEQUENCE,
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_sequence,
    scatter_to_tp,
)
from tpcode.comm.ledger import Event, Ledger, record

__all__ = [
    "SEQUENCE",
    "Event",
    "Ledger",
    "all_gather",
    "all_gather_async",
    "all_reduce",
    "all_reduce_async",
    "broadcast",
    "copy_to_tp",
    "gather_from_tp",
    "gather_sequence",
    "group_rank",
    "group_size",
    "record",
    "reduce_from_tp",
    "reduce_scatter",
    "reduce_scatter_async",
    "reduce_scatter_sequence",
    "scatter_sequence",
    "scatter_to_tp",
]
