"""The FFN of both families."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from tpcode.shapes import require_int


def gelu_tanh(x: Tensor) -> Tensor:
    """GeLU in the form with tanh, as GPT-2 has it."""
    return gelu(x, approximate="tanh")


Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"gelu_tanh": gelu_tanh, "gelu": gelu, "relu": torch.relu, "silu": silu}


class FFN(nn.Module):
    """`Y = act(X c_fcᵀ + bias) c_projᵀ + bias`: [..., h] -> [..., F] -> [..., h], as in GPT-2.

    Args:
        h, F: hidden size and FFN width.
        bias: whether both linear layers have one.
        activation: a name in `ACTIVATIONS` ("gelu" is the exact one, with erf), or an elementwise function.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: a size is no positive integer; no such activation.
    """

    def __init__(self, h: int, F: int, bias: bool = True, activation: str | Activation = "gelu_tanh", **factory):
        super().__init__()
        h, F = require_int(h, "hidden h"), require_int(F, "FFN width F")
        self.c_fc = nn.Linear(h, F, bias=bias, **factory)
        self.c_proj = nn.Linear(F, h, bias=bias, **factory)
        self.activation = named_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class SwiGLU(nn.Module):
    """`Y = (silu(X gate_projᵀ) ⊙ X up_projᵀ) down_projᵀ`: [..., h] -> [..., F] -> [..., h], as in Llama (Shazeer 2020).

    Args:
        h, F: hidden size and FFN width.
        bias: whether the three linear layers have one.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: a size is no positive integer.
    """

    def __init__(self, h: int, F: int, bias: bool = False, **factory):
        super().__init__()
        h, F = require_int(h, "hidden h"), require_int(F, "FFN width F")
        self.gate_proj = nn.Linear(h, F, bias=bias, **factory)
        self.up_proj = nn.Linear(h, F, bias=bias, **factory)
        self.down_proj = nn.Linear(F, h, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


def named_activation(activation: str | Activation) -> Activation:
    """The function of that name; a function is its own.

    Raises:
        ValueError: no such name; the message lists them.
    """
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, or a function, and is {activation!r}")
    return ACTIVATIONS[activation]
