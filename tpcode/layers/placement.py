"""Where each parameter of a split layer lies: one declaration, read by everything that cuts, joins or sums it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tpcode.shapes import divide, padded, require_int, require_rank


@dataclass(frozen=True)
class Placement:
    """How t ranks share one parameter.

    Attributes:
        dim: the dimension along which it is cut; None if every rank has all of it.
        segments: the whole's true sizes along `dim`, without padding. A fused matrix has one for each of its parts,
            and each part is cut on its own, so that every rank has a share of each: gate and up are (F, F).
        replicas: how many neighbouring ranks hold the same share; one number for all segments or one for each.
        pad: whether a segment that does not divide is padded with zeros at its end. If not, it is refused.
        partial_grad: whether each rank's gradient is only a part, to be summed over the ranks.
    """

    dim: int | None = None
    segments: tuple[int, ...] = ()
    replicas: int | tuple[int, ...] = 1
    pad: bool = False
    partial_grad: bool = False

    def __post_init__(self):
        if self.dim is None:
            if self.segments or self.pad or self.replicas != 1:
                raise ValueError("segments, replicas and pad say how a parameter is cut, and dim is None: it is not")
            return
        require_int(self.dim, "dim", minimum=0)
        object.__setattr__(self, "segments", tuple(self.segments))  # the dataclass is frozen, except to itself
        if not self.segments:
            raise ValueError("a parameter that is cut needs its true sizes along dim: segments is empty")
        for size in self.segments:
            require_int(size, "segment")
        replicas = (self.replicas,) if isinstance(self.replicas, int) else self.replicas
        for count in replicas:
            require_int(count, "replicas")
        if len(replicas) not in (1, len(self.segments)):
            raise ValueError(f"{len(replicas)} numbers of replicas for {len(self.segments)} segments")

    @property
    def true_size(self) -> int | None:
        """The whole's size along `dim`, without padding; None if it is not cut."""
        return None if self.dim is None else sum(self.segments)

    def shard_size(self, t: int, what: str = "the parameter's size") -> int | None:
        """The size along `dim` of each rank's shard, padding included; None if it is not cut.

        Raises:
            ValueError: a segment does not divide, and is not to be padded; the message calls it `what`.
        """
        return None if self.dim is None else sum(self._shares(t, what))

    def shard(self, whole: Tensor, rank: int, t: int, what: str = "the parameter's size") -> Tensor:
        """Rank's shard of the whole parameter, as a tensor of its own.

        Raises:
            ValueError: this is not the whole's size; a segment does not divide, and is not to be padded.
        """
        require_rank(rank, t)
        if self.dim is None:
            return whole.clone()
        self._require_size(whole, self.true_size, f"a whole over t = {t}")
        parts = whole.split(self.segments, self.dim)
        shares = zip(parts, self._shares(t, what), self._replicas(), strict=True)
        return joined([self._share(part, size, rank // copies) for part, size, copies in shares], self.dim)

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole parameter from every rank's shard, in rank order, without padding. Of replicas the first counts.

        Raises:
            ValueError: a shard has not the size that t = len(shards) gives it.
        """
        if not shards:
            raise ValueError("there are no shards to merge")
        if self.dim is None:
            return shards[0].clone()
        t, shares = len(shards), self._shares(len(shards))
        for shard in shards:
            self._require_size(shard, sum(shares), f"a shard of t = {t}")
        by_rank = [shard.split(shares, self.dim) for shard in shards]
        wholes = []
        for number, (size, copies) in enumerate(zip(self.segments, self._replicas(), strict=True)):
            segment = joined([parts[number] for parts in by_rank[::copies]], self.dim)
            wholes.append(segment.narrow(self.dim, 0, size))
        return joined(wholes, self.dim)

    def rows(self, rank: int, t: int) -> Tensor:
        """The whole's index of each of the shard's entries along `dim`: [shard size], -1 for padding."""
        numbers = torch.arange(1, self.true_size + 1)  # from 1, so that what `shard` adds can be told: it is 0
        return replace(self, dim=0).shard(numbers, rank, t) - 1

    def counted(self, rank: int, t: int) -> Tensor:
        """Which of the shard's entries along `dim` this rank counts: bool, [shard size].

        All ranks together then count every true entry once: padding nobody, what has replicas the first that has it.
        """
        own = self.rows(rank, t)
        before = [self.rows(lower, t) for lower in range(rank)]
        return (own >= 0) & ~torch.isin(own, torch.cat([own.new_empty(0), *before]))

    def _replicas(self) -> tuple[int, ...]:
        """One number for each segment."""
        return (self.replicas,) * len(self.segments) if isinstance(self.replicas, int) else self.replicas

    def _shares(self, t: int, what: str = "the parameter's size") -> list[int]:
        """Each segment's size on a rank, padding included."""
        shares = []
        for size, copies in zip(self.segments, self._replicas(), strict=True):
            cuts = divide(t, copies, "ranks t, by the number of replicas,")
            size = padded(size, cuts, what) if self.pad else size
            shares.append(divide(size, cuts, what, hint="or pad it with zeros: pad=True"))
        return shares

    def _share(self, part: Tensor, size: int, number: int) -> Tensor:
        """Piece `number` of a segment: `size` entries along dim, of which those beyond the segment's end are zero."""
        start = min(number * size, part.shape[self.dim])
        piece = part.narrow(self.dim, start, min(size, part.shape[self.dim] - start))
        shape = list(part.shape)
        shape[self.dim] = size - piece.shape[self.dim]
        padding = torch.zeros(shape, dtype=part.dtype, device=part.device)
        return joined([piece, padding], self.dim)

    def _require_size(self, tensor: Tensor, size: int, what: str) -> None:
        shape = list(tensor.shape)
        if self.dim >= len(shape) or shape[self.dim] != size:
            raise ValueError(f"{what} must have {size} along dimension {self.dim}, and its shape is {shape}")


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`; of "meta" tensors without the compiler, which torch would import (see `dense.models.embedding`)."""
    if not parts[0].is_meta:
        return torch.cat(tuple(parts), dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, dtype=parts[0].dtype, device="meta")


def placements(module: nn.Module) -> dict[str, Placement]:
    """Every parameter of a tree of modules by name, with its placement as its own module declares it.

    Raises:
        ValueError: a parameter that no module has placed; nothing is guessed.
    """
    found = {}
    for name, _ in module.named_parameters():
        owner, _, own_name = name.rpartition(".")
        declared = getattr(module.get_submodule(owner), "placements", {})
        if own_name not in declared:
            raise ValueError(f"{type(module.get_submodule(owner)).__name__} does not place its parameter {name!r}")
        found[name] = declared[own_name]
    return found
