"""The two ends of a model, where the vocabulary is split: embedding, head, cross-entropy (Shoeybi et al. 2019, s. 3).

Symbols: b microbatch, s sequence, h hidden, V vocabulary, t ranks, r this rank. Rank r holds the ids from r·W up to
(r+1)·W, where W is V/t, or more with padding; ids from V on are padding and stand for no word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding

from tpcode.comm import all_gather, all_reduce, group_rank, group_size, reduce_from_tp, reduce_scatter_sequence
from tpcode.layers.linear import (
    ColumnParallelLinear,
    as_linear_casts,
    column_product,
    freeze_like,
    require_input,
    require_split_sequence,
    require_tokens,
)
from tpcode.layers.placement import Placement
from tpcode.shapes import padded_vocab, require_int

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class VocabPlacement(Placement):
    """V rows over t ranks, filled up with zeros to a multiple of `multiple` on each: 128 makes full tiles of a GEMM.

    The padding belongs to t and not to the model: `merge` takes it off, and the next t adds its own.
    """

    multiple: int = 1

    def _shares(self, t: int, what: str = "vocabulary V") -> list[int]:
        return [padded_vocab(self.true_size, t, self.multiple) // t]

    @classmethod
    def of(cls, V: int, multiple: int) -> VocabPlacement:
        """For a table of V rows.

        Raises:
            ValueError, TypeError: multiple is no positive integer.
        """
        return cls(0, (V,), pad=True, multiple=require_int(multiple, "multiple"))


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [V, h], split over the group: ids [b, s] -> [b, s, h], the same on every rank.

        forward   X    = Σ_r (rows of E_r, zero where the id is another rank's)   [b, s, h]   all-reduce: reduce (g)
        backward  dE_r = rows of dX added where the id is this rank's            [V/t, h]    silent

    Of the t terms of a row's sum one is the row, and the others are zeros: nothing is rounded.

    With `sequence_parallel` each rank looks up all ids, and keeps the sum for tokens of its own: X_r is [b, s/t, h], by
    a reduce-scatter forward and an all-gather of dX backward.

    Args:
        weight: this rank's rows, as `from_dense` cuts them.
        placement: how the table is cut and padded; None is plainly, in t pieces.
        sequence_parallel: the output is this rank's s/t tokens; the ids are all of them as ever.
        group: the tensor-parallel ranks; None is all of them.

    Raises:
        ValueError: an id is not in the vocabulary; sequence_parallel, and t does not divide s: on every rank alike,
            before anything is sent.
        TypeError: ids are no integers.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        placement: Placement | None = None,
        sequence_parallel: bool = False,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        t = group_size(group)
        placement = placement or Placement(0, (t * len(weight),))
        if weight.dim() != 2 or len(weight) != placement.shard_size(t):
            raise ValueError(
                f"VocabParallelEmbedding: a rank of t = {t} holds [{placement.shard_size(t)}, h] of the table, and "
                f"this weight is {list(weight.shape)}; from_dense cuts a whole one"
            )
        self.weight, self.group, self.sequence_parallel = nn.Parameter(weight), group, sequence_parallel
        self.placements = {"weight": placement}

    @classmethod
    def from_dense(
        cls, dense: nn.Embedding, group: ProcessGroup | None = None, *, multiple: int = 1, **options
    ) -> Self:
        """This rank's rows of a dense embedding, which every rank of the group has alike.

        Args:
            multiple: the rows of each rank are filled up with zeros to a multiple of this. t need not divide V.
            options: as the class takes them.

        Raises:
            TypeError: dense is no `nn.Embedding`.
            ValueError: it has one of torch's options that change what is looked up or learned.
        """
        _require_plain_embedding(dense)
        placement = VocabPlacement.of(dense.num_embeddings, multiple)
        weight = placement.shard(dense.weight.detach(), group_rank(group), group_size(group))
        return freeze_like(dense, cls(weight, placement=placement, group=group, **options))

    @torch.no_grad()
    def to_dense(self) -> nn.Embedding:
        """The whole embedding, gathered on every rank, without padding. Every rank of the group calls it."""
        shards = all_gather(self.weight.unsqueeze(0), 0, self.group).unbind()
        whole = self.placements["weight"].merge(shards)
        return freeze_like(self, nn.Embedding.from_pretrained(whole, freeze=False))

    @property
    def vocab_size(self) -> int:
        """V, without padding."""
        return self.placements["weight"].true_size

    def forward(self, ids: Tensor) -> Tensor:
        _require_ids(ids, self.vocab_size, "VocabParallelEmbedding: ids")
        if self.sequence_parallel:
            _require_split_ids(ids, self.group)
        local, mine = _local(ids, len(self.weight), self.group)
        rows = embedding(local, self.weight)  # [b, s] -> [b, s, h]
        own = rows.masked_fill(~mine.unsqueeze(-1), 0)
        return reduce_scatter_sequence(own, self.group) if self.sequence_parallel else reduce_from_tp(own, self.group)

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.weight.shape[1]}, shard={list(self.weight.shape)}"


class VocabParallelHead(ColumnParallelLinear):
    """The output head, with a weight of its own: `logits_r = X W_rᵀ`, [b, s, h] -> [b, s, V/t].

    It is a column-parallel layer over the padded vocabulary, and its logits stay where they are: the cross-entropy
    takes each rank's share. The loss sends nothing backward; the head does, dX, for every rank used X.

    With `sequence_parallel` it gathers the tokens as any column-parallel layer does: the logits are of all tokens, and
    the loss does not change.
    """

    @classmethod
    def from_dense(cls, dense: nn.Linear, group: ProcessGroup | None = None, *, multiple: int = 1, **options) -> Self:
        """This rank's rows of a dense head.

        Args:
            multiple: as for the embedding.
            options: as the class takes them.

        Raises:
            TypeError: dense is no `nn.Linear`.
        """
        if not isinstance(dense, nn.Linear):
            raise TypeError(f"{cls.__name__}.from_dense takes a torch.nn.Linear, and this is {type(dense).__name__}")
        placement = VocabPlacement.of(dense.out_features, multiple)
        rank, t = group_rank(group), group_size(group)
        shards = {name: placement.shard(p.detach(), rank, t) for name, p in dense.named_parameters()}
        return freeze_like(dense, cls(**shards, placement=placement, group=group, **options))

    @property
    def vocab_size(self) -> int:
        """V, without padding."""
        return self.out_features


class TiedHead(nn.Module):
    """The output head whose weight is the embedding's: `logits_r = X E_rᵀ`, [b, s, h] -> [b, s, V/t].

    It holds no parameter. It reads the embedding's, so that the two cannot come apart: not by sharding, not by loading,
    not by a step. The gradient is the sum of both uses, on each rank of its own rows, and nothing is sent for it.

    Args:
        embedding: whose weight it is.
        sequence_parallel: the input is this rank's s/t tokens, as for any column-parallel layer.
    """

    def __init__(self, embedding: VocabParallelEmbedding, *, sequence_parallel: bool = False):
        super().__init__()
        if not isinstance(embedding, VocabParallelEmbedding):
            raise TypeError(f"TiedHead takes a VocabParallelEmbedding, and this is a {type(embedding).__name__}")
        self.sequence_parallel = sequence_parallel
        self._embedding = (embedding,)  # in a tuple, so that its parameter is not registered a second time

    @property
    def weight(self) -> nn.Parameter:
        """The embedding's parameter."""
        return self._embedding[0].weight

    @property
    def vocab_size(self) -> int:
        """V, without padding."""
        return self._embedding[0].vocab_size

    def forward(self, x: Tensor) -> Tensor:
        require_input(x, self.weight, self.weight.shape[1], "TiedHead")
        if self.sequence_parallel:
            require_tokens(x, "TiedHead")
        operands = as_linear_casts(x, self.weight, None)
        return column_product(*operands, self._embedding[0].group, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"tied to {self._embedding[0]}"


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits that lie over the group by vocabulary, the same on every rank.

    With z the logits less the largest of all, and y the target:

        loss = log Σ_V exp(z) - z_y

        forward   largest logit            [b, s]   all-reduce MAX
                  z_y, from its rank       [b, s]   all-reduce SUM
                  Σ exp(z)                 [b, s]   all-reduce SUM
        backward  dlogits_r = (softmax_r - one-hot_r(y)) dloss    silent: the rank has all of the sum already

    That is 12 bytes a token, where gathering the logits takes 4V. With label smoothing ε the loss is
    (1 - ε) of the above and ε of the same averaged over all V targets; Σ_V z goes along with z_y in one all-reduce.
    It computes in float32 for half floats, in float64 for float64, and leaves the logits as they are.

    Args:
        logits: this rank's [b, s, V/t], padding included. Any number of dimensions may stand where [b, s] does.
        targets: [b, s] ids of the whole vocabulary, the same on every rank.
        group: the tensor-parallel ranks; None is all of them.
        vocab_size: V, without padding; None says that nothing is padded. Padding takes no part, and gets gradient 0.
        ignore_index: a token with this target has loss 0, gradient 0, and no part in the mean.
        label_smoothing: ε, from 0 to 1.
        reduction: "mean" over the tokens that are not ignored (0 where all are; torch gives nan), "sum" or "none".

    Returns:
        The loss: a scalar, or [b, s] with reduction "none"; float32 for half floats.

    Raises:
        ValueError: a target is not in the vocabulary; shapes do not fit; no such reduction or smoothing.
        TypeError: logits are no floats, targets no integers.
    """
    width, t = _require_logits(logits), group_size(group)
    V = t * width if vocab_size is None else require_int(vocab_size, "vocabulary V")
    _require_loss_arguments(logits, targets, V, t, label_smoothing, reduction)
    valid = targets != ignore_index
    _require_ids(targets[valid], V, "vocab_parallel_cross_entropy: targets")
    loss = _CrossEntropy.apply(logits, targets.long(), valid, V, label_smoothing, group)  # [b, s]
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / valid.sum().clamp(min=1)


class _CrossEntropy(Function):
    """The loss of each token. Kept for backward: the caller's logits, not a copy of them, and a few numbers a token."""

    @staticmethod
    def forward(ctx, logits, targets, valid, V, smoothing, group):
        width = logits.shape[-1]
        words = _words(width, V, group)
        z = logits.to(_wide(logits))
        if words < width:
            z = z.masked_fill(torch.arange(width, device=z.device) >= words, -torch.inf)
        largest = all_reduce(z.amax(-1), "max", group)  # [b, s, V/t] -> [b, s]
        z = z - largest.unsqueeze(-1)

        local, mine = _local(targets, width, group)
        mine = mine & valid
        of_target = torch.where(mine, z.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0)  # [b, s]
        if smoothing:
            both = torch.stack([of_target, z[..., :words].sum(-1)])  # [2, b, s]
            of_target, of_all = all_reduce(both, group=group)
            gain = (1 - smoothing) * of_target + smoothing / V * of_all
        else:
            gain = all_reduce(of_target, group=group)
        log_total = all_reduce(z.exp_().sum(-1), group=group).log()  # [b, s]

        ctx.save_for_backward(logits, log_total + largest, local, mine, valid)
        ctx.V, ctx.smoothing, ctx.words = V, smoothing, words
        return torch.where(valid, log_total - gain, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, log_total, local, mine, valid = ctx.saved_tensors
        dlogits = (logits.to(log_total.dtype) - log_total.unsqueeze(-1)).exp_()  # the softmax: [b, s, V/t]
        dlogits -= ctx.smoothing / ctx.V
        dlogits.scatter_add_(-1, local.unsqueeze(-1), (ctx.smoothing - 1) * mine.to(dlogits.dtype).unsqueeze(-1))
        dlogits *= dloss.unsqueeze(-1)
        dlogits.masked_fill_(~valid.unsqueeze(-1), 0)
        dlogits[..., ctx.words :] = 0
        return dlogits.to(logits.dtype), None, None, None, None, None


@torch.no_grad()
def vocab_parallel_argmax(
    logits: Tensor, group: ProcessGroup | None = None, *, vocab_size: int | None = None
) -> Tensor:
    """The id of the largest logit, the same on every rank: [b, s, V/t] -> [b, s]; of several the lowest. Two
    all-reduces of [b, s]: MAX of the logits, MIN of the ids that reach it. Padding never wins.

    Args:
        logits, group, vocab_size: as for `vocab_parallel_cross_entropy`.
    """
    width, t = _require_logits(logits), group_size(group)
    V = t * width if vocab_size is None else require_int(vocab_size, "vocabulary V")
    _require_vocab(V, width, t)
    words, first = _words(width, V, group), group_rank(group) * width
    z = logits.masked_fill(torch.arange(width, device=logits.device) >= words, -torch.inf)
    own, id_of_own = z.max(-1)
    largest = all_reduce(own, "max", group)
    return all_reduce(torch.where(own == largest, id_of_own + first, V), "min", group)


# ---- whose id is it -------------------------------------------------------------------------------------------------


def _local(ids: Tensor, width: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Each id's row on this rank (0 where it has none: a negative one would be read from the end), and whether it has
    one."""
    local = ids - group_rank(group) * width
    mine = (local >= 0) & (local < width)
    return local.masked_fill(~mine, 0), mine


def _words(width: int, V: int, group: ProcessGroup | None) -> int:
    """How many of this rank's ids are words; the rest, at the end, is padding."""
    return min(max(V - group_rank(group) * width, 0), width)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


# ---- bad input ------------------------------------------------------------------------------------------------------


def _require_ids(ids: Tensor, V: int, what: str) -> None:
    """Refuse ids that are no integers, or not from 0 to V - 1."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{what} must be a tensor and not a {type(ids).__name__}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{what} must be integers and are {ids.dtype}; convert them with .long()")
    if ids.numel():
        lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= V:
            raise ValueError(f"{what} must be from 0 to {V - 1}, and these go from {lowest} to {highest}")


def _require_split_ids(ids: Tensor, group: ProcessGroup | None) -> None:
    """Refuse ids whose sequence is not split over the ranks."""
    if ids.dim() < 2:
        raise ValueError(
            f"VocabParallelEmbedding: with sequence_parallel=True ids must be [b, s], and their shape is "
            f"{list(ids.shape)}; give them their batch dimension"
        )
    require_split_sequence(ids.shape[1], group_size(group), "VocabParallelEmbedding")


def _require_logits(logits: Tensor) -> int:
    """The width of this rank's logits."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        found = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a tensor of floats and are {found}")
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"logits must be [..., V/t] and their shape is {list(logits.shape)}")
    return logits.shape[-1]


def _require_vocab(V: int, width: int, t: int) -> None:
    if t * width < V:
        raise ValueError(f"{t} ranks with {width} logits each have {t * width} in all, and vocab_size is {V}")


def _require_loss_arguments(logits, targets, V: int, t: int, label_smoothing: float, reduction: str) -> None:
    _require_vocab(V, logits.shape[-1], t)
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor and not a {type(targets).__name__}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets {list(targets.shape)} do not fit logits {list(logits.shape)}: one target for each token, "
            f"{list(logits.shape[:-1])}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1 and is {label_smoothing}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)} and is {reduction!r}")


def _require_plain_embedding(dense: nn.Embedding) -> None:
    if not isinstance(dense, nn.Embedding):
        raise TypeError(
            f"VocabParallelEmbedding.from_dense takes a torch.nn.Embedding, and this is a {type(dense).__name__}"
        )
    for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
        value = getattr(dense, option)
        if value is not None and value is not False:
            raise ValueError(f"VocabParallelEmbedding has no {option}, and the dense embedding has {option}={value}")
