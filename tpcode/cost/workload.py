"""What one training step is to do: how many sequences, how long, in which pieces."""

from __future__ import annotations

from dataclasses import dataclass

from tpcode.config import Layout, ModelConfig
from tpcode.cost.flops import require_recompute
from tpcode.shapes import require_int

CORES = ("explicit", "sdpa")


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
        distributed_optimizer: whether the data-parallel ranks share the optimizer's work and state (ZeRO, stage 1).
        overlap_gradients: whether gradients are reduced over the data-parallel ranks while backward still runs.
        core: how attention is computed: "explicit" writes all s² scores, "sdpa" does not (FlashAttention). None is
            "explicit" where the model drops scores out, else "sdpa", as the layers of `tpcode` have it.

    Raises:
        ValueError, TypeError: a size is no positive integer; recompute or core is none of those named.
    """

    batch: int
    sequence: int
    microbatch: int = 1
    recompute: str = "none"
    interleave: int = 1
    scatter_gather: bool = True
    distributed_optimizer: bool = False
    overlap_gradients: bool = True
    core: str | None = None

    def __post_init__(self):
        for size in ("batch", "sequence", "microbatch", "interleave"):
            object.__setattr__(self, size, require_int(getattr(self, size), size))
        require_recompute(self.recompute)
        if self.core not in (None, *CORES):
            raise ValueError(f"core must be one of {', '.join(CORES)}, or None, and is {self.core!r}")

    def core_of(self, config: ModelConfig) -> str:
        """Which core this model's attention has."""
        return self.core or ("explicit" if config.dropout else "sdpa")

    def microbatches(self, layout: Layout) -> int:
        """m = B / (b dp): microbatches that each replica works through in a step.

        Raises:
            ValueError: b dp does not divide B; or, interleaved, pp does not divide m.
        """
        together = self.microbatch * layout.dp
        if self.batch % together:
            raise ValueError(
                f"a batch of {self.batch} sequences is not cut evenly in microbatches of {self.microbatch} for each of "
                f"dp = {layout.dp} replicas: it must be a multiple of {together}"
            )
        m = self.batch // together
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
