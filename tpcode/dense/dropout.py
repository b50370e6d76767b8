"""Dropout that depends on (seed, place, step) and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tpcode.shapes import require_int


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, place, step) and on nothing else.

    Not on what else has been drawn from torch's generators, and not on how often: a forward that is run again for
    activation recomputation gets the same mask, and a split layer can draw it and take a slice.

    Args:
        p: probability of dropping, from 0 up to but not including 1.
        place: a name that no other dropout of the model has.
        seed: of the whole run.

    Attributes:
        step: number of the forward pass, counted by whoever trains, see `set_dropout_step`.

    Raises:
        ValueError, TypeError: no such probability; the seed is no integer, the place no string.
    """

    def __init__(self, p: float, place: str, seed: int = 0):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, and is {p}")
        if not isinstance(place, str):
            raise TypeError(f"place must be a name and is {place!r}")
        self.p, self.place, self.seed = p, place, require_int(seed, "seed", minimum=None)
        self.step = 0

    @property
    def active(self) -> bool:
        """Whether anything is dropped: in training, and where p is not 0."""
        return self.training and self.p > 0

    def keep(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Which entries stay: bool, of that shape."""
        generator = keyed_generator(f"{self.seed}/{self.place}/{self.step}", device)
        return torch.rand(tuple(shape), generator=generator, device=device, dtype=torch.float32) >= self.p

    def forward(self, x: Tensor) -> Tensor:
        return x * self.keep(x.shape, x.device) / (1 - self.p) if self.active else x  # kept for backward: 1 byte each

    def extra_repr(self) -> str:
        return f"p={self.p}, place={self.place!r}, seed={self.seed}"


def set_dropout_step(module: nn.Module, step: int) -> None:
    """Number the forward pass that follows, for every `Dropout` in the module: one number for each microbatch."""
    step = require_int(step, "step", minimum=0)
    for part in module.modules():
        if isinstance(part, Dropout):
            part.step = step


def keyed_generator(key: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for each key: what it draws depends on nothing that was drawn before."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:4]))
