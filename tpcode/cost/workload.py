"""What one training step is to do: how many sequences, how long, in which pieces."""

from __future__ import annotations

from dataclasses import dataclass

from tpcode.config import Layout
from tpcode.cost.flops import require_recompute
from tpcode.shapes import divide, require_int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, of whatever model on whatever layout.

    Args:
        batch: B, sequences in the whole step, over all replicas.
        sequence: s, tokens in each.
        microbatch: b, sequences that go through the model together.
        recompute: "none", "selective" (the attention core's forward runs again) or "full" (each layer's does).
        interleave: v, chunks of layers that each pipeline stage has.
        scatter_gather: whether each of t ranks sends 1/t of a stage's output to the next (N21, section 4.1).

    Raises:
        ValueError, TypeError: a size is no positive integer, recompute none of the three.
    """

    batch: int
    sequence: int
    microbatch: int = 1
    recompute: str = "none"
    interleave: int = 1
    scatter_gather: bool = True

    def __post_init__(self):
        for size in ("batch", "sequence", "microbatch", "interleave"):
            object.__setattr__(self, size, require_int(getattr(self, size), size))
        require_recompute(self.recompute)

    def microbatches(self, layout: Layout) -> int:
        """m = B / (b dp): microbatches that each replica works through in a step.

        Raises:
            ValueError: b dp does not divide B; or, interleaved, pp does not divide m.
        """
        per_replica = divide(self.batch, layout.dp, "batch B", hint=f"the layout has dp = {layout.dp}")
        m = divide(per_replica, self.microbatch, "sequences of a replica B/dp", hint=f"b = {self.microbatch}")
        if self.interleave > 1 and m % layout.pp:
            raise ValueError(
                f"with interleave = {self.interleave} the microbatches come in groups of pp = {layout.pp}, and m = {m} "
                f"is no multiple of it"
            )
        return m

    @property
    def tokens(self) -> int:
        """Of a whole step: B s."""
        return self.batch * self.sequence
