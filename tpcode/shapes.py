"""What divides by what: the arithmetic of splitting, on integers alone.

Symbols: t ranks, r a rank. A size that cannot be split is refused here, before any rank waits for another, with a
`ValueError` that names the dimension, both numbers and the sizes of t that work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from operator import index

_LISTED = 16  # how many working sizes an error message lists


def divide(n: int, t: int, what: str, hint: str = "") -> int:
    """n / t, exactly. `hint` says what else would work.

    Raises:
        ValueError: t does not divide n; the message lists the sizes of t that do.
        TypeError: n or t is no integer.
    """
    n, t = require_int(n, what, minimum=0), require_int(t, "t")
    if n % t:
        works = _listed(_divisors(n))
        raise ValueError(f"{what} = {n} does not divide by t = {t}; t that work: {works}{hint and '; ' + hint}")
    return n // t


def shard_range(n: int, rank: int, t: int, what: str) -> slice:
    """The n/t consecutive indices that are rank's share of n.

    Raises:
        ValueError: t does not divide n, or there is no such rank among t.
        TypeError: a size is no integer.
    """
    size = divide(n, t, what)
    require_rank(rank, t)
    return slice(rank * size, (rank + 1) * size)


def padded(n: int, multiple: int, what: str) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    n, multiple = require_int(n, what), require_int(multiple, "multiple")
    return -(-n // multiple) * multiple


def padded_vocab(V: int, t: int, multiple: int = 128) -> int:
    """The vocabulary size after padding, a multiple of 128 on each of t ranks (Shoeybi et al. 2019, section 5.1).

    >>> [padded_vocab(50257, t) for t in (1, 2, 4, 8)]
    [50304, 50432, 50688, 51200]
    """
    return padded(V, require_int(multiple, "multiple") * require_int(t, "t"), "vocabulary V")


@dataclass(frozen=True)
class HeadGroups:
    """Which of `heads` query heads and `kv_heads` KV heads each of t ranks holds; made by `head_groups`."""

    heads: int
    kv_heads: int
    t: int

    @property
    def heads_per_rank(self) -> int:
        """Query heads on each rank."""
        return self.heads // self.t

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads on each rank: at least one."""
        return max(1, self.kv_heads // self.t)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same KV heads: 1 unless there are fewer KV heads than ranks."""
        return max(1, self.t // self.kv_heads)

    def heads_of(self, rank: int) -> range:
        """The query heads that rank holds."""
        return _share(self.heads_per_rank, require_rank(rank, self.t))

    def kv_heads_of(self, rank: int) -> range:
        """The KV heads that rank holds: those that its query heads read."""
        return _share(self.kv_heads_per_rank, require_rank(rank, self.t) // self.replicas)

    def replicas_of(self, rank: int) -> range:
        """The ranks that hold the same KV heads as rank, itself included."""
        return _share(self.replicas, require_rank(rank, self.t) // self.replicas)


def head_groups(heads: int, kv_heads: int, t: int) -> HeadGroups:
    """Attention heads to ranks: whole query heads to each, and the KV heads that these read.

    t divides `heads`. It also divides `kv_heads`, or is a multiple of it: then each KV head has t/kv_heads replicas.

    Raises:
        ValueError: neither; the message lists the sizes of t that work. Or kv_heads does not divide heads.
        TypeError: a size is no integer.

    >>> groups = head_groups(heads=12, kv_heads=4, t=12)
    >>> groups.replicas, list(groups.kv_heads_of(7)), list(groups.replicas_of(7))
    (3, [2], [6, 7, 8])
    """
    heads, kv_heads = require_int(heads, "query heads"), require_int(kv_heads, "KV heads")
    t = require_int(t, "t")
    if heads % kv_heads:
        raise ValueError(f"query heads = {heads} is no multiple of KV heads = {kv_heads}: each KV head serves as many")
    if not _heads_split(heads, kv_heads, t):
        works = [n for n in range(1, heads + 1) if _heads_split(heads, kv_heads, n)]
        raise ValueError(
            f"query heads = {heads} and KV heads = {kv_heads} do not split over t = {t}: t must divide the query "
            f"heads, and divide the KV heads or be a multiple of them; t that work: {_listed(works)}"
        )
    return HeadGroups(heads, kv_heads, t)


def _heads_split(heads: int, kv_heads: int, t: int) -> bool:
    return heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)


def require_last_dim(x, n: int, what: str, hint: str = "") -> None:
    """Refuse a tensor whose last dimension is not n. `hint` says what would work.

    Raises:
        ValueError: names `what`, both sizes and the whole shape.
    """
    shape = list(x.shape)
    if not shape or shape[-1] != n:
        found = f"is {shape[-1]}" if shape else "does not exist"
        raise ValueError(f"{what}: the last dimension must be {n} and {found} (shape {shape}){hint and '; ' + hint}")


def require_int(value, what: str, minimum: int | None = 1) -> int:
    """value as an int; `minimum=None` allows any.

    Raises:
        TypeError: it is no integer (a bool is none, nor is 2.0).
        ValueError: it is below minimum.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer and is {value!r}")
    value = index(value)
    if minimum is not None and value < minimum:
        raise ValueError(f"{what} must be at least {minimum} and is {value}")
    return value


def require_rank(rank: int, t: int) -> int:
    """rank as an int from 0 to t - 1.

    Raises:
        ValueError, TypeError: it is none.
    """
    rank = require_int(rank, "rank", minimum=0)
    if rank >= t:
        raise ValueError(f"rank must be below t = {t} and is {rank}; ranks count from 0 to {t - 1}")
    return rank


def _share(size: int, number: int) -> range:
    return range(number * size, (number + 1) * size)


def _divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:_LISTED])) + (", …" if len(sizes) > _LISTED else "")
