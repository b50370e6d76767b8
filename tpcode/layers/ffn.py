"""The FFN as one block: column, then row, and nothing between them (Shoeybi et al. 2019, section 3). With sequence
parallelism what stands at its two ends changes, and nothing inside (Korthikanti et al. 2022, section 4.2.2)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import silu

from tpcode.comm import group_size
from tpcode.dense import FFN, Activation, SwiGLU
from tpcode.layers.linear import ColumnParallelLinear, RowParallelLinear, freeze_like, linear_of
from tpcode.layers.placement import Placement, joined, placements


class ParallelFFN(nn.Module):
    """`Y = act(X Aᵀ + bias) Bᵀ + bias` with the width F split over the group.

        forward    H_r = X A_rᵀ        [b, s, h] -> [b, s, F/t]    silent
                   Z_r = act(H_r)      [b, s, F/t]                 silent: an entry needs no other
                   Y   = Σ_r Z_r B_rᵀ  [b, s, F/t] -> [b, s, h]    all-reduce: reduce (g)
        backward   dZ_r, dH_r          [b, s, F/t]                 silent
                   dX  = Σ_r dH_r A_r  [b, s, F/t] -> [b, s, h]    all-reduce: copy (f)

    A and B are `c_fc` and `c_proj`; input and output are the same on every rank.

    With sequence parallelism input, output, dY and dX are [b, s/t, h], this rank's tokens:

        forward    X gathered, Y scattered   all-gather before A_r, reduce-scatter after B_r
        backward   dY gathered, X again      all-gather before dZ_r, all-gather for dA_r
                   dX scattered              reduce-scatter after dH_r A_r

    Args:
        c_fc, c_proj: the two layers, as `from_dense` cuts them.
        activation: an elementwise function.
    """

    def __init__(self, c_fc: ColumnParallelLinear, c_proj: RowParallelLinear, activation: Activation):
        super().__init__()
        self.c_fc, self.c_proj, self.activation = c_fc, c_proj, activation

    @classmethod
    def from_dense(
        cls, dense: FFN, group: ProcessGroup | None = None, *, pad: bool = False, sequence_parallel: bool = False
    ) -> Self:
        """This rank's shard of a dense FFN, which every rank of the group has alike.

        Args:
            pad: fill F up with zeros where t does not divide it. Exact, and stays so under training, if act(0) = 0:
                the entries added to H are then zero, and so is every gradient of the weights around them.
            sequence_parallel: input and output are this rank's s/t tokens.

        Raises:
            TypeError: dense is no `tpcode.dense.FFN`.
            ValueError: t does not divide F, and pad is not set; padding with an activation that is not 0 at 0.
        """
        _require_type(cls, dense, FFN)
        if pad and dense.c_fc.out_features % group_size(group):
            _require_zero_at_zero(dense.activation)
        options = {"pad": pad, "sequence_parallel": sequence_parallel}
        c_fc = ColumnParallelLinear.from_dense(dense.c_fc, group, **options)
        return cls(c_fc, RowParallelLinear.from_dense(dense.c_proj, group, **options), dense.activation)

    def to_dense(self) -> FFN:
        """The whole FFN, gathered on every rank, without padding. Every rank of the group calls it."""
        dense = FFN(self.c_fc.in_features, self.c_fc.out_features, activation=self.activation, device="meta")
        dense.c_fc, dense.c_proj = self.c_fc.to_dense(), self.c_proj.to_dense()
        return dense

    @property
    def placements(self) -> dict[str, Placement]:
        """Every parameter's placement by name."""
        return placements(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class ParallelSwiGLU(nn.Module):
    """`Y = (silu(X Gᵀ) ⊙ X Uᵀ) Dᵀ` with the width F split over the group (Shazeer 2020).

    Gate and up are one matrix and one product, cut in segments: rank r holds [G_r; U_r], its share of each. Half of a
    plain cut would be all gate on one rank and all up on another.

        forward    G_r, U_r           [b, s, h] -> [b, s, 2F/t]   silent
                   Z_r, Y             as in `ParallelFFN`         all-reduce: reduce (g)
        backward   dX                 [b, s, 2F/t] -> [b, s, h]   one all-reduce for gate and up: copy (f)

    With sequence parallelism as in `ParallelFFN`: one gather and one reduce-scatter for gate and up together.

    Args:
        gate_up, down_proj: the two layers, as `from_dense` cuts them.
    """

    def __init__(self, gate_up: ColumnParallelLinear, down_proj: RowParallelLinear):
        super().__init__()
        self.gate_up, self.down_proj = gate_up, down_proj

    @classmethod
    def from_dense(
        cls, dense: SwiGLU, group: ProcessGroup | None = None, *, pad: bool = False, sequence_parallel: bool = False
    ) -> Self:
        """This rank's shard of a dense SwiGLU, which every rank of the group has alike.

        Args:
            pad: fill F up with zeros where t does not divide it; exact, since silu(0) · 0 = 0 (see `ParallelFFN`).
            sequence_parallel: input and output are this rank's s/t tokens.

        Raises:
            TypeError: dense is no `tpcode.dense.SwiGLU`.
            ValueError: t does not divide F, and pad is not set; gate and up are not frozen alike.
        """
        _require_type(cls, dense, SwiGLU)
        F = dense.gate_proj.out_features
        fused = _fused(dense.gate_proj, dense.up_proj)
        options = {"pad": pad, "sequence_parallel": sequence_parallel}
        gate_up = ColumnParallelLinear.from_dense(fused, group, segments=(F, F), **options)
        return cls(gate_up, RowParallelLinear.from_dense(dense.down_proj, group, **options))

    def to_dense(self) -> SwiGLU:
        """The whole SwiGLU, gathered on every rank, without padding. Every rank of the group calls it."""
        dense = SwiGLU(self.gate_up.in_features, self.down_proj.in_features, device="meta")
        dense.gate_proj, dense.up_proj = _parted(self.gate_up.to_dense())
        dense.down_proj = self.down_proj.to_dense()
        return dense

    @property
    def placements(self) -> dict[str, Placement]:
        """Every parameter's placement by name."""
        return placements(self)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [b, s, 2F/t] -> twice [b, s, F/t]
        return self.down_proj(silu(gate) * up)


def _fused(gate: nn.Linear, up: nn.Linear) -> nn.Linear:
    """Gate above up in one layer, [2F, h]."""
    for name, parameter in gate.named_parameters():
        if parameter.requires_grad != up.get_parameter(name).requires_grad:
            raise ValueError(f"gate_proj.{name} and up_proj.{name} become one parameter: freeze both or neither")
    pairs = {name: (parameter, up.get_parameter(name)) for name, parameter in gate.named_parameters()}
    return freeze_like(gate, linear_of(**{name: joined(pair).detach() for name, pair in pairs.items()}))


def _parted(fused: nn.Linear) -> tuple[nn.Linear, nn.Linear]:
    """Gate and up from one layer, [2F, h]."""
    halves = {name: parameter.detach().chunk(2) for name, parameter in fused.named_parameters()}
    gate, up = (linear_of(**{name: half[i].clone() for name, half in halves.items()}) for i in range(2))
    return freeze_like(fused, gate), freeze_like(fused, up)


def _require_type(cls: type, dense: nn.Module, wanted: type) -> None:
    if not isinstance(dense, wanted):
        found = type(dense).__name__
        raise TypeError(f"{cls.__name__}.from_dense takes a tpcode.dense.{wanted.__name__}, and this is a {found}")


def _require_zero_at_zero(activation: Activation) -> None:
    at_zero = float(activation(torch.zeros(1)))
    if at_zero != 0:
        raise ValueError(
            f"F is padded only where the activation of 0 is 0, and here it is {at_zero:.3g}; choose a t that divides F"
        )
