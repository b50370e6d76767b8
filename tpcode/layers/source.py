"""Of which dense parameters a split one is made: what initialisation and checkpoints read, a slice at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tpcode.layers.attention import GroupedPlacement, by_kv_groups
from tpcode.layers.placement import Placement

Read = Callable[[str, int, int, int], Tensor]  # (dense name, dim, start, stop) -> that slice of the dense parameter


@dataclass(frozen=True)
class Piece:
    """Entries `start` to `stop` of a dense parameter, which lie in a rank's shard from `at` on."""

    name: str
    start: int
    stop: int
    at: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Source:
    """How a split parameter is made of dense ones: the same at every t.

    Attributes:
        parts: names of the dense parameters and their sizes along `dim`: two for gate and up, three for Q, K and V.
        shape: of the whole parameter, fused and without padding.
        placement: how it lies over the ranks.
    """

    parts: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    placement: Placement

    @property
    def dim(self) -> int:
        """The dimension along which it is fused and cut; 0 if it is neither."""
        return self.placement.dim or 0

    def shard_shape(self, t: int) -> tuple[int, ...]:
        """Of each rank's shard, padding included."""
        shape = list(self.shape)
        if self.placement.dim is not None:
            shape[self.dim] = self.placement.shard_size(t)
        return tuple(shape)

    def pieces(self, rank: int, t: int) -> list[Piece]:
        """What rank's shard consists of, besides padding. Replicas are named for each rank that holds them."""
        rows = self._rows(rank, t)  # of the parts laid end to end; cut where they jump, or go on in another part
        starts = [0, *accumulate(size for _, size in self.parts)][:-1]
        part = torch.bucketize(rows, torch.tensor(starts), right=True) - 1  # -1 is padding
        borders = ((rows.diff() != 1) | (part.diff() != 0)).nonzero().flatten() + 1
        pieces, at = [], 0
        for end in [*borders.tolist(), len(rows)]:
            if (number := int(part[at])) >= 0:
                start = int(rows[at]) - starts[number]
                pieces.append(Piece(self.parts[number][0], start, start + end - at, at))
            at = end
        return pieces

    def shard(self, read: Read, rank: int, t: int, like: Tensor) -> Tensor:
        """Rank's shard, with the dtype of `like`. It reads name by name, and no more than the shard holds."""
        device = torch.get_default_device() if like.is_meta else like.device
        shard = torch.zeros(self.shard_shape(t), dtype=like.dtype, device=device)
        for piece in sorted(self.pieces(rank, t), key=lambda piece: piece.name):
            shard.narrow(self.dim, piece.at, len(piece)).copy_(read(piece.name, self.dim, piece.start, piece.stop))
        return shard

    def _rows(self, rank: int, t: int) -> Tensor:
        """The shard's entries by their index in the parts laid end to end; -1 is padding."""
        order = torch.arange(sum(size for _, size in self.parts))
        if isinstance(self.placement, GroupedPlacement):
            order = by_kv_groups(order.split(self.placement.segments), self.placement.groups)
        if self.placement.dim is None:
            return order
        rows = self.placement.rows(rank, t)
        return torch.where(rows < 0, -1, order[rows])
