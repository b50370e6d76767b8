"""What several ranks hold alike and each uses for heads of its own: its gradient is summed over these ranks alone."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tpcode.comm import all_reduce


class _CopyRows(Function):
    """Copy (f) on the rows from `first` on: identity forward, all-reduce of their gradient backward."""

    @staticmethod
    def forward(ctx, weight, first, group):
        ctx.first, ctx.group = first, group
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight):
        own, shared = dweight[: ctx.first], dweight[ctx.first :]
        return torch.cat([own, all_reduce(shared, group=ctx.group)]), None, None


def copy_to_replicas(weight: Tensor, replicas: int, group: ProcessGroup | None = None, first: int = 0) -> Tensor:
    """Copy (f) over the ranks that hold the same share. Forward: identity. Backward: all-reduce of the parts of the
    gradient, over `replicas` neighbours of `group`, of the rows from `first` on: those before are this rank's alone."""
    return weight if replicas == 1 else _CopyRows.apply(weight, first, replica_group(replicas, group))


_made: WeakKeyDictionary = WeakKeyDictionary()  # tensor-parallel group -> {replicas: this rank's group of them}


def replica_group(replicas: int, group: ProcessGroup | None = None) -> ProcessGroup:
    """The neighbours of `group`, so many together, of whom this rank is one: 0 and 1, 2 and 3, … for two.

    They are made the first time that they are asked for. Making a group takes every rank of the world, members or not,
    and one order on all: so each rank makes those of all tensor-parallel groups, and all ranks call this together.
    """
    group = group or dist.group.WORLD
    known = _made.setdefault(group, {})
    if not _exists(known.get(replicas)):
        known[replicas] = _make_groups(_all_groups(group), replicas)
    return known[replicas]


def _make_groups(tp_groups: list[tuple[int, ...]], size: int) -> ProcessGroup:
    """The neighbours in each of these groups as groups; returns the one that this rank is in."""
    own = None
    for ranks in tp_groups:
        for first in range(0, len(ranks), size):
            members = ranks[first : first + size]
            made = dist.new_group(list(members))
            own = made if dist.get_rank() in members else own
    return own


def _all_groups(group: ProcessGroup) -> list[tuple[int, ...]]:
    """The ranks of this tensor-parallel group and of all others, in one order on every rank of the world."""
    own = tuple(dist.get_process_group_ranks(group))
    if len(own) == dist.get_world_size():
        return [own]
    everyones = [own] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return sorted(set(everyones))


def _exists(group: ProcessGroup | None) -> bool:
    """Whether a group was made, and has not been destroyed since."""
    if group is None:
        return False
    try:
        return dist.get_process_group_ranks(group) is not None
    except (KeyError, ValueError):
        return False
