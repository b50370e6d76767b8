"""Attention of both families, what it remembers, and how positions turn it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tpcode.dense.dropout import Dropout
from tpcode.shapes import head_groups, require_int


class KVCache:
    """The keys and values that one attention layer has seen: a rank of a split layer keeps those of its own heads.

    Attributes:
        keys, values: [b, k, n, d] after n tokens, None before the first. Keys are kept as they are read: after RoPE.
    """

    def __init__(self):
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __len__(self) -> int:
        """Tokens seen so far."""
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, [b, k, s, d], and return all of them, [b, k, n + s, d].

        Raises:
            ValueError: they are of another batch, or of other heads, than those before.
        """
        b, heads, _, d = k.shape
        self.require_like(b, heads, d)
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self.keys, self.values = k, v
        return k, v

    def require_like(self, b: int, heads: int, d: int) -> None:
        """Refuse with a ValueError what cannot be appended: b sequences of so many KV heads of size d."""
        if self.keys is not None and (b, heads, d) != (*self.keys.shape[:2], self.keys.shape[3]):
            held_b, held_heads, _, held_d = self.keys.shape
            raise ValueError(
                f"the cache holds {held_b} sequences of {held_heads} KV heads of size {held_d}, and these are {b} of "
                f"{heads} of size {d}; start with a new KVCache()"
            )


def rotate(x: Tensor, first: int, theta: float) -> Tensor:
    """RoPE (Su et al. 2021) as Llama has it: turn the pair (x_i, x_{i+d/2}) of the token at position p by the angle
    p / theta^{2i/d}. The first of the s tokens is at position `first`. [..., s, d] -> [..., s, d].

    Angles are computed in float32 whatever x is, as in Hugging Face: they are part of what a model was trained with.
    """
    s, d = x.shape[-2:]
    cos, sin = _turns(first, s, d, theta, x.dtype, x.device)
    left, right = x.chunk(2, -1)  # [..., s, d] -> twice [..., s, d/2]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@lru_cache(maxsize=8)  # every layer turns by the same angles, and Q as K
@torch.inference_mode(False)  # what is kept may next be used in training
def _turns(first: int, s: int, d: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of s positions, from `first` on: [s, d/2] each."""
    frequency = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)  # [d/2]
    position = torch.arange(first, first + s, dtype=torch.float32, device=device)
    angle = torch.outer(position, frequency)  # [s, d/2]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """`softmax(q kᵀ / √d) v` written out, causal; the s queries belong to the last s of the n keys.

    Query head i reads KV head i // (a/k). q [b, a, s, d], k and v [b, k, n, d] -> [b, a, s, d].
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # [b, k, n, d] -> [b, a, n, d]
    scores = q @ k.mT * q.shape[-1] ** -0.5  # [b, a, s, d] [b, a, d, n] -> [b, a, s, n]
    scores = scores.masked_fill(~_visible(q, k), -torch.inf)
    p = scores.softmax(-1).to(v.dtype)  # (autocast's is float32)
    if dropout is not None:
        p = dropout(p)
    return p @ v  # [b, a, s, n] [b, a, n, d] -> [b, a, s, d]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, dropout: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The same by PyTorch's `scaled_dot_product_attention`, which need not store the s·n probabilities.

    With dropout it is `explicit_attention`: PyTorch's draws a mask of its own, from the default generator.
    """
    if dropout is not None:
        return explicit_attention(q, k, v, dropout)
    s, n = q.shape[2], k.shape[2]
    mask = None if s in (1, n) else _visible(q, k)  # is_causal would align the first query with the first key
    gqa = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=s == n, enable_gqa=gqa)


def _visible(q: Tensor, k: Tensor) -> Tensor:
    """[s, n]: whether a query may read a key, which is then not later than the query's own."""
    s, n = q.shape[2], k.shape[2]
    return torch.ones(s, n, dtype=torch.bool, device=q.device).tril(n - s)


CORES = {"sdpa": sdpa_attention, "explicit": explicit_attention}


def attend(q, k, v, *, core: str, rope_theta: float | None, cache: KVCache | None, dropout: nn.Module | None) -> Tensor:
    """From heads to the mixed values: turn, remember, mix. It looks at each head alone, so that it serves all heads of
    a dense layer and some heads of a split one. q [b, s, a, d], k and v [b, s, k, d] -> [b, s, a·d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, heads, d] -> [b, heads, s, d]
    if rope_theta is not None:
        first = 0 if cache is None else len(cache)
        q, k = rotate(q, first, rope_theta), rotate(k, first, rope_theta)
    if cache is not None:
        k, v = cache.extend(k, v)
    if dropout is not None and not dropout.active:
        dropout = None
    return CORES[core](q, k, v, dropout).transpose(1, 2).flatten(2)  # [b, a, s, d] -> [b, s, a·d]


class Attention(nn.Module):
    """Causal self-attention as in Llama, Qwen3 (QK-norm per head) and OLMo 2 (over all heads): [b, s, h] -> [b, s, h].

        Q, K, V = X q_projᵀ, X k_projᵀ, X v_projᵀ      a heads of Q, k of K and of V, each of size d
        Y       = softmax(Q Kᵀ / √d) V o_projᵀ         head by head, each query reading its own and earlier positions

    Args:
        h: hidden size.
        heads, kv_heads: a and k; k divides a. k = a is multi-head attention (None is that), k = 1 multi-query, what is
            between grouped-query attention (Ainslie et al. 2023).
        head_dim: d; None is h / a.
        bias: whether the four linear layers have one.
        rope_theta: base of the rotary positions; None leaves positions to the embedding.
        qk_norm: an RMSNorm of Q and K: "head" is over each head's d with one weight for all heads, "all" over all
            heads together; None is none.
        norm_eps: what that norm adds to the mean square.
        core: "sdpa" or "explicit", see `CORES`.
        dropout: of the attention probabilities; None is none.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: a size makes no sense; there is no such core or norm.
    """

    def __init__(
        self,
        h: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        rope_theta: float | None = None,
        qk_norm: str | None = None,
        norm_eps: float = 1e-5,
        core: str = "sdpa",
        dropout: Dropout | None = None,
        **factory,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = a, k, d = _head_sizes(h, heads, kv_heads, head_dim, rope_theta)
        self.rope_theta, self.core, self.qk_norm = rope_theta, named_core(core), _known_qk_norm(qk_norm)
        self.q_proj = nn.Linear(h, a * d, bias=bias, **factory)
        self.k_proj = nn.Linear(h, k * d, bias=bias, **factory)
        self.v_proj = nn.Linear(h, k * d, bias=bias, **factory)
        self.o_proj = nn.Linear(a * d, h, bias=bias, **factory)
        if qk_norm is not None:
            over_q, over_k = (d, d) if qk_norm == "head" else (a * d, k * d)
            self.q_norm = nn.RMSNorm(over_q, eps=norm_eps, **factory)
            self.k_norm = nn.RMSNorm(over_k, eps=norm_eps, **factory)
        self.dropout = dropout

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        require_sequence(x, "Attention")
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # [b, s, h] -> [b, s, a·d], twice [b, s, k·d]
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [b, s, heads·d] -> [b, s, heads, d]
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(q, k, v, core=self.core, rope_theta=self.rope_theta, cache=cache, dropout=self.dropout)
        return self.o_proj(mixed)  # [b, s, a·d] -> [b, s, h]

    def extra_repr(self) -> str:
        options = ("heads", "kv_heads", "head_dim", "rope_theta", "qk_norm", "core")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in options)


class GPT2Attention(nn.Module):
    """Causal self-attention as in GPT-2: multi-head, positions learned and added before, Q, K and V from one matrix.

    `c_attn` is [3h, h], Q above K above V; `c_proj` is [h, h].

    Args: as for `Attention`.
    """

    def __init__(
        self,
        h: int,
        heads: int,
        *,
        bias: bool = True,
        core: str = "sdpa",
        dropout: Dropout | None = None,
        **factory,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = _head_sizes(h, heads, None, None, None)
        self.core = named_core(core)
        self.c_attn = nn.Linear(h, 3 * h, bias=bias, **factory)
        self.c_proj = nn.Linear(h, h, bias=bias, **factory)
        self.dropout = dropout

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        require_sequence(x, "GPT2Attention")
        qkv = self.c_attn(x).unflatten(-1, (3, self.heads, self.head_dim))  # [b, s, h] -> [b, s, 3, a, d]
        mixed = attend(*qkv.unbind(2), core=self.core, rope_theta=None, cache=cache, dropout=self.dropout)
        return self.c_proj(mixed)  # [b, s, a·d] -> [b, s, h]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, core={self.core!r}"


def require_sequence(x: Tensor, what: str) -> None:
    """Refuse what is not [b, s, h] with a ValueError: attention needs to know which dimension the positions are on."""
    if isinstance(x, Tensor) and x.dim() != 3:
        raise ValueError(f"{what}: the input must be [b, s, h] and its shape is {list(x.shape)}")


def named_core(core: str) -> str:
    """core, if there is one of that name; a ValueError lists them."""
    if core not in CORES:
        raise ValueError(f"core must be one of {', '.join(CORES)} and is {core!r}")
    return core


def _head_sizes(h, heads, kv_heads, head_dim, rope_theta) -> tuple[int, int, int]:
    """a, k and d, checked."""
    h, heads = require_int(h, "hidden h"), require_int(heads, "query heads")
    groups = head_groups(heads, heads if kv_heads is None else kv_heads, 1)
    if head_dim is None and h % heads:
        raise ValueError(f"query heads = {heads} must divide hidden h = {h}, unless head_dim is given")
    d = h // heads if head_dim is None else require_int(head_dim, "head_dim")
    if rope_theta is not None and d % 2:
        raise ValueError(f"head_dim = {d} must be even: rotary positions turn pairs")
    return groups.heads, groups.kv_heads, d


def _known_qk_norm(qk_norm: str | None) -> str | None:
    if qk_norm not in (None, "head", "all"):
        raise ValueError(f"qk_norm must be 'head', 'all' or None and is {qk_norm!r}")
    return qk_norm
