"""Attention by heads: column, then row, as in the FFN, cut at the borders of heads (Shoeybi et al. 2019, section 3).

Symbols: b microbatch, s sequence, h hidden, a query heads, k KV heads, d head size, t ranks, r this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call

from tpcode.comm import group_rank, group_size
from tpcode.dense import Attention, GPT2Attention, KVCache, attend, named_core, require_sequence
from tpcode.layers.dropout import Dropout
from tpcode.layers.linear import ColumnParallelLinear, RowParallelLinear, freeze_like, linear_of
from tpcode.layers.norm import AllHeadsNorm, HeadNorm
from tpcode.layers.placement import Placement, joined, placements
from tpcode.layers.replicas import copy_to_replicas, replica_group
from tpcode.shapes import HeadGroups, head_groups, require_rank


class ParallelAttention(nn.Module):
    """Causal self-attention with whole heads on each rank: [b, s, h] -> [b, s, h], the same on every rank.

    The softmax of a head needs all of that head's scores, and nothing of another's. So rank r holds a/t query heads
    and the KV heads that these read: k/t of them, or, where k < t, one, which then t/k neighbouring ranks hold.

        forward    Q_r, K_r, V_r = X qkv_rᵀ            [b, s, h] -> [b, s, heads_r·d]   silent
                   M_r = softmax(Q_r K_rᵀ / √d) V_r    [b, s, a/t·d]                    silent
                   Y   = Σ_r M_r o_proj_rᵀ             [b, s, a/t·d] -> [b, s, h]       all-reduce: reduce (g)
        backward   dM_r, dQ_r, dK_r, dV_r                                               silent
                   dX  = Σ_r [dQ_r dK_r dV_r] qkv_r    [b, s, heads_r·d] -> [b, s, h]   all-reduce: copy (f)
                   dqkv_r                              [heads_r·d, h]                   silent where k is at least t

    Q, K and V are one matrix and one product. Its rows lie by KV group: a group's a/k query heads, its key head, its
    value head. Cut in t plain pieces where t divides k, each rank so gets whole groups.

    *Replicas.* A KV head on several ranks is used by each of them for query heads of its own: every one of these ranks
    holds a part of the head's gradient. The rule is the same as for X, and so is the cure: copy (f), here on the
    weight's K and V rows, and over the t/k ranks alone. The parts are summed within backward, and not by
    `finalize_grads`: after backward every gradient is the dense layer's share, whoever the optimizer is, and the
    placement says `replicas` (for the gradient norm and the checkpoint) and not `partial_grad`. That costs one
    all-reduce of 2·d·h elements for the weight, one of 2·d for the bias, in each microbatch. dX needs no more than
    its own sum: each replica adds only what its own query heads say.

    *Sequence parallelism.* Input and output are this rank's tokens, [b, s/t, h], and a head needs all of them. The two
    ends change as in `ParallelFFN`: an all-gather before qkv_r and a reduce-scatter after o_proj_r; in backward
    all-gathers of dY and, again, of X, and a reduce-scatter of dX. Between the ends all is as before: each rank has
    all tokens for heads of its own.

    With QK-norm see `HeadNorm` (one all-reduce of [d] for each of its two weights, backward) and `AllHeadsNorm` (one
    of [b, s, 1] each way for each of the two).

    Args:
        qkv, o_proj: the two layers, as `from_dense` cuts them.
        heads: which heads are where.
        head_dim: d.
        q_norm, k_norm: the norms of Q and K, of both or of neither.
        rope_theta: base of the rotary positions; None leaves positions to the embedding.
        core: "sdpa" or "explicit", see `tpcode.dense.CORES`.
        dropout: of the attention probabilities.
        dense_type: what `to_dense` returns.
    """

    def __init__(
        self,
        qkv: ColumnParallelLinear,
        o_proj: RowParallelLinear,
        *,
        heads: HeadGroups,
        head_dim: int,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        rope_theta: float | None = None,
        core: str = "sdpa",
        dropout: Dropout | None = None,
        dense_type: type = Attention,
    ):
        super().__init__()
        self.qkv, self.o_proj, self.q_norm, self.k_norm, self.dropout = qkv, o_proj, q_norm, k_norm, dropout
        self.heads, self.head_dim, self.rope_theta, self.core = heads, head_dim, rope_theta, named_core(core)
        self.dense_type = dense_type
        if heads.replicas > 1:
            replica_group(heads.replicas, qkv.group)  # made here, where all ranks are

    @classmethod
    def from_dense(
        cls, dense: Attention | GPT2Attention, group: ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> Self:
        """This rank's heads of a dense attention, which every rank of the group has alike.

        With fewer KV heads than ranks, groups of replicas are made once for each group of ranks: all ranks of the
        world then make their layers at the same time.

        Args:
            sequence_parallel: input and output are this rank's s/t tokens.

        Raises:
            TypeError: dense is no attention of `tpcode.dense`.
            ValueError: the heads do not split over t ranks; the message has the sizes of t that work. Of Q, K and V
                some have a bias or are frozen, and some not.
        """
        if not isinstance(dense, Attention | GPT2Attention):
            raise TypeError(
                f"{cls.__name__}.from_dense takes a tpcode.dense.Attention or GPT2Attention, and this is a "
                f"{type(dense).__name__}"
            )
        rank, t = group_rank(group), group_size(group)
        heads = head_groups(dense.heads, dense.kv_heads, t)
        fused = _fused(_q_k_v(dense), dense.kv_heads)
        placement = qkv_placement(dense.heads, dense.kv_heads, dense.head_dim)
        shards = {name: placement.shard(p.detach(), rank, t) for name, p in fused.named_parameters()}
        options = {"group": group, "sequence_parallel": sequence_parallel}
        return cls(
            freeze_like(fused, ColumnParallelLinear(**shards, placement=placement, **options)),
            RowParallelLinear.from_dense(_output(dense), **options),
            heads=heads,
            head_dim=dense.head_dim,
            **_norms(dense, heads, group),
            rope_theta=getattr(dense, "rope_theta", None),
            core=dense.core,
            dropout=None if dense.dropout is None else Dropout.from_dense(dense.dropout, group, dim=1),
            dense_type=type(dense),
        )

    def to_dense(self) -> Attention | GPT2Attention:
        """The whole attention, gathered on every rank. Every rank of the group calls it."""
        a, k, d = self.heads.heads, self.heads.kv_heads, self.head_dim
        options = {"core": self.core, "dropout": self.dropout and self.dropout.to_dense(), "device": "meta"}
        parts = _parted(self.qkv.to_dense(), k, d)
        if self.dense_type is GPT2Attention:
            dense = GPT2Attention(self.o_proj.out_features, a, **options)
            dense.c_attn, dense.c_proj = _stacked(parts), self.o_proj.to_dense()
            return dense
        dense = Attention(
            self.o_proj.out_features, a, k, head_dim=d, rope_theta=self.rope_theta, qk_norm=self._qk_norm, **options
        )
        dense.q_proj, dense.k_proj, dense.v_proj = parts
        dense.o_proj = self.o_proj.to_dense()
        if self.q_norm is not None:
            dense.q_norm, dense.k_norm = self.q_norm.to_dense(), self.k_norm.to_dense()
        return dense

    @property
    def placements(self) -> dict[str, Placement]:
        """Every parameter's placement by name."""
        return placements(self)

    @property
    def sequence_parallel(self) -> bool:
        """Whether input and output are this rank's tokens alone."""
        return self.qkv.sequence_parallel

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """
        Args:
            x: [b, s, h], the same on every rank; with sequence parallelism this rank's [b, s/t, h].
            cache: keys and values of the tokens before these, of this rank's heads; it is extended by these. Not with
                sequence parallelism.

        Raises:
            ValueError: x has other dimensions; the cache is of other sequences or heads, or the layer's tokens are
                split over the ranks.
        """
        require_sequence(x, "ParallelAttention")
        if cache is not None and self.sequence_parallel:
            require_no_cache("ParallelAttention")
        groups, d = self.heads.kv_heads_per_rank, self.head_dim
        queries = self.heads.heads_per_rank // groups  # that read one KV head
        if cache is not None:
            cache.require_like(len(x), groups, d)
        qkv = self._project(x).unflatten(-1, (groups, queries + 2, d))  # [b, s, h] -> [b, s, k_r, a/k + 2, d]
        q, k, v = (part.flatten(2, 3) for part in qkv.split((queries, 1, 1), 3))  # [b, s, a_r, d], twice [b, s, k_r, d]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(q, k, v, core=self.core, rope_theta=self.rope_theta, cache=cache, dropout=self.dropout)
        return self.o_proj(mixed)  # [b, s, a_r·d] -> [b, s, h]

    def _project(self, x: Tensor) -> Tensor:
        """X qkv_rᵀ, with copy (f) over the replicas on the rows of K and V."""
        if self.heads.replicas == 1:
            return self.qkv(x)
        queries = self.heads.heads_per_rank * self.head_dim  # rows of Q: they come first, there being one group
        shared = {
            name: copy_to_replicas(parameter, self.heads.replicas, self.qkv.group, first=queries)
            for name, parameter in self.qkv.named_parameters()
        }
        return functional_call(self.qkv, shared, (x,))

    def extra_repr(self) -> str:
        q, kv = self.heads.heads_per_rank, self.heads.kv_heads_per_rank
        return f"heads={q} of {self.heads.heads}, kv_heads={kv} of {self.heads.kv_heads}, head_dim={self.head_dim}"

    @property
    def _qk_norm(self) -> str | None:
        return None if self.q_norm is None else "head" if isinstance(self.q_norm, HeadNorm) else "all"


def require_no_cache(what: str) -> None:
    """Refuse generation where tokens lie over the ranks.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{what}: a KV cache goes with sequence_parallel=False. Generation adds one token at a time, and one token is "
        f"not split over ranks; weights are the same either way: make the model again without sequence parallelism"
    )


# ---- Q, K and V as one matrix ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupedPlacement(Placement):
    """A fused QKV, which lies by KV groups, each with its queries, its key and its value.

    Where t divides k, each rank has whole groups. Where t is a multiple of k, t/k ranks have a group together: they
    share its queries, and all hold its key and its value. `segments` are the sizes of all queries, keys and values.

    Attributes:
        groups: k.
    """

    groups: int = 1

    def shard_size(self, t: int, what: str = "the parameter's size") -> int:
        ranks = self._ranks_to_a_group(t)
        if ranks == 1:
            return self._whole_groups.shard_size(t, what)
        return self._within(ranks).shard_size(ranks, what)

    def shard(self, whole: Tensor, rank: int, t: int, what: str = "the parameter's size") -> Tensor:
        require_rank(rank, t)
        self._require_size(whole, self.true_size, f"a whole over t = {t}")
        ranks = self._ranks_to_a_group(t)
        if ranks == 1:
            return self._whole_groups.shard(whole, rank, t, what)
        group, place = divmod(rank, ranks)
        return self._within(ranks).shard(whole.chunk(self.groups, self.dim)[group], place, ranks, what)

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        ranks = self._ranks_to_a_group(len(shards))
        if ranks == 1:
            return self._whole_groups.merge(shards)
        blocks = [self._within(ranks).merge(shards[i : i + ranks]) for i in range(0, len(shards), ranks)]
        return joined(blocks, self.dim)

    def _ranks_to_a_group(self, t: int) -> int:
        d = self.segments[1] // self.groups
        return head_groups(self.segments[0] // d, self.groups, t).replicas

    @property
    def _whole_groups(self) -> Placement:
        """Plain pieces."""
        return Placement(self.dim, (self.true_size,))

    def _within(self, ranks: int) -> Placement:
        """How so many ranks share one group."""
        sizes = tuple(size // self.groups for size in self.segments)
        return Placement(self.dim, sizes, (1, ranks, ranks))


def qkv_placement(heads: int, kv_heads: int, d: int) -> GroupedPlacement:
    """Of the fused weight and bias, [(a + 2k)·d, …] by KV groups: the same declaration at every t."""
    return GroupedPlacement(0, (heads * d, kv_heads * d, kv_heads * d), groups=kv_heads)


def _q_k_v(dense: Attention | GPT2Attention) -> list[nn.Linear]:
    """Q, K and V of a dense attention, as three layers."""
    if isinstance(dense, Attention):
        return [dense.q_proj, dense.k_proj, dense.v_proj]
    thirds = {name: parameter.detach().chunk(3) for name, parameter in dense.c_attn.named_parameters()}
    parts = [linear_of(**{name: third[i] for name, third in thirds.items()}) for i in range(3)]
    return [freeze_like(dense.c_attn, part) for part in parts]


def _output(dense: Attention | GPT2Attention) -> nn.Linear:
    return dense.o_proj if isinstance(dense, Attention) else dense.c_proj


def _fused(parts: list[nn.Linear], kv_heads: int) -> nn.Linear:
    """Three layers as one, by KV groups: [(a + 2k)·d, h]."""
    alike = {tuple((name, p.requires_grad) for name, p in part.named_parameters()) for part in parts}
    if len(alike) > 1:
        raise ValueError("q_proj, k_proj and v_proj become one layer: give a bias to all or none, freeze all or none")
    tensors = {}
    for name, _ in parts[0].named_parameters():
        tensors[name] = by_kv_groups([part.get_parameter(name).detach() for part in parts], kv_heads)
    return freeze_like(parts[0], linear_of(**tensors))


def by_kv_groups(parts: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Rows of Q, of K and of V, each by heads, as one matrix by KV groups."""
    by_group = [part.unflatten(0, (kv_heads, -1)) for part in parts]
    return joined(by_group, 1).flatten(0, 1)  # [k, a/k·d + 2d, h] -> [(a + 2k)·d, h]


def _parted(fused: nn.Linear, kv_heads: int, d: int) -> list[nn.Linear]:
    """The three layers from one."""
    tensors = {}
    for name, parameter in fused.named_parameters():
        by_group = parameter.detach().unflatten(0, (kv_heads, -1))  # [(a + 2k)·d, h] -> [k, a/k·d + 2d, h]
        sizes = (by_group.shape[1] - 2 * d, d, d)
        tensors[name] = [part.flatten(0, 1) for part in by_group.split(sizes, 1)]
    parts = [linear_of(**{name: three[i].contiguous() for name, three in tensors.items()}) for i in range(3)]
    return [freeze_like(fused, part) for part in parts]


def _stacked(parts: list[nn.Linear]) -> nn.Linear:
    """Q above K above V in one layer, [3h, h], as GPT-2 has it."""
    names = [name for name, _ in parts[0].named_parameters()]
    stacked = {name: joined([part.get_parameter(name).detach() for part in parts]) for name in names}
    return freeze_like(parts[0], linear_of(**stacked))


def _norms(dense: Attention | GPT2Attention, heads: HeadGroups, group: ProcessGroup | None) -> dict[str, nn.Module]:
    """The norms of Q and K, if there are any."""
    kind = getattr(dense, "qk_norm", None)
    if kind is None:
        return {}
    if kind == "head":
        return {name: HeadNorm.from_dense(getattr(dense, name), group) for name in ("q_norm", "k_norm")}
    return {
        "q_norm": AllHeadsNorm.from_dense(dense.q_norm, group),
        "k_norm": AllHeadsNorm.from_dense(dense.k_norm, group, replicas=heads.replicas),
    }
