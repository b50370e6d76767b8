"""Collectives that return their result and leave their input alone, along any dimension.

Each is called by every rank of `group` (None: all ranks), with tensors of the same shape and dtype. With one rank, or
without `torch.distributed` initialised, there is nobody to talk to: the input comes back as it is. Each call is noted
in the ledger. No gradient flows through a collective, and a tensor that would lose one is refused: what a backward must
do depends on who uses the result, and that is what `conjugates` is for.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpcode.comm.ledger import note
from tpcode.shapes import divide, require_int

REDUCE_OPS = {"sum": "SUM", "avg": "AVG", "max": "MAX", "min": "MIN"}


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Until the result is there (on CUDA: until the current stream may use it)."""


class _Done:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> None:
        return None


class _Gathered:
    """The handle of an all-gather: what came, rank after rank, still has to go where it belongs."""

    def __init__(self, work: Handle | None, stacked: Tensor, slices: Tensor):
        self.work, self.stacked, self.slices = work, stacked, slices

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.stacked is not self.slices:
            self.slices.copy_(self.stacked)


def group_size(group: ProcessGroup | None = None) -> int:
    """t, the number of ranks in the group.

    Raises:
        ValueError: this rank is not in the group.
        TypeError: group is no process group.
    """
    return dist.get_world_size(group) if _initialised(group) else 1


def group_rank(group: ProcessGroup | None = None) -> int:
    """This rank's number within the group, from 0 to t - 1. Raises as `group_size` does."""
    return dist.get_rank(group) if _initialised(group) else 0


def all_reduce(x: Tensor, op: str = "sum", group: ProcessGroup | None = None) -> Tensor:
    """The elementwise sum ("avg", "max", "min") of every rank's x, on every rank: [...] -> [...].

    Raises:
        ValueError: unknown op; x requires a gradient; this rank is not in the group.
        TypeError: x is no tensor; the average of integers.
    """
    out, _ = _all_reduce(x, op, group, async_op=False)
    return out


def all_reduce_async(x: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, Handle]:
    """The sum of every rank's x, under way: the result may be read after `handle.wait()`. Raises as `all_reduce`."""
    return _all_reduce(x, "sum", group, async_op=True)


def all_gather(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Every rank's x side by side along `dim`, in rank order, on every rank: [..., n, ...] -> [..., t·n, ...].

    Raises:
        ValueError: x has no such dimension, or requires a gradient; this rank is not in the group.
        TypeError: x is no tensor.
    """
    out, gathered = _all_gather(x, dim, group, async_op=False)
    gathered.wait()
    return out


def all_gather_async(x: Tensor, dim: int, group: ProcessGroup | None = None) -> tuple[Tensor, Handle]:
    """The same, under way: the result may be read after `handle.wait()`. Raises as `all_gather`."""
    return _all_gather(x, dim, group, async_op=True)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's slice along `dim` of the sum of every rank's x: [..., n, ...] -> [..., n/t, ...].

    Raises:
        ValueError: t does not divide n; x has no such dimension, or requires a gradient; this rank is not in the group.
        TypeError: x is no tensor.
    """
    out, _ = _reduce_scatter(x, dim, group, async_op=False)
    return out


def reduce_scatter_async(x: Tensor, dim: int, group: ProcessGroup | None = None) -> tuple[Tensor, Handle]:
    """The same, under way: the result may be read after `handle.wait()`. Raises as `reduce_scatter`."""
    return _reduce_scatter(x, dim, group, async_op=True)


def broadcast(x: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """What rank `src` holds, on every rank; the other ranks' x gives the shape and the dtype.

    `src` counts within the group, as `group_rank` does: in a group of the ranks 2 and 3, rank 3 is src=1.

    Raises:
        ValueError: the group has no rank src; x requires a gradient; this rank is not in the group.
        TypeError: x is no tensor.
    """
    require_tensor(x, "broadcast")
    _require_no_gradient(x, "broadcast")
    t = group_size(group)
    if require_int(src, "broadcast: src", minimum=0) >= t:
        raise ValueError(f"broadcast: src = {src} counts within the group, whose ranks are 0 to {t - 1}")
    if t == 1:
        return x
    _note("broadcast", x, x.shape, group)
    out = _copy(x)
    dist.broadcast(out, group_src=src, group=group)
    return out


def _all_reduce(x: Tensor, op: str, group: ProcessGroup | None, async_op: bool) -> tuple[Tensor, Handle]:
    require_tensor(x, "all_reduce")
    _require_no_gradient(x, "all_reduce", "copy_to_tp or reduce_from_tp")
    if op not in REDUCE_OPS:
        raise ValueError(f"all_reduce: op must be one of {', '.join(REDUCE_OPS)} and is {op!r}")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"all_reduce: the average of {x.dtype} is no {x.dtype}; convert x to floating point, or sum")
    if group_size(group) == 1:
        return x, _Done()
    _note("all_reduce", x, x.shape, group, op)
    out = _copy(x)
    work = dist.all_reduce(out, getattr(dist.ReduceOp, REDUCE_OPS[op]), group=group, async_op=async_op)
    return out, work


def _all_gather(x: Tensor, dim: int, group: ProcessGroup | None, async_op: bool) -> tuple[Tensor, Handle]:
    dim, t = require_dim(x, dim, "all_gather"), group_size(group)
    _require_no_gradient(x, "all_gather", "gather_from_tp or gather_sequence")
    if t == 1:
        return x, _Done()
    shape = list(x.shape)
    shape[dim] *= t
    _note("all_gather", x, shape, group)
    out = x.new_empty(shape)
    slices = out.unflatten(dim, (t, x.shape[dim])).movedim(dim, 0)  # [..., t·n, ...] -> [t, ..., n, ...]
    stacked = slices if slices.is_contiguous() else x.new_empty(slices.shape)  # a backend writes rank after rank
    work = dist.all_gather_single(stacked.flatten(0, 1), _contiguous(x), group=group, async_op=async_op)
    return out, _Gathered(work, stacked, slices)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup | None, async_op: bool) -> tuple[Tensor, Handle]:
    dim, t = require_dim(x, dim, "reduce_scatter"), group_size(group)
    _require_no_gradient(x, "reduce_scatter", "reduce_scatter_sequence")
    share = divide(x.shape[dim], t, f"reduce_scatter: dimension {dim} of the shape {list(x.shape)}")
    if t == 1:
        return x, _Done()
    _note("reduce_scatter", x, x.shape, group)
    slices = _contiguous(x.unflatten(dim, (t, share)).movedim(dim, 0))  # [..., n, ...] -> [t, ..., n/t, ...]
    out = slices.new_empty(slices.shape[1:])
    work = dist.reduce_scatter_single(out, slices.flatten(0, 1), group=group, async_op=async_op)
    return out, work


def _initialised(group: ProcessGroup | None) -> bool:
    """Whether there are ranks to talk to; refuses a group that this rank cannot use."""
    outsider = group is not None and group == dist.GroupMember.NON_GROUP_MEMBER
    if not (group is None or outsider or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group must be a process group, or None for all ranks, and is {group!r}")
    if not dist.is_available() or (group is None and not dist.is_initialized()):
        return False
    if outsider or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this group, and only its members may use it")
    return True


def _note(op: str, x: Tensor, shape, group: ProcessGroup | None, reduce_op: str = "sum") -> None:
    note(op, x.dtype, shape, dist.get_process_group_ranks(group), reduce_op)


def require_tensor(x: Tensor, what: str) -> None:
    """Refuse what is no tensor with a TypeError."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: x must be a tensor and is {type(x).__name__}")


def _require_no_gradient(x: Tensor, what: str, instead: str = "") -> None:
    """Refuse a tensor whose gradient the collective would lose without a word."""
    if x.requires_grad and torch.is_grad_enabled():
        ways = f"use {instead} of tpcode.comm, or pass x.detach()" if instead else "pass x.detach()"
        raise ValueError(f"{what}: no gradient flows through it, and x requires one; {ways}")


def require_dim(x: Tensor, dim: int, what: str) -> int:
    """dim counted from 0; a ValueError where x has no such dimension."""
    require_tensor(x, what)
    if not -x.dim() <= require_int(dim, f"{what}: dim", minimum=None) < x.dim():
        raise ValueError(f"{what}: dimension {dim} of the shape {list(x.shape)} does not exist")
    return dim % x.dim()


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _copy(x: Tensor) -> Tensor:
    """A contiguous tensor of its own, whatever strides x has (an expanded gradient has zeros)."""
    return x.detach().clone(memory_format=torch.contiguous_format)
