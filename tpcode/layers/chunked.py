"""A column and row pair that sends while it multiplies: each product before an all-reduce is made in chunks of the
tokens, and the sum of one chunk is under way while the next is multiplied.

Symbols as in `linear`. With c chunks there are c all-reduces of 1/c of the payload each: the same bytes, c latencies,
and only the last one has nothing to hide behind. The layers give the numbers of those that they are made of. (The
idea, with a finer grain: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2023.)
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from tpcode.comm import all_reduce_async
from tpcode.comm.collectives import Handle
from tpcode.dense import FFN
from tpcode.layers.ffn import ParallelFFN
from tpcode.layers.linear import ColumnParallelLinear, RowParallelLinear, as_linear_casts
from tpcode.shapes import require_int


class ChunkedColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` whose backward multiplies and sums dX in chunks of the tokens.

        dgrad     dX of chunk i   = Σ_r dY_r[i] W_r   under way while chunk i + 1 is multiplied, then dW_r

    Args:
        chunks: how many; 1 is the plain layer. No more than there are tokens are made.
        options: as `ColumnParallelLinear`.

    Raises:
        ValueError: chunks is not positive, or above 1 with sequence_parallel.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, chunks: int = 1, **options):
        super().__init__(weight, bias, **options)
        self.chunks = _require_chunks(chunks, self)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[b, s, h] -> [b, s, F/t]."""
        if self.chunks == 1:
            return super().product(x, weight, bias)
        return _ColumnProductInChunks.apply(x, weight, bias, self.chunks, self.group)


class ChunkedRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` whose forward multiplies and sums in chunks of the tokens.

        forward   Y of chunk i    = Σ_r X_r[i] W_rᵀ   under way while chunk i + 1 is multiplied

    Args:
        chunks: how many; 1 is the plain layer. No more than there are tokens are made.
        options: as `RowParallelLinear`.

    Raises:
        ValueError: chunks is not positive, or above 1 with sequence_parallel.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, chunks: int = 1, **options):
        super().__init__(weight, bias, **options)
        self.chunks = _require_chunks(chunks, self)

    def summed_product(self, x: Tensor) -> Tensor:
        """[b, s, F/t] -> [b, s, h]."""
        if self.chunks == 1:
            return super().summed_product(x)
        return _RowProductInChunks.apply(*as_linear_casts(x, self.weight), self.chunks, self.group)


class ChunkedFFN(ParallelFFN):
    """`ParallelFFN` of the two: forward's all-reduce hides behind Z_r B_rᵀ, backward's behind dH_r A_r and dA_r."""

    @classmethod
    def from_dense(cls, dense: FFN, group: ProcessGroup | None = None, *, chunks: int = 1) -> Self:
        """This rank's shard of a dense FFN, which every rank of the group has alike.

        Args:
            chunks: into how many parts the tokens are cut; 1 is `ParallelFFN`.

        Raises:
            TypeError: dense is no `tpcode.dense.FFN`.
            ValueError: t does not divide F; chunks is not positive.
        """
        if not isinstance(dense, FFN):
            raise TypeError(f"{cls.__name__}.from_dense takes a tpcode.dense.FFN, and this is a {type(dense).__name__}")
        c_fc = ChunkedColumnParallelLinear.from_dense(dense.c_fc, group, chunks=chunks)
        c_proj = ChunkedRowParallelLinear.from_dense(dense.c_proj, group, chunks=chunks)
        return cls(c_fc, c_proj, dense.activation)


class _ColumnProductInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, chunks, group):
        need_dx, need_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_dw else None, weight if need_dx else None)
        ctx.chunks, ctx.group = chunks, group
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_dbias, _, _ = ctx.needs_input_grad
        dx = dweight = dbias = None
        tokens = _tokens(dy)  # [b, s, F/t] -> [n, F/t]
        if need_dx:
            under_way = _launch_in_chunks(tokens, weight, ctx.chunks, ctx.group)  # [n, F/t] [F/t, h] -> [n, h]
        if need_dw:
            dweight = tokens.t() @ _tokens(x)  # [F/t, n] [n, h] -> [F/t, h]
        if need_dbias:
            dbias = tokens.sum(0)  # [n, F/t] -> [F/t]
        if need_dx:
            dx = _collect(under_way).view(*dy.shape[:-1], weight.shape[1])  # [n, h] -> [b, s, h]
        return dx, dweight, dbias, None, None


class _RowProductInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, chunks, group):
        need_dx, need_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_dw else None, weight if need_dx else None)
        under_way = _launch_in_chunks(_tokens(x), weight.t(), chunks, group)  # [n, F/t] [F/t, h] -> [n, h]
        return _collect(under_way).view(*x.shape[:-1], weight.shape[0])  # [b, s, h]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_dx, need_dw, _, _ = ctx.needs_input_grad
        dx = dy @ weight if need_dx else None  # [b, s, h] [h, F/t] -> [b, s, F/t]: dY is whole on every rank
        dweight = _tokens(dy).t() @ _tokens(x) if need_dw else None  # [h, n] [n, F/t] -> [h, F/t]
        return dx, dweight, None, None


def _launch_in_chunks(
    x: Tensor, matrix: Tensor, chunks: int, group: ProcessGroup | None
) -> list[tuple[Tensor, Handle]]:
    """The sums over ranks of `x @ matrix`, chunk by chunk of x's rows, each launched as soon as it is multiplied."""
    parts = x.tensor_split(max(1, min(chunks, len(x))))
    return [all_reduce_async(part @ matrix, group) for part in parts]


def _collect(under_way: list[tuple[Tensor, Handle]]) -> Tensor:
    """Wait for all chunks, and put them together."""
    for _, handle in under_way:
        handle.wait()
    return torch.cat([part for part, _ in under_way])


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # [b, s, ...] -> [n, ...]


def _require_chunks(chunks: int, layer: ColumnParallelLinear | RowParallelLinear) -> int:
    if require_int(chunks, "chunks") > 1 and layer.sequence_parallel:
        raise ValueError(
            f"{type(layer).__name__}: chunks = {chunks} is for an all-reduce, and with sequence_parallel=True there is "
            f"none; take chunks=1"
        )
    return chunks
