"""Dropout that is the dense model's at every t: the mask of the whole tensor, and of it this rank's slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpcode import dense
from tpcode.comm import group_rank, group_size
from tpcode.shapes import require_int


class Dropout(dense.Dropout):
    """`tpcode.dense.Dropout` for a tensor that is whole on every rank, or of which each rank holds a slice.

    Every rank draws the mask of the whole tensor from (seed, place, step). Where the tensor is replicated all ranks so
    drop the same entries, as they must: the residual stream is the same on all of them. Where it is cut (attention
    probabilities by heads, or tokens under sequence parallelism) each takes its slice, and no two ranks drop alike. The
    price is t times the random numbers of a slice. Megatron-LM keeps two streams instead, one that all ranks share and
    one that differs from rank to rank: less to draw, but the result depends on t.

    Args:
        dim: the dimension along which the tensor is cut, in t equal parts; None where every rank has all of it.
        group: the tensor-parallel ranks; None is all of them.
        p, place, seed: as in `tpcode.dense.Dropout`.
    """

    def __init__(
        self, p: float, place: str, seed: int = 0, *, dim: int | None = None, group: ProcessGroup | None = None
    ):
        super().__init__(p, place, seed)
        self.dim = dim if dim is None else require_int(dim, "dim", minimum=0)
        self.group = group

    @classmethod
    def from_dense(cls, whole: dense.Dropout, group: ProcessGroup | None = None, *, dim: int | None = None) -> Self:
        """The same dropout, for tensors that are cut along `dim`, or for whole ones.

        Raises:
            TypeError: it is no `tpcode.dense.Dropout`: torch's draws from a stream that other draws move on.
        """
        if not isinstance(whole, dense.Dropout):
            raise TypeError(f"Dropout.from_dense takes a tpcode.dense.Dropout, and this is a {type(whole).__name__}")
        return _like(whole, cls(whole.p, whole.place, whole.seed, dim=dim, group=group))

    def to_dense(self) -> dense.Dropout:
        """The same dropout for whole tensors on one device."""
        return _like(self, dense.Dropout(self.p, self.place, self.seed))

    def keep(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Which entries of this rank's tensor stay."""
        if self.dim is None:
            return super().keep(shape, device)
        if self.dim >= len(shape):
            raise ValueError(f"Dropout: the tensor is cut along dimension {self.dim}, and its shape is {list(shape)}")
        whole = list(shape)
        whole[self.dim] *= group_size(self.group)
        own = super().keep(whole, device).narrow(self.dim, group_rank(self.group) * shape[self.dim], shape[self.dim])
        return own.clone()  # a view would keep the whole mask in memory

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


def _like(source: dense.Dropout, target: dense.Dropout) -> dense.Dropout:
    target.step = source.step
    return target.train(source.training)
