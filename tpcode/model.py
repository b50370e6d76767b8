"""A whole transformer on t ranks (Shoeybi et al. 2019, section 3; with sequence parallelism Korthikanti et al. 2022).

Symbols: b microbatch, s sequence, h hidden, V vocabulary, L layers, t ranks, r this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

from tpcode.comm import SEQUENCE, group_rank, group_size
from tpcode.config import ModelConfig
from tpcode.dense import FFN, MODELS, Decoder, KVCache, initial, require_ids
from tpcode.layers import (
    Dropout,
    LayerNorm,
    ParallelAttention,
    ParallelFFN,
    ParallelSwiGLU,
    Placement,
    RMSNorm,
    TiedHead,
    VocabParallelEmbedding,
    VocabParallelHead,
    placements,
    vocab_parallel_cross_entropy,
)
from tpcode.layers.attention import require_no_cache
from tpcode.layers.linear import require_split_sequence
from tpcode.layers.source import Read, Source
from tpcode.shapes import shard_range


class Block(nn.Module):
    """`X + attention(norm_1(X))`, then the same with the FFN: [b, s, h] -> [b, s, h], the same on every rank.

        forward    all-reduce of [b, s, h] at the end of the attention, and one at the end of the FFN: reduce (g)
        backward   all-reduce of [b, s, h] at the beginning of the FFN, and of the attention: copy (f)

    Four in all. Norms, dropout and additions between them are repeated on every rank, for all of the residual stream.

    With sequence parallelism the residual stream is [b, s/t, h], tokens of this rank's own, and these are done once:

        forward    for the attention, and for the FFN: all-gather, reduce-scatter
        backward   for each: all-gather of dY, all-gather of X once more, reduce-scatter of dX

    Six all-gathers and four reduce-scatters of [b, s, h], each with half of what an all-reduce has on the wire: 10
    units of (t-1)/t·bsh instead of 8.
    """

    def __init__(
        self,
        norm_1: nn.Module,
        attention: ParallelAttention,
        dropout_1: Dropout,
        norm_2: nn.Module,
        ffn: nn.Module,
        dropout_2: Dropout,
    ):
        super().__init__()
        self.norm_1, self.attention, self.dropout_1 = norm_1, attention, dropout_1
        self.norm_2, self.ffn, self.dropout_2 = norm_2, ffn, dropout_2

    @classmethod
    def from_dense(
        cls, dense: nn.Module, names: dict, group: ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> Self:
        """This rank's share of a dense block, whose parts have these names."""
        part = {name: getattr(dense, names[name]) for name in ("norm_1", "attention", "norm_2", "ffn")}
        ffn = ParallelFFN if isinstance(part["ffn"], FFN) else ParallelSwiGLU
        return cls(
            _norm(part["norm_1"], sequence_parallel),
            ParallelAttention.from_dense(part["attention"], group, sequence_parallel=sequence_parallel),
            _stream_dropout(dense.dropout_1, group, sequence_parallel),
            _norm(part["norm_2"], sequence_parallel),
            ffn.from_dense(part["ffn"], group, pad=True, sequence_parallel=sequence_parallel),
            _stream_dropout(dense.dropout_2, group, sequence_parallel),
        )

    def to_dense(self, dense: nn.Module, names: dict) -> None:
        """Put the whole parts into a dense block. Every rank of the group calls it."""
        for name in ("norm_1", "attention", "norm_2", "ffn"):
            setattr(dense, names[name], getattr(self, name).to_dense())
        dense.dropout_1, dense.dropout_2 = self.dropout_1.to_dense(), self.dropout_2.to_dense()

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.dropout_1(self.attention(self.norm_1(x), cache))
        return x + self.dropout_2(self.ffn(self.norm_2(x)))


class LearnedPositions(nn.Module):
    """A table [max_seq, h] of which every rank has all. Its gradient is the same on every rank; or a part, where each
    looks up the positions of its own tokens (`partial_grad`)."""

    def __init__(self, weight: Tensor, *, partial_grad: bool = False):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.placements = {"weight": Placement(partial_grad=partial_grad)}

    @classmethod
    def from_dense(cls, dense: nn.Embedding, *, partial_grad: bool = False) -> Self:
        """A copy."""
        positions = cls(dense.weight.detach().clone(), partial_grad=partial_grad)
        positions.weight.requires_grad_(dense.weight.requires_grad)
        return positions

    def to_dense(self) -> nn.Embedding:
        """The dense table. Nothing is sent."""
        return nn.Embedding.from_pretrained(self.weight.detach().clone(), freeze=not self.weight.requires_grad)

    def forward(self, positions: Tensor) -> Tensor:
        return embedding(positions, self.weight)  # [s] -> [s, h]


class ParallelTransformer(nn.Module):
    """A decoder of the GPT-2 or Llama family, split over the group: ids [b, s] -> logits_r [b, s, V/t].

    The residual stream X is the same on every rank from the embedding to the head. What one step sends:

        forward    embedding                       [b, s, h]     1 all-reduce
                   each block                      [b, s, h]     2
                   loss                            [b, s]        3: MAX, SUM, SUM
        backward   head: dX, which all ranks used  [b, s, h]     1
                   each block                      [b, s, h]     2
        recompute  each block, with `recompute`    [b, s, h]     2: its forward runs again

    Four all-reduces a layer, six with recomputation, and 2 of [b, s, h] and 3 of [b, s] for the two ends. (Where KV
    heads are replicated, the sums of their gradients come on top, see `ParallelAttention`.)

    With `sequence_parallel` the residual stream is [b, s/t, h] from the embedding to the head, tokens of this rank's
    own; ids, targets and logits are of all tokens as before. What one step sends of [b, s, h]:

        forward    embedding                       1 reduce-scatter
                   each block                      2 all-gathers, 2 reduce-scatters
                   head                            1 all-gather
        backward   head                            1 all-gather, 1 reduce-scatter
                   each block                      4 all-gathers, 2 reduce-scatters
                   embedding                       1 all-gather
        recompute  each block, with `recompute`    2 all-gathers, 2 reduce-scatters

    The gradients of norms, row biases and positions are parts then, and `finalize_grads` sums them: one small
    all-reduce a step. What is summed within backward (replicated KV heads, QK-norms) stays as it is.

    A new model has the weights that `initial` says for its seed, whatever t is. A rank makes one parameter whole at a
    time, and keeps its slice.

    Args:
        config: sizes. t must divide the query heads, and divide the KV heads or be a multiple of them. The FFN's width
            and the vocabulary are filled up with zeros where t does not divide them, which changes nothing.
        group: the tensor-parallel ranks; None is all of them.
        recompute: keep only each block's input for backward, and run the block's forward again. PyTorch would stop
            that at the last tensor that backward needs, which is often before the FFN's all-reduce, and send one less
            for it; here all of the block runs, as in Megatron-LM and in the papers' counts, whatever the dropout.
            Between a forward and its backward, leave `set_dropout_step` alone.
        sequence_parallel: split the residual stream along the sequence, which t must then divide. The weights do not
            depend on it.
        pad_sequence: with sequence_parallel, fill a sequence that t does not divide up at its end. No token reads a
            later one, so that the others' logits and all gradients stay what they are; the padding's are cut off. Not
            while there is dropout, whose masks are drawn for the sequence as it is.
        vocab_multiple: fill each rank's vocabulary up to a multiple of this.
        bias, core, seed, std, dtype, device: as for `tpcode.dense.Decoder`; on "meta" it has no values.

    Raises:
        ValueError: the heads do not split over t ranks; the message has the sizes of t that work. pad_sequence without
            sequence_parallel.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: ProcessGroup | None = None,
        *,
        recompute: bool = False,
        sequence_parallel: bool = False,
        pad_sequence: bool = False,
        vocab_multiple: int = 1,
        bias: bool | None = None,
        core: str = "sdpa",
        seed: int = 0,
        std: float | None = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if pad_sequence and not sequence_parallel:
            raise ValueError("pad_sequence=True goes with sequence_parallel=True: without it any length works as it is")
        self.group, self.recompute, self.vocab_multiple = group, recompute, vocab_multiple
        self.sequence_parallel, self.pad_sequence = sequence_parallel, pad_sequence
        dense = MODELS[config.family](config, bias=bias, core=core, seed=seed, dtype=dtype, device="meta")
        self._split(dense)
        if device is None or torch.device(device).type != "meta":
            self.initialise(seed, std)
            self.to(device=device)

    @classmethod
    def from_dense(cls, dense: Decoder, group: ProcessGroup | None = None, **options) -> Self:
        """This rank's share of a dense model, which every rank of the group has alike. Frozen stays frozen.

        Args:
            options: `recompute`, `sequence_parallel`, `pad_sequence` and `vocab_multiple`.

        Raises:
            TypeError: dense is no model of `tpcode.dense`.
        """
        if not isinstance(dense, Decoder):
            raise TypeError(
                f"{cls.__name__}.from_dense takes a GPT2 or Llama of tpcode.dense, and this is a {type(dense).__name__}"
            )
        model = cls(dense.config, group, bias=dense.bias, core=dense.core, device="meta", **options)
        model._split(dense)
        return model.train(dense.training)

    def to_dense(self) -> Decoder:
        """The whole model, gathered on every rank, without padding. Every rank of the group calls it."""
        dense = MODELS[self.config.family](self.config, bias=self.bias, core=self.core, seed=self.seed, device="meta")
        for name in ("embedding", "positions", "norm", "head"):
            if dense.part(name) is not None:
                dense.set_submodule(dense.names[name], getattr(self, name).to_dense())
        for block, whole in zip(self.blocks, dense.part("blocks"), strict=True):
            block.to_dense(whole, dense.names)
        dense.dropout = self.dropout.to_dense()
        return dense.train(self.training)

    def _split(self, dense: Decoder) -> None:
        """Take this rank's share of every part."""
        group, split_tokens = self.group, self.sequence_parallel
        vocab = {"multiple": self.vocab_multiple, "sequence_parallel": split_tokens}
        self.config, self.bias, self.core, self.seed = dense.config, dense.bias, dense.core, dense.seed
        self._wholes = {name: tuple(parameter.shape) for name, parameter in dense.named_parameters()}
        positions, head = dense.part("positions"), dense.part("head")
        self.embedding = VocabParallelEmbedding.from_dense(dense.part("embedding"), group, **vocab)
        if positions is not None:
            positions = LearnedPositions.from_dense(positions, partial_grad=split_tokens)
        self.positions = positions
        self.dropout = _stream_dropout(dense.dropout, group, split_tokens)
        self.blocks = nn.ModuleList(
            Block.from_dense(block, dense.names, group, sequence_parallel=split_tokens)
            for block in dense.part("blocks")
        )
        self.norm = _norm(dense.part("norm"), split_tokens)
        if head is None:
            self.head = TiedHead(self.embedding, sequence_parallel=split_tokens)
        else:
            self.head = VocabParallelHead.from_dense(head, group, **vocab)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, ids: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """The logits stay where the vocabulary is: [b, s] -> this rank's [b, s, V/t], padding included.

        Args:
            ids: all of them, the same on every rank, with sequence parallelism too.
            caches: one for each layer, with what the tokens before these have left; each is extended by these. Not with
                sequence parallelism.

        Raises:
            ValueError: ids are not [b, s], or not in the vocabulary; with the tokens before they are more than
                `config.max_seq`; they do not split over the ranks. On every rank alike, before anything is sent.
        """
        first, s = require_ids(ids, caches, self.config), ids.shape[1]
        if self.sequence_parallel:
            ids = self._splittable(ids, caches)  # [b, s], or longer
        x = self.embedding(ids)  # [b, s] -> [b, s, h], or this rank's [b, s/t, h]: so it stays until the head
        if self.positions is not None:
            x = x + self.positions(self._own_positions(first, ids))
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = self._run(block, x, caches and caches[i])
        logits = self.head(self.norm(x))  # -> [b, s, V/t]
        return logits if logits.shape[1] == s else logits[:, :s]

    def loss(self, ids: Tensor, targets: Tensor, **options) -> Tensor:
        """The cross-entropy of every token's target, the same on every rank: ids and targets [b, s] -> a scalar.

        Args:
            options: `ignore_index`, `label_smoothing`, `reduction`, see `vocab_parallel_cross_entropy`.

        Raises:
            ValueError: there is not one target for each id: a rank's share of one and the whole of the other, say. And
                as `forward`.
        """
        shapes = [list(tensor.shape) for tensor in (ids, targets) if isinstance(tensor, Tensor)]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            raise ValueError(
                f"ids are {shapes[0]} and targets {shapes[1]}: one target for each id, and all of both on every rank, "
                f"whether the model splits the sequence or not"
            )
        logits = self(ids)
        return vocab_parallel_cross_entropy(logits, targets, self.group, vocab_size=self.config.vocab, **options)

    def _run(self, block: Block, x: Tensor, cache: KVCache | None) -> Tensor:
        if not self.recompute or cache is not None or not torch.is_grad_enabled():
            return block(x, cache)
        # Dropout's masks come from (seed, place, step): no generator's state needs to be kept for them.
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    def _splittable(self, ids: Tensor, caches: Sequence[KVCache] | None) -> Tensor:
        """ids whose sequence t divides: as they are, or filled up at the end with the id 0."""
        if caches is not None:
            require_no_cache("ParallelTransformer")
        s, t = ids.shape[1], group_size(self.group)
        if s % t == 0 or not self.pad_sequence:
            require_split_sequence(s, t, "ParallelTransformer", hint="or pad_sequence=True")
            return ids
        if self.training and self.config.dropout:
            raise ValueError(
                f"ParallelTransformer: pad_sequence=True fills s = {s} up to {s + -s % t}, a multiple of t = {t}, and "
                f"dropout = {self.config.dropout} draws its masks for the sequence as it is; give it such a multiple, "
                f"or a model without dropout"
            )
        return pad(ids, (0, -s % t))

    def _own_positions(self, first: int, ids: Tensor) -> Tensor:
        """The positions of the tokens that are in this rank's residual stream. Padding has the last there is."""
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)
        if not self.sequence_parallel:
            return positions
        own = shard_range(ids.shape[1], group_rank(self.group), group_size(self.group), "the sequence s")
        return positions[own].clamp(max=self.config.max_seq - 1)

    # ---- parameters -------------------------------------------------------------------------------------------------

    @property
    def placements(self) -> dict[str, Placement]:
        """Every parameter's placement by name."""
        return placements(self)

    @property
    def sources(self) -> dict[str, Source]:
        """Of which dense parameters each of this model's is made, by name: the same at every t."""
        return {name: self._source(name, placement) for name, placement in self.placements.items()}

    @torch.no_grad()
    def initialise(self, seed: int = 0, std: float | None = 0.02) -> None:
        """Begin anew, with the weights that `initial` says: the same model at every t. Nothing is sent."""

        @lru_cache(maxsize=1)  # a fused parameter reads the same dense one in several pieces
        def whole(name: str) -> Tensor:
            return initial(name, self._wholes[name], self.config.layers, seed, std)

        self.fill(lambda name, dim, start, stop: whole(name).narrow(dim, start, stop - start))

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Give every parameter the values that `read(name, dim, start, stop)` has for the dense ones, this rank's
        slices alone. Nothing changes if it raises."""
        rank, t = group_rank(self.group), group_size(self.group)
        own = dict(self.named_parameters())
        shards = {name: source.shard(read, rank, t, own[name]) for name, source in self.sources.items()}
        self.load_state_dict(shards, assign=True)

    def _source(self, name: str, placement: Placement) -> Source:
        names = _dense_names(name, MODELS[self.config.family].names)
        dim, shape = placement.dim or 0, list(self._wholes[names[0]])
        sizes = [self._wholes[part][dim] for part in names]
        shape[dim] = sum(sizes)
        return Source(tuple(zip(names, sizes, strict=True)), tuple(shape), placement)


def _dense_names(name: str, names: dict[str, str | tuple[str, ...]]) -> list[str]:
    """ "blocks.3.ffn.gate_up.weight" is model.layers.3.mlp.gate_proj.weight and model.layers.3.mlp.up_proj.weight."""
    words = [names.get(word, word) for word in name.split(".")]
    return [".".join(choice) for choice in product(*((word,) if isinstance(word, str) else word for word in words))]


def _norm(dense: nn.Module, sequence_parallel: bool) -> LayerNorm | RMSNorm:
    cls = LayerNorm if isinstance(dense, nn.LayerNorm) else RMSNorm
    return cls.from_dense(dense, partial_grad=sequence_parallel)


def _stream_dropout(dense: nn.Module, group: ProcessGroup | None, sequence_parallel: bool) -> Dropout:
    """Of the residual stream, which is whole on every rank, or cut along the sequence."""
    return Dropout.from_dense(dense, group, dim=SEQUENCE if sequence_parallel else None)
