"""The two split linear layers (Shoeybi et al. 2019, section 3), and the same with sequence parallelism (Korthikanti et
al. 2022, section 4.2.2).

Symbols: h hidden, F FFN width, t ranks, r this rank, b microbatch, s sequence. The paper's A is [h, F]; torch keeps
W = Aᵀ, so that A's columns are W's rows. Any number of dimensions may stand where [b, s] does; with sequence
parallelism the tokens are dimension 1, and any number may follow.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from tpcode.comm import (
    SEQUENCE,
    all_gather,
    all_gather_async,
    all_reduce_async,
    gather_from_tp,
    group_rank,
    group_size,
    reduce_from_tp,
    reduce_scatter_async,
    reduce_scatter_sequence,
    scatter_to_tp,
)
from tpcode.layers.placement import Placement
from tpcode.shapes import divide, require_last_dim


class SplitLinear(nn.Module):
    """What the two layers share: this rank's shard of a weight, and the way from the dense layer and back.

    Attributes:
        placements: how weight and bias lie over the ranks.
        in_features, out_features: of the whole layer, without padding.
    """

    cut: int  # the weight's dimension along which it is split

    def __init__(self, weight: Tensor, bias: Tensor | None, placement: Placement | None, group: ProcessGroup | None):
        super().__init__()
        if weight.dim() != 2:
            raise ValueError(f"{self._name}: the weight must be [out, in] and its shape is {list(weight.shape)}")
        t = group_size(group)
        placement = placement or Placement(self.cut, (t * weight.shape[self.cut],))
        self.placements = {"weight": placement, "bias": self._bias_placement(placement)}
        self._require_shard(weight, bias, t)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.group = group
        whole = list(weight.shape)
        whole[self.cut] = placement.true_size
        self.out_features, self.in_features = whole

    @classmethod
    def from_dense(
        cls,
        dense: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        segments: tuple[int, ...] | None = None,
        pad: bool = False,
        **options,
    ) -> Self:
        """This rank's shard of a dense layer, which every rank of the group has alike. Frozen stays frozen.

        Args:
            segments: sizes of the parts of a fused matrix; each rank gets a share of each.
            pad: fill up with zeros where t does not divide.
            options: as the class takes them.

        Raises:
            TypeError: dense is no `nn.Linear`.
            ValueError: t does not divide, and pad is not set; the message has the sizes of t that work.
        """
        if not isinstance(dense, nn.Linear):
            raise TypeError(f"{cls.__name__}.from_dense takes a torch.nn.Linear, and this is {type(dense).__name__}")
        placement = Placement(cls.cut, segments or (dense.weight.shape[cls.cut],), pad=pad)
        what = f"{cls.__name__}'s {('out_features', 'in_features')[cls.cut]}"
        rank, t = group_rank(group), group_size(group)
        weight = placement.shard(dense.weight.detach(), rank, t, what)
        bias = None if dense.bias is None else cls._bias_placement(placement).shard(dense.bias.detach(), rank, t, what)
        layer = cls(weight, bias, placement=placement, group=group, **options)
        return freeze_like(dense, layer)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The whole layer, gathered on every rank, without padding. Every rank of the group calls it."""
        whole = {
            name: self.placements[name].merge(all_gather(shard.unsqueeze(0), 0, self.group).unbind())
            for name, shard in self.named_parameters()
        }
        return freeze_like(self, linear_of(**whole))

    @classmethod
    def _bias_placement(cls, weight: Placement) -> Placement:
        raise NotImplementedError

    def _require_shard(self, weight: Tensor, bias: Tensor | None, t: int) -> None:
        size = self.placements["weight"].shard_size(t)
        if weight.shape[self.cut] != size:
            raise ValueError(
                f"{self._name}: a rank of t = {t} holds {size} along dimension {self.cut} of the weight, and this "
                f"weight is {list(weight.shape)}; from_dense cuts a whole one"
            )
        if bias is not None and list(bias.shape) != [weight.shape[0]]:
            raise ValueError(
                f"{self._name}: a weight {list(weight.shape)} goes with a bias [{weight.shape[0]}], and this bias is "
                f"{list(bias.shape)}"
            )

    def _require_whole_features(self, option: str) -> None:
        placement, t = self.placements["weight"], group_size(self.group)
        if len(placement.segments) > 1 or placement.shard_size(t) * t != placement.true_size:
            raise ValueError(
                f"{self._name}: {option} needs shards that lie side by side in the whole, and these are of the fused "
                f"or padded segments {list(placement.segments)} over t = {t}"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        shard = list(self.weight.shape)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, shard={shard}"


class ColumnParallelLinear(SplitLinear):
    """`Y = X Wᵀ + bias` with the output features split over the group.

    Rank r holds W_r, which is F/t rows of the weight: F/t columns of the paper's A.

        forward   Y_r     = X W_rᵀ + bias_r       [b, s, h] -> [b, s, F/t]     silent
        dgrad     dX      = Σ_r dY_r W_r          [b, s, F/t] -> [b, s, h]     all-reduce: copy (f)
        wgrad     dW_r    = dY_rᵀ X               [F/t, h]                     silent: W_r lives here alone
        dbias     dbias_r = Σ_tokens dY_r         [F/t]                        silent

    The all-reduce of dX is under way while dW_r is computed. X must be the same on every rank.

    With `sequence_parallel` rank r has tokens of its own, X_r, and needs those of all:

        forward   Y_r     = X W_rᵀ + bias_r       [b, s/t, h] -> [b, s, F/t]   all-gather of X
        dgrad     dX_r    = (Σ_r dY_r W_r)_r      [b, s, F/t] -> [b, s/t, h]   reduce-scatter
        wgrad     dW_r    = dY_rᵀ X               [F/t, h]                     all-gather of X, which was not kept
        dbias     dbias_r = Σ_tokens dY_r         [F/t]                        silent

    For backward it keeps X_r alone. The second gather is under way while dY_r W_r is computed, the reduce-scatter while
    dW_r is.

    Args:
        weight, bias: this rank's rows, as `from_dense` cuts them.
        placement: how the weight is cut; None is plainly, in t pieces.
        gather_output: return [b, s, F] on every rank instead of this rank's [b, s, F/t]: one all-gather more. Its
            backward takes dY to be the same on every rank.
        sequence_parallel: the input is this rank's s/t tokens. Whole ones cannot be told from them by their shape: t
            copies of a sequence are a sequence too.
        group: the tensor-parallel ranks; None is all of them.

    Raises:
        ValueError: t does not divide F; the input's last dimension is not h; a bias that does not fit the weight;
            gather_output with a fused or padded weight; sequence_parallel, and the input is not [b, s/t, ..., h].
        TypeError: the input's dtype is not the weight's.
    """

    cut = 0

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        placement: Placement | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
    ):
        super().__init__(weight, bias, placement, group)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        if gather_output:
            self._require_whole_features("gather_output=True")

    def forward(self, x: Tensor) -> Tensor:
        require_input(x, self.weight, self.in_features, self._name)
        if self.sequence_parallel:
            require_tokens(x, self._name)
        y = self.product(*as_linear_casts(x, self.weight, self.bias))  # [b, s, h] or [b, s/t, h] -> [b, s, F/t]
        return gather_from_tp(y, self.group) if self.gather_output else y  # [b, s, F/t] -> [b, s, F]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`X W_rᵀ + bias_r`, with what its backward sends."""
        return column_product(x, weight, bias, self.group, self.sequence_parallel)

    @classmethod
    def _bias_placement(cls, weight: Placement) -> Placement:
        return weight  # an entry of the bias goes with its row


class RowParallelLinear(SplitLinear):
    """`Y = X Wᵀ + bias` with the input features split over the group.

    Rank r holds W_r, which is F/t columns of the weight: F/t rows of the paper's B.

        forward   Y       = Σ_r X_r W_rᵀ + bias   [b, s, F/t] -> [b, s, h]     all-reduce: reduce (g)
        dgrad     dX_r    = dY W_r                [b, s, h] -> [b, s, F/t]     silent: dY is whole on every rank
        wgrad     dW_r    = dYᵀ X_r               [h, F/t]                     silent
        dbias     dbias   = Σ_tokens dY           [h]                          silent: the same on every rank

    The bias is not split, and is added once, after the sum.

    With `sequence_parallel` each rank keeps the sum for tokens of its own:

        forward   Y_r     = (Σ_r X_r W_rᵀ)_r + bias   [b, s, F/t] -> [b, s/t, h]   reduce-scatter
        dgrad     dX_r    = dY W_r                    [b, s/t, h] -> [b, s, F/t]   all-gather of dY, once for both
        wgrad     dW_r    = dYᵀ X_r                   [h, F/t]
        dbias     dbias   = Σ_r Σ_tokens of r dY_r    [h]                          a part: `finalize_grads` sums it

    Args:
        weight: this rank's columns, as `from_dense` cuts them.
        bias: the whole bias.
        placement: how the weight is cut; None is plainly, in t pieces.
        input_is_parallel: the input is this rank's [b, s, F/t], as a column-parallel layer leaves it. If not, it is
            [b, s, F], the same on every rank, and this rank takes its slice: backward gathers dX.
        sequence_parallel: the output is this rank's s/t tokens.
        group: the tensor-parallel ranks; None is all of them.

    Raises:
        ValueError: t does not divide F; the input's last dimension is not F/t (or F); a bias that does not fit the
            weight; input_is_parallel=False with a fused or padded weight; sequence_parallel, and t does not divide s.
        TypeError: the input's dtype is not the weight's.
    """

    cut = 1

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        placement: Placement | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
    ):
        super().__init__(weight, bias, placement, group)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.placements["bias"] = Placement(partial_grad=sequence_parallel)
        if not input_is_parallel:
            self._require_whole_features("input_is_parallel=False")

    def forward(self, x: Tensor) -> Tensor:
        if self.input_is_parallel:
            hint = f"input_is_parallel=False takes all {self.in_features} features"
            require_input(x, self.weight, self.weight.shape[1], f"{self._name}, this rank's shard", hint)
        else:
            require_input(x, self.weight, self.in_features, self._name, "input_is_parallel=True takes a shard")
            x = scatter_to_tp(x, self.group)  # [b, s, F] -> [b, s, F/t]
        if self.sequence_parallel:
            require_tokens(x, self._name, group_size(self.group))
        y = self.summed_product(x)  # [b, s, F/t] -> [b, s, h] or [b, s/t, h]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def summed_product(self, x: Tensor) -> Tensor:
        """`Σ_r X_r W_rᵀ`, of all tokens or of this rank's."""
        parts = linear(x, self.weight)  # [b, s, F/t] -> [b, s, h]
        summed = reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp
        return summed(parts, self.group)

    @classmethod
    def _bias_placement(cls, weight: Placement) -> Placement:
        return Placement()


class _ColumnProduct(torch.autograd.Function):
    """Copy (f) and the product in one autograd node, so that backward can overlap the two."""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        need_dx, need_dw, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_dw else None, weight if need_dx else None)
        ctx.group = group
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_dbias, _ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if need_dx:
            dx, reduced = all_reduce_async(dy @ weight, ctx.group)  # [b, s, F/t] [F/t, h] -> [b, s, h], in parts
        tokens = dy.reshape(-1, dy.shape[-1])  # [b, s, F/t] -> [b·s, F/t]
        if need_dw:
            dweight = tokens.t() @ x.reshape(-1, x.shape[-1])  # [F/t, b·s] [b·s, h] -> [F/t, h]
        if need_dbias:
            dbias = tokens.sum(0)  # [b·s, F/t] -> [F/t]
        if need_dx:
            reduced.wait()
        return dx, dweight, dbias, None


class _GatheredColumnProduct(torch.autograd.Function):
    """The same for a rank's own tokens: all-gather and product in one node, which keeps the slice and not the whole."""

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        need_dx, need_dw, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_dw else None, weight if need_dx else None)
        ctx.group = group
        return linear(all_gather(x, SEQUENCE, group), weight, bias)  # [b, s/t, h] -> [b, s, h] -> [b, s, F/t]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_dbias, _ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if need_dw:
            x, gathered = all_gather_async(x, SEQUENCE, ctx.group)  # [b, s/t, h] -> [b, s, h]
        if need_dx:
            parts = dy @ weight  # [b, s, F/t] [F/t, h] -> [b, s, h]
            dx, reduced = reduce_scatter_async(parts, SEQUENCE, ctx.group)  # -> [b, s/t, h]
        tokens = dy.reshape(-1, dy.shape[-1])  # [b, s, F/t] -> [b·s, F/t]
        if need_dbias:
            dbias = tokens.sum(0)  # [b·s, F/t] -> [F/t]
        if need_dw:
            gathered.wait()
            dweight = tokens.t() @ x.reshape(-1, x.shape[-1])  # [F/t, b·s] [b·s, h] -> [F/t, h]
        if need_dx:
            reduced.wait()
        return dx, dweight, dbias, None


def column_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """`X W_rᵀ + bias_r` of X, the same on every rank, or, with sequence parallelism, of the X whose tokens lie over the
    ranks: [b, s, h] or [b, s/t, h] -> [b, s, F/t]."""
    return (_GatheredColumnProduct if sequence_parallel else _ColumnProduct).apply(x, weight, bias, group)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A dense layer of these tensors, without drawing random ones first."""
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    dense.weight = nn.Parameter(weight)
    dense.bias = None if bias is None else nn.Parameter(bias)
    return dense


def require_input(x: Tensor, weight: Tensor, features: int, what: str, hint: str = "") -> None:
    """Refuse an input that the weight cannot multiply: on every rank, before any of them waits for another.

    Raises:
        TypeError: no tensor, or not of the weight's dtype (as autocast would cast them).
        ValueError: the last dimension is not `features`.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: the input must be a tensor and is {type(x).__name__}")
    if dtype_in_linear(x) != dtype_in_linear(weight):
        raise TypeError(f"{what}: the input is {x.dtype} and the weight {weight.dtype}; convert one of them with .to()")
    require_last_dim(x, features, what, hint)


def require_tokens(x: Tensor, what: str, t: int = 1) -> None:
    """Refuse with a ValueError what has no sequence to gather or to scatter, or one that t does not divide."""
    if x.dim() < 3:
        raise ValueError(
            f"{what}: with sequence_parallel=True dimension 1 is the sequence, [b, s, ...], and the input's shape is "
            f"{list(x.shape)}; give it its batch dimension"
        )
    require_split_sequence(x.shape[SEQUENCE], t, what)


def require_split_sequence(s: int, t: int, what: str, hint: str = "") -> int:
    """s/t, the tokens of each rank.

    Raises:
        ValueError: t does not divide s; the message has both, the sizes of t that do, and lengths that work.
    """
    lengths = f"lengths that work here are the multiples of {t}, such as {-(-s // t) * t}"
    return divide(s, t, f"{what}: with sequence_parallel=True the sequence s", hint=f"{lengths}{hint and ', ' + hint}")


def as_linear_casts(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands as `torch.nn.functional.linear` casts them under autocast.

    Done outside of an `autograd.Function`, the casts are part of the graph, and gradients come back in each operand's
    own dtype.
    """
    return tuple(None if tensor is None else tensor.to(dtype_in_linear(tensor)) for tensor in operands)


def dtype_in_linear(tensor: Tensor) -> torch.dtype:
    """The dtype in which `linear` computes with this tensor: autocast's, if that is on; it leaves float64 alone."""
    device, floating = tensor.device.type, tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if floating and torch.is_autocast_enabled(device) else tensor.dtype


def freeze_like(source: nn.Module, target: nn.Module) -> nn.Module:
    """target, whose parameters take a gradient where source's of the same name do."""
    for name, parameter in source.named_parameters():
        target.get_parameter(name).requires_grad_(parameter.requires_grad)
    return target
