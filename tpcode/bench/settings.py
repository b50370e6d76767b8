"""What a bench measures. All that cannot work is refused here, before a rank starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from tpcode.config import ModelConfig
from tpcode.cost.flops import layer_flops
from tpcode.cost.hardware import GiB
from tpcode.runtime.env import choose_backend, cores, under_torchrun
from tpcode.shapes import divide, head_groups, require_int

PARTS = ("collectives", "ffn", "attention", "block")
LAYERS = PARTS[1:]
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
RANK_BYTES = 300 * 10**6  # of a process with torch, before it computes

# What is taken where nothing is said: seconds on two cores, and a layer as it is trained on a GPU.
ON_CPU: dict[str, Any] = {"model": "gpt2", "batch": 2, "sequence": 128, "dtype": "float32", "largest_bytes": 4 * 2**20}
ON_GPU: dict[str, Any] = {
    "model": "llama-3-8b", "batch": 1, "sequence": 4096, "dtype": "bfloat16", "largest_bytes": 256 * 2**20,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, on how many ranks.

    Attributes:
        model: name of a preset: its hidden size, FFN and heads are one layer's.
        tp: sizes t, each measured on groups of t ranks that all work at the same time, as replicas in training do.
        batch, sequence: b and s of the layers' input.
        dtype: of the layers; collectives carry float32.
        parts: some of `PARTS`.
        rounds: steps of each layer, after two that do not count. Medians are reported.
        largest_bytes: payload of the largest collective.
        trace: whether to keep a timeline of one step, of the last layer in `parts` at the largest t, without SP.
        world: ranks in all; the largest t, or those that torchrun started.

    Raises:
        ValueError: there is no such model, dtype or part; a size makes no sense, or a layer does not split.
    """

    model: str
    tp: tuple[int, ...]
    batch: int
    sequence: int
    dtype: str
    largest_bytes: int
    parts: tuple[str, ...] = PARTS
    rounds: int = 7
    trace: bool = False
    world: int = 0

    def __post_init__(self):
        for name in ("batch", "sequence", "rounds", "largest_bytes"):
            require_int(getattr(self, name), f"--{name.replace('_', '-')}")
        for name, values, known in (("--only", self.parts, PARTS), ("--dtype", [self.dtype], ELEMENT_BYTES)):
            if unknown := [value for value in values if value not in known]:
                raise ValueError(f"{name}: no {unknown[0]!r}; there are {', '.join(known)}")
        if self.trace and not set(LAYERS) & set(self.parts):
            raise ValueError(f"--trace shows a step of a layer, and --only names none of {', '.join(LAYERS)}")
        if not self.tp:
            raise ValueError("--tp names no size; 1,2 is one device against two ranks")
        if not self.world:
            object.__setattr__(self, "world", max(self.tp))
        for t in self.tp:
            self._require_size(require_int(t, "--tp"))

    def _require_size(self, t: int) -> None:
        if t > self.world:
            raise ValueError(f"--tp {t} needs {t} ranks, and torchrun started {self.world}: --nproc-per-node {t}")
        if not set(LAYERS) & set(self.parts):
            return
        config = self.layer
        groups = head_groups(config.heads, config.kv_heads, t)
        divide(self.sequence, t, "--sequence, which sequence parallelism cuts,")
        if groups.replicas > 1 and self.world % t:
            raise ValueError(f"--tp {t} has replicas of KV heads, and must then divide all {self.world} ranks")

    @property
    def layer(self) -> ModelConfig:
        """A model of one such layer, and next to nothing else."""
        config = ModelConfig.preset(self.model.lower())
        return replace(config, layers=1, vocab=8, max_seq=self.sequence, dropout=0.0)

    @property
    def tokens(self) -> int:
        """n = bs."""
        return self.batch * self.sequence

    @property
    def timeout_seconds(self) -> float:
        """That a rank may wait for another."""
        return 600.0

    # ---- what it takes ----------------------------------------------------------------------------------------------

    def parameters(self, part: str) -> int:
        """Of one layer, unsplit."""
        config = self.layer
        norms = 2 * (2 if config.bias else 1) * config.hidden
        ffn, attention = config.ffn_parameters, config.attention_parameters
        return {"ffn": ffn, "attention": attention, "block": ffn + attention + norms}[part]

    def flops(self, part: str) -> int:
        """Of forward and backward of one layer, over all t ranks: three times forward's."""
        config = self.layer
        block = layer_flops(config, self.batch, self.sequence)
        ffn = 2 * self.tokens * config.hidden * config.ffn * (3 if config.gated else 2)
        return 3 * {"ffn": ffn, "attention": block - ffn, "block": block}[part]

    def needed_bytes(self) -> int:
        """What the fullest rank takes at most, besides its process: the dense layer, its shard and gradients, what
        forward keeps and backward makes; or two payloads of the largest collective."""
        needed = 2 * self.largest_bytes if "collectives" in self.parts else 0
        config, element = self.layer, ELEMENT_BYTES[self.dtype]
        for part in set(LAYERS) & set(self.parts):
            state = 3 * self.parameters("block") * element
            widths = (20 if part != "ffn" else 8) * config.hidden
            widths += (8 if config.gated else 5) * config.ffn if part != "attention" else 0
            needed = max(needed, state + self.tokens * widths * element)
        return needed

    def require_memory(self) -> None:
        """Compare with what is free: on the GPU of this rank, else in this machine's memory, which its ranks share.

        Raises:
            MemoryError: it is too little.
        """
        needed, (free, ranks, where) = self.needed_bytes(), self._free()
        each = needed + (RANK_BYTES if where == "memory" else 0)
        if free is not None and ranks * each > free:
            times = f" ({ranks} ranks of {each / GiB:.1f} GiB)" if ranks > 1 else ""
            raise MemoryError(
                f"this bench needs {ranks * each / GiB:.1f} GiB{times}, and {free / GiB:.1f} GiB of {where} are free; "
                f"a smaller --model, --sequence, --batch or --largest-bytes takes less, and so do fewer ranks"
            )

    def _free(self) -> tuple[int | None, int, str]:
        """Bytes that are free, how many ranks share them, and where that is."""
        import torch

        from tpcode.doctor import free_memory

        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) if under_torchrun() else self.world
        if choose_backend(here) == "nccl":
            gpu = int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun() else 0
            return torch.cuda.mem_get_info(gpu)[0], 1, "GPU memory"
        return free_memory(), here, "memory"


def usable_gpus() -> int:
    """GPUs that NCCL ranks may have."""
    import torch

    return torch.cuda.device_count() if choose_backend(1) == "nccl" else 0


def sizes_of_t(limit: int) -> tuple[int, ...]:
    """1, 2, 4 and so on as far as `limit` goes, and `limit` itself."""
    return tuple(sorted({limit, *(1 << i for i in range(limit.bit_length()))}))


def settings(*, tp: tuple[int, ...] | None = None, **given) -> Settings:
    """Settings with what is given, and for the rest what suits this machine.

    Without tp: 1, 2, 4 and so on as far as there are GPUs, or cores (2 at least); under torchrun as far as there are
    ranks. Sizes over which the layer does not split are then left out.
    """
    launched = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 0
    gpus = usable_gpus()
    limit = launched or gpus or min(max(2, cores()), 4)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", launched)) if launched else max(tp or (limit,))
    defaults = ON_GPU if choose_backend(here) == "nccl" else ON_CPU
    chosen = defaults | {name: value for name, value in given.items() if value is not None}
    if tp is None:
        tp = tuple(t for t in sizes_of_t(limit) if _splits(chosen, t, launched or limit))
    elif given.get("sequence") is None and min(tp, default=0) > 0:
        chosen["sequence"] += -chosen["sequence"] % lcm(*tp)  # each of them divides it
    return Settings(tp=tp, world=launched, **chosen)


def _splits(chosen: dict[str, Any], t: int, world: int) -> bool:
    """Whether a layer can be split so; what is wrong at t = 1 is for `Settings` to say."""
    try:
        Settings(tp=(t,), world=world, **chosen)
    except ValueError:
        return t == 1
    return True
