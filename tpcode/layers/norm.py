"""Norms: replicated ones, which need every feature of a token, and those of queries and keys, which lie with the heads.

Symbols: b microbatch, s sequence, h hidden, a query heads, k KV heads, d head size, t ranks, r this rank.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import rms_norm

from tpcode.comm import all_gather, copy_to_tp, group_rank, group_size, reduce_from_tp
from tpcode.layers.linear import freeze_like
from tpcode.layers.placement import Placement
from tpcode.layers.replicas import copy_to_replicas


class _ReplicatedNorm(nn.Module):
    """What the two norms of the residual stream add to torch's: the way from the dense one and back, and placements."""

    partial_grad = False

    @classmethod
    def from_dense(cls, dense: nn.Module, group: ProcessGroup | None = None, *, partial_grad: bool = False) -> Self:
        """A copy of a dense norm, on every rank alike. It sends nothing, so that the group is of no concern to it.

        Args:
            partial_grad: each rank norms tokens of its own, as under sequence parallelism, so that its gradient of
                weight and bias is a part, to be summed over the ranks.

        Raises:
            TypeError: dense is not torch's norm of the same name.
        """
        if not isinstance(dense, cls.dense_type):
            raise TypeError(
                f"{cls.__name__}.from_dense takes a torch.nn.{cls.dense_type.__name__}, and this is a "
                f"{type(dense).__name__}"
            )
        norm = _renewed(dense, cls)
        norm.partial_grad = partial_grad
        return norm

    def to_dense(self) -> nn.Module:
        """The dense norm. Nothing is sent: every rank has all of it."""
        return _renewed(self, self.dense_type)

    @property
    def placements(self) -> dict[str, Placement]:
        """Every parameter's placement by name."""
        return {name: Placement(partial_grad=self.partial_grad) for name, _ in self.named_parameters()}


class LayerNorm(_ReplicatedNorm, nn.LayerNorm):
    """`(x - mean) / √(variance + eps) ⊙ weight + bias` over the last dimension, on every rank alike: [..., h].

    Mean and variance need all h features of a token, so that a token is normed whole. Without sequence parallelism
    every rank norms every token: the work is repeated t times, and the gradients are the same everywhere, never summed.
    With it a rank norms tokens of its own, [b, s/t, h], once among all ranks, and sends nothing; but its gradients of
    weight and bias then know these tokens alone: parts, which `finalize_grads` sums where `partial_grad` says so.
    """

    dense_type = nn.LayerNorm


class RMSNorm(_ReplicatedNorm, nn.RMSNorm):
    """`x / √(mean of squares + eps) ⊙ weight` over the last dimension, on every rank alike: [..., h]. See `LayerNorm`
    (Zhang and Sennrich 2019)."""

    dense_type = nn.RMSNorm


class HeadNorm(nn.Module):
    """QK-norm per head: an RMSNorm over each head's d with one weight for all heads, as in Qwen3. [b, s, heads_r, d].

        forward   y = x / √(mean over d + eps) ⊙ weight    silent: a head needs no other
        dgrad     dx                                       silent
        wgrad     dweight = Σ_r Σ_heads_r …   [d]          all-reduce: copy (f)

    The weight is on every rank, and still its gradient is partial: each rank uses it on heads of its own.
    """

    def __init__(self, weight: Tensor, eps: float, group: ProcessGroup | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps, self.group = eps, group
        self.placements = {"weight": Placement()}

    @classmethod
    def from_dense(cls, dense: nn.RMSNorm, group: ProcessGroup | None = None) -> Self:
        """A copy of the dense norm."""
        return freeze_like(dense, cls(dense.weight.detach().clone(), dense.eps, group))

    def to_dense(self) -> nn.RMSNorm:
        """The dense norm. Nothing is sent."""
        return freeze_like(self, _rms_norm_of(self.weight.detach().clone(), self.eps))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], copy_to_tp(self.weight, self.group), self.eps)


class AllHeadsNorm(nn.Module):
    """QK-norm over all heads together, as in OLMo 2: [b, s, heads_r, d], where a token's heads are on many ranks.

        forward   S  = Σ_r Σ_heads_r x²                        [b, s, 1]   all-reduce
                  y  = x / √(S / (heads·d) + eps) ⊙ weight_r               silent
        dgrad     dS = Σ_r of each rank's part                 [b, s, 1]   all-reduce: every rank used S on its heads
                  dx                                                       silent
        wgrad     dweight_r                                    [heads_r·d] silent; with replicas an all-reduce over them

    With replicas, c ranks hold the same head and S would count it c times: each of them adds a c-th of its squares.

    Args:
        weight: this rank's share.
        placement: how the weight is cut, and how many ranks hold each share.
        group: the tensor-parallel ranks; None is all of them.
    """

    def __init__(self, weight: Tensor, eps: float, placement: Placement, group: ProcessGroup | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps, self.group = eps, group
        self.placements = {"weight": placement}

    @classmethod
    def from_dense(cls, dense: nn.RMSNorm, group: ProcessGroup | None = None, *, replicas: int = 1) -> Self:
        """This rank's share of a dense norm over all heads, of which `replicas` ranks hold each."""
        placement = Placement(0, (dense.weight.numel(),), replicas=replicas)
        weight = placement.shard(dense.weight.detach(), group_rank(group), group_size(group), "the norm's weight")
        return freeze_like(dense, cls(weight, dense.eps, placement, group))

    @torch.no_grad()
    def to_dense(self) -> nn.RMSNorm:
        """The dense norm, gathered on every rank. Every rank of the group calls it."""
        shards = all_gather(self.weight.unsqueeze(0), 0, self.group).unbind()
        return freeze_like(self, _rms_norm_of(self.placements["weight"].merge(shards), self.eps))

    def forward(self, x: Tensor) -> Tensor:
        placement = self.placements["weight"]
        weight = copy_to_replicas(self.weight, placement.replicas, self.group)
        wide = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))  # [b, s, heads_r, d] -> [b, s, heads_r·d]
        squares = wide.square().sum(-1, keepdim=True) / placement.replicas  # [b, s, 1], in parts
        squares = copy_to_tp(reduce_from_tp(squares, self.group), self.group)  # g, then f: summed, then used by all
        normed = wide * torch.rsqrt(squares / placement.true_size + self.eps) * weight
        return normed.to(x.dtype).unflatten(-1, x.shape[2:])


def _renewed(norm: nn.Module, cls: type) -> nn.Module:
    """The same norm as a module of class cls, with tensors of its own. No random numbers are drawn."""
    affine = norm.weight is not None
    options = {"bias": norm.bias is not None} if isinstance(norm, nn.LayerNorm) else {}
    renewed = cls(norm.normalized_shape, eps=norm.eps, elementwise_affine=affine, device="meta", **options)
    tensors = {name: parameter.detach().clone() for name, parameter in norm.named_parameters()}
    renewed.load_state_dict(tensors, assign=True)
    return freeze_like(norm, renewed)


def _rms_norm_of(weight: Tensor, eps: float) -> nn.RMSNorm:
    norm = nn.RMSNorm(weight.shape, eps=eps, device="meta")
    norm.weight = nn.Parameter(weight)
    return norm
