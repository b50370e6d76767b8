"""Pairs of a forward and a backward: what autograd must do where ranks meet.

What every rank uses has a gradient of which every rank holds a part; what is summed hands its gradient to every part.
So each collective has a conjugate, and the two stand in one `autograd.Function`. Three tiers: the plain calls of
`collectives`, the pair below, and a function of one line that states both directions.

Each takes `group` (None: all ranks) and does nothing with one rank. f and g are the operators of Shoeybi et al. 2019
(section 3); the pairs along the sequence are those of Korthikanti et al. 2022 (section 4.2), which names them anew.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tpcode.comm.collectives import (
    all_gather,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter,
    require_dim,
    require_tensor,
)
from tpcode.shapes import shard_range

SEQUENCE = 1  # the dimension of [b, s, h]


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return all_reduce(dy, group=ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group=group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return dy, None


class _Gather(Function):
    """All-gather along dim. Its backward depends on who reads the result: see `gather_sequence`."""

    @staticmethod
    def forward(ctx, x, dim, replicated_consumer, group):
        ctx.dim, ctx.replicated_consumer, ctx.group = dim, replicated_consumer, group
        return all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = _own_slice if ctx.replicated_consumer else reduce_scatter
        return dx(dy, ctx.dim, ctx.group), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _own_slice(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return all_gather(dy, ctx.dim, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return all_gather(dy, ctx.dim, ctx.group), None, None


def copy_to_tp(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Copy (f). Forward: identity, x being the same on every rank. Backward: all-reduce of the parts of dx."""
    require_tensor(x, "copy_to_tp")
    return x if group_size(group) == 1 else _Copy.apply(x, group)


def reduce_from_tp(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Reduce (g). Forward: all-reduce of the parts. Backward: identity, dy being the same on every rank."""
    require_tensor(x, "reduce_from_tp")
    return x if group_size(group) == 1 else _Reduce.apply(x, group)


def gather_from_tp(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: all-gather along the last dimension. Backward: this rank's slice of dy, dy being the same on every
    rank (as it is when every rank computes the same loss: summing would count that loss t times)."""
    require_dim(x, -1, "gather_from_tp")
    return x if group_size(group) == 1 else _Gather.apply(x, -1, True, group)


def scatter_to_tp(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: this rank's slice along the last dimension, x being the same on every rank. Backward: all-gather."""
    require_dim(x, -1, "scatter_to_tp")
    return x if group_size(group) == 1 else _Scatter.apply(x, -1, group)


def gather_sequence(x: Tensor, group: ProcessGroup | None = None, *, replicated_consumer: bool = False) -> Tensor:
    """Forward: all-gather along the sequence, [b, s/t, h] -> [b, s, h].

    Backward: reduce-scatter, if the ranks do different things with the result (a column-parallel layer): each then
    holds a part of every position's gradient. With `replicated_consumer`, if every rank does the same with it (a
    router, a loss on every rank): this rank's slice, since each rank holds all of every position's gradient.
    """
    _require_sequence(x, "gather_sequence")
    return x if group_size(group) == 1 else _Gather.apply(x, SEQUENCE, replicated_consumer, group)


def reduce_scatter_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: reduce-scatter of the parts along the sequence, [b, s, h] -> [b, s/t, h]. Backward: all-gather."""
    _require_sequence(x, "reduce_scatter_sequence")
    return x if group_size(group) == 1 else _ReduceScatter.apply(x, SEQUENCE, group)


def scatter_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: this rank's slice along the sequence, [b, s, h] -> [b, s/t, h], x being the same on every rank.
    Backward: all-gather."""
    _require_sequence(x, "scatter_sequence")
    return x if group_size(group) == 1 else _Scatter.apply(x, SEQUENCE, group)


def _own_slice(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """This rank's part along dim, as a tensor of its own: a view would keep the whole in memory."""
    what = f"dimension {dim % x.dim()} of the shape {list(x.shape)}"
    own = shard_range(x.shape[dim], group_rank(group), group_size(group), what)
    return x.narrow(dim, own.start, own.stop - own.start).clone()


def _require_sequence(x: Tensor, what: str) -> None:
    require_tensor(x, what)
    if x.dim() < 2:
        raise ValueError(f"{what}: the sequence is dimension 1 of [b, s, ...], and the shape is {list(x.shape)}")
