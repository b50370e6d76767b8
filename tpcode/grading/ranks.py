"""Run a learner's function on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from tpcode.grading.answers import stub_in
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.runtime import RankPool

SIZES = (1, 2, 4)  # the t at which exercises with real ranks run

TIMEOUT = 20.0  # seconds that a rank may wait for others: a learner should not wait a minute to hear that it hangs
LIMIT = 90.0  # seconds that one run may take; less than a cell may under `make check`
KEPT_POOLS = 3

_pools: dict[int, RankPool] = {}  # by size, least recently used first


def on_ranks(function: Callable, t: int, *args, **kwargs) -> list:
    """What `function(*args, **kwargs)` returns on each of t ranks, in rank order.

    Within a check nothing needs to be caught: `check` turns a rank's error into the learner's own lines.

    Raises:
        RankError, CollectiveMismatch, RankTimeout: as `tpcode.launch`, but after TIMEOUT and LIMIT seconds.
    """
    pool = _pools.pop(t, None) or RankPool(t, timeout=TIMEOUT, limit=LIMIT)
    _pools[t] = pool
    while len(_pools) > KEPT_POOLS:
        _pools.pop(next(iter(_pools))).close()
    return pool.run(function, *args, **kwargs)


def require_returned(function: Callable, results: list, hint: str = "") -> None:
    """Raise if `function`, the learner's, returned None or `...` on a rank.

    Raises:
        Unfilled: its source still holds the stub, and every rank returned nothing.
        Wrong: a rank returned nothing for another reason; `hint` says which it may be.
    """
    empty = [rank for rank, result in enumerate(results) if result is None or result is Ellipsis]
    if not empty:
        return
    stub = stub_in(function)
    if stub and len(empty) == len(results):
        raise Unfilled(f"replace {stub} in {function.__name__}.")
    where = "on every rank" if len(empty) == len(results) else f"on rank {empty[0]}"
    raise Wrong(f"{function.__name__} returned {results[empty[0]]} {where}. {hint or 'Is there a return?'}")


def require_output(y, like: Tensor, name: str = "Y") -> None:
    """Raise Wrong unless y, what a learner's layer returned, is a tensor of like's shape with a gradient."""
    if not isinstance(y, Tensor):
        raise Wrong(f"the output should be a tensor; it is {y!r:.40}.")
    if y.shape != like.shape:
        raise Wrong(f"{name} has shape {list(y.shape)}, not {list(like.shape)}.")
    if not y.requires_grad:
        cure = "Use reduce_from_tp, or your own g."
        raise Wrong(f"{name} has no gradient: detach() cuts it off, and so does a plain collective. {cure}")


def require_calls(results: Sequence[Mapping], phase: str, wanted: int, why: str) -> None:
    """Raise Wrong unless every rank made `wanted` calls in `results[rank][phase]`, a list as `watch` gives it."""
    t = len(results)
    for rank, mine in enumerate(results):
        if len(mine[phase]) != wanted:
            calls = f" ({'; '.join(mine[phase])})" if mine[phase] else ""
            raise Wrong(f"{phase} made {len(mine[phase])} calls on rank {rank} at t = {t}{calls}, not {wanted}. {why}")
