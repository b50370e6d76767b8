"""Chapter 15, a real model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from tpcode import ModelConfig, ParallelTransformer
from tpcode.comm import group_rank, group_size
from tpcode.dense import KVCache
from tpcode.grading.answers import blanks
from tpcode.grading.compare import compare_one, looks_like
from tpcode.grading.failures import Wrong
from tpcode.grading.numbers import called, number
from tpcode.grading.ranks import SIZES, on_ranks, require_returned
from tpcode.grading.registry import exercise

# ---- 15.1 -----------------------------------------------------------------------------------------------------------

READ = 5  # tokens
_SIZES = {"hidden": 48, "ffn": 8, "heads": 8, "layers": 3, "vocab": 16, "max_seq": 8}
CONFIGS = [ModelConfig(family="llama", kv_heads=k, **_SIZES) for k in (2, 4)]

BEYOND = (
    "There are {k} KV heads and {t} ranks, and a head is not cut: a rank holds one whole head at least. Beyond t = k "
    "its share does not shrink."
)
NONE_HELD = "{k} // {t} is 0, and a rank without a KV head could not compute attention. It holds one at least."
QUERY_HEADS = "This counts the query heads. Only keys and values are kept, and there are k KV heads of them."
ONE_OF_TWO = "This is keys or values. Both are kept."
ELEMENTS = "These are elements. Each takes bytes_each bytes."
ONE_LAYER = "This is one layer's cache. Each layer has its own."
ONE_TOKEN = "This is one token's. Keys and values of all tokens read so far are kept."
ALL_RANKS = "This does not depend on t: it is the cache of the whole model. A rank keeps its own heads' alone."


@exercise("15.1")
def bytes_of_the_cache(cache_bytes: Callable) -> str:
    """`cache_bytes(config, t, tokens, bytes_each)`: bytes of one rank's caches, for one sequence."""
    for t in SIZES:
        for (config, dtype), measured in _measured(t).items():
            _check_cache(cache_bytes, config, t, dtype, measured)
    return "as measured on 1, 2 and 4 ranks, with 2 KV heads and with 4."


def _check_cache(cache_bytes: Callable, config: ModelConfig, t: int, dtype: torch.dtype, measured: int) -> None:
    answer = number("cache_bytes", cache_bytes, (config, t, READ, dtype.itemsize))
    k = config.kv_heads
    per_head = 2 * config.layers * config.head_dim * READ * dtype.itemsize

    def wrong(value: float, sentence: str):
        return looks_like({"cache_bytes": value}, sentence.format(k=k, t=t))

    symptoms = [
        *([wrong(per_head * k / t, BEYOND), wrong(0, NONE_HELD)] if t > k else []),
        wrong(per_head * config.heads // t, QUERY_HEADS),
        *([wrong(per_head * k, ALL_RANKS)] if t > 1 else []),
        wrong(measured / 2, ONE_OF_TWO),
        wrong(measured / dtype.itemsize, ELEMENTS),
        wrong(measured / config.layers, ONE_LAYER),
        wrong(measured / READ, ONE_TOKEN),
    ]
    where = f"at t = {t}, for {k} KV heads, {READ} tokens, {dtype.itemsize} bytes each"
    compare_one("cache_bytes", answer, measured, symptoms=symptoms, where=where, reveal=False)


@cache
def _measured(t: int) -> dict[tuple[ModelConfig, torch.dtype], int]:
    """Bytes of one rank's caches, by model and dtype, which all ranks have alike."""
    kinds = [(config, dtype) for config in CONFIGS for dtype in (torch.float32, torch.float64)]
    first, *others = on_ranks(lambda: [_bytes_of_caches(*kind) for kind in kinds], t)
    assert others == [first] * (t - 1)
    return dict(zip(kinds, first, strict=True))


@torch.no_grad()
def _bytes_of_caches(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the caches of this rank take after READ tokens, the last of which were read one by one."""
    model = ParallelTransformer(config, dtype=dtype)
    caches = [KVCache() for _ in model.blocks]
    ids = torch.arange(READ)[None]
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        model(part, caches)
    return sum(cache.nbytes for cache in caches)


# ---- 15.2 -----------------------------------------------------------------------------------------------------------

WORDS, STEPS, ROWS = 12, 50, 4000

OWN_IDS = (
    "At t = {t} rank {rank} only ever said ids from {first} to {last}: it drew from its own part of the vocabulary. "
    "The probabilities are those of all ids."
)
EACH_FOR_ITSELF = (
    "At t = {t}, step {step}, rank 0 said {zero} and rank {rank} said {other}. Each drew for itself, with the right "
    "probabilities, from a generator in a state of its own. Draw once, or from one source."
)
GREEDY = "The likeliest id came up every time. A token is drawn: each id comes up as often as softmax says."
RANK_0_ALONE = (
    "All ranks agree, and say only ids of one rank, {first} to {last}: it drew from its own logits. All logits take "
    "part."
)
SAME_DRAW = (
    "For the same logits, steps 0 and 1 drew the very same tokens in {rows} rows: the seed is the same at every step, "
    "and so is the luck. Let the step take part in it."
)
NOT_SOFTMAX = (
    "All ranks agree, but id {id} came up in {found:.3f} of the draws, and softmax gives it {wanted:.3f}. (Averaging "
    "or adding what several ranks drew changes the probabilities.)"
)
NO_ID = "next_token said {id} at t = {t}; ids go from 0 to {last}."
NOT_B = "next_token returned {what} on rank {rank} at t = {t}; it should be a tensor of integers, [b] = [{b}]."


@exercise("15.2")
def one_token_for_all_ranks(next_token: Callable) -> str:
    """`next_token(z_r, step)` on each rank: this rank's logits [b, V/t] to ids [b], the same on every rank."""
    for t in SIZES:
        results = on_ranks(_draw, t, next_token)
        require_returned(next_token, results)
        for rank, result in enumerate(results):
            _require_ids(result, rank, t)
        if t > 1:
            _require_agreement(results, t)
        _require_softmax(results[0], t)
    return f"{STEPS} steps equal on all ranks at t = 1, 2, 4, and each id as often as softmax says."


def _logits(step: int) -> Tensor:
    """[2, V], others at each step."""
    return torch.randn(2, WORDS, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _draw(next_token: Callable) -> dict | None:
    """Tokens of STEPS steps, each [2]; and of the same logits in many rows, at two steps."""
    rank, t = group_rank(), group_size()
    torch.manual_seed(100 + rank)  # a program's other draws leave the ranks' generators in different states
    tokens = []
    for step in range(STEPS):
        token = next_token(_logits(step).chunk(t, -1)[rank].clone(), step)
        if blanks(token):
            return None
        tokens.append(token)
    rows = _logits(0)[:1].expand(ROWS, WORDS).chunk(t, -1)[rank]
    return {"tokens": tokens, "rows": [next_token(rows.clone(), step) for step in (0, 1)]}


def _require_ids(result: dict, rank: int, t: int) -> None:
    for token, b in [(token, 2) for token in result["tokens"]] + [(token, ROWS) for token in result["rows"]]:
        integers = isinstance(token, Tensor) and not token.is_floating_point() and token.dtype != torch.bool
        if not integers or token.shape != (b,):
            what = f"{token.dtype} of {list(token.shape)}" if isinstance(token, Tensor) else f"{token!r:.40}"
            raise Wrong(NOT_B.format(what=what, rank=rank, t=t, b=b))
        for extreme in (token.min().item(), token.max().item()):
            if not 0 <= extreme < WORDS:
                raise Wrong(NO_ID.format(id=extreme, t=t, last=WORDS - 1))


def _require_agreement(results: list[dict], t: int) -> None:
    width = WORDS // t
    first = results[0]["tokens"]
    for rank, result in enumerate(results):
        for step, (zero, own) in enumerate(zip(first, result["tokens"], strict=True)):
            if torch.equal(zero, own):
                continue
            said = torch.cat(result["tokens"])
            for low in (rank * width, 0):  # ids of the vocabulary, or places in the rank's part of it
                if low <= said.min() and said.max() < low + width:
                    raise Wrong(OWN_IDS.format(t=t, rank=rank, first=low, last=low + width - 1))
            at = {"zero": zero.tolist(), "other": own.tolist()}
            raise Wrong(EACH_FOR_ITSELF.format(t=t, step=step, rank=rank, **at))
    for result in results:
        if not all(torch.equal(a, b) for a, b in zip(results[0]["rows"], result["rows"], strict=True)):
            raise Wrong(EACH_FOR_ITSELF.format(t=t, step=0, rank="another", zero="one id", other="another"))


def _require_softmax(result: dict, t: int) -> None:
    p, (rows, again), width = _logits(0)[0].softmax(-1), result["rows"], WORDS // t
    if rows.unique().tolist() == [p.argmax().item()]:
        raise Wrong(GREEDY)
    if t > 1 and len((rows // width).unique()) == 1:
        first = rows[0].item() // width * width
        raise Wrong(RANK_0_ALONE.format(first=first, last=first + width - 1))
    if torch.equal(rows, again):
        raise Wrong(SAME_DRAW.format(rows=ROWS))
    counts = rows.bincount(minlength=WORDS)
    off = (counts - ROWS * p).abs() / (ROWS * p * (1 - p)).sqrt()  # in standard deviations
    if off.max() > 5:
        id = off.argmax().item()
        raise Wrong(NOT_SOFTMAX.format(id=id, found=counts[id].item() / ROWS, wanted=p[id].item()))


# ---- 15.3 -----------------------------------------------------------------------------------------------------------

A, K, D, V = 9, 3, 3, 11  # query heads, KV heads, head size, ids; torch's weights, [out, in]
_H = 5

CUT_INSIDE = (
    "k at t = 9 has {rows} row on a rank: that is a part of a head. A head is not cut; each of the 3 is on 9/3 ranks."
)
WRONG_REPLICA = (
    "Rank r got KV head r % 3, and its query head belongs to KV head r // 3: three neighbours share one. Nothing fails "
    "with the other order, and each rank attends to another head's keys."
)
ALL_KV = "k has all 3 heads on each rank. A rank needs those that its query heads read."
NO_PADDING = (
    "embed on rank {rank} at t = {t} has {rows} rows: all ranks hold the same number, {want}, with zeros behind."
)
NOT_ZEROS = "The rows that are filled up in embed are not zeros."
WRONG_DIM = "o is cut by rows. Its columns belong to the heads: cut dimension 1."
REPLICAS_SAVED = "k has {found} rows after merging and had {want}: a head that is on three ranks is one head. Keep one."
FIRST_ONLY = "k holds rank 0's head three times: at t = 9 ranks 0, 1 and 2 hold the same one. Take every third rank."
SUMMED = "k was added up over the replicas. Their gradients are summed; the weights are equal, and one is kept."
PADDING_KEPT = "embed has {found} rows after merging, and there are {want} ids: the padding was kept. Cut it off."
HALF_MERGED = "The way from 3 to 9 leads through the whole: shard(merge(shard(whole, 3)), 9) is not shard(whole, 9)."


@exercise("15.3")
def checkpoint_for_any_t(shard: Callable, merge: Callable) -> str:
    """`shard(whole, t)` -> a dictionary for each rank; `merge(shards)` -> the whole."""
    whole = whole_checkpoint()
    for t in (3, 9):
        given = {name: tensor.clone() for name, tensor in whole.items()}
        _check_shards(called("shard", shard, (given, t)), t, whole)
    for t in (3, 9):
        _check_whole(called("merge", merge, (_shards(whole, t),)), t, whole)
    for mine, right in zip(shard(merge(shard(whole, 3)), 9), _shards(whole, 9), strict=True):
        if not all(torch.equal(mine[name], right[name]) for name in right):
            raise Wrong(HALF_MERGED)
    return "1 -> 3 -> 1 -> 9 -> 1, every number as it was, no padding and no replica left."


def whole_checkpoint() -> dict[str, Tensor]:
    """embed [V, h], q [a·d, h], k [k·d, h], o [h, a·d]: torch's weights, every entry another number above 0."""
    shapes = {"embed": (V, _H), "q": (A * D, _H), "k": (K * D, _H), "o": (_H, A * D)}
    found, first = {}, 1
    for name, (rows, columns) in shapes.items():
        found[name] = torch.arange(first, first + rows * columns, dtype=torch.float64).reshape(rows, columns)
        first += rows * columns
    return found


def _shards(whole: dict[str, Tensor], t: int) -> list[dict[str, Tensor]]:
    rows, copies = -(-V // t), t // K
    padded = torch.cat([whole["embed"], torch.zeros(rows * t - V, _H, dtype=torch.float64)])
    heads = whole["k"].chunk(K)
    return [
        {
            "embed": padded[r * rows : (r + 1) * rows].clone(),
            "q": whole["q"].chunk(t)[r].clone(),
            "k": heads[r // copies].clone(),
            "o": whole["o"].chunk(t, 1)[r].clone(),
        }
        for r in range(t)
    ]


def _tensor(what: str, of: object, name: str) -> Tensor:
    if not isinstance(of, dict) or not isinstance(of.get(name), Tensor):
        raise Wrong(f"{what} should be a dictionary with the tensors embed, q, k and o; {name} is not there.")
    return of[name]


def _check_shards(shards: object, t: int, whole: dict[str, Tensor]) -> None:
    if not isinstance(shards, (list, tuple)) or len(shards) != t:
        raise Wrong(f"shard should return a list of {t} dictionaries at t = {t}, one for each rank.")
    right, heads = _shards(whole, t), whole["k"].chunk(K)
    for rank, want in enumerate(right):
        mine = {name: _tensor(f"shard's part for rank {rank} at t = {t}", shards[rank], name) for name in want}
        embed, k, o = mine["embed"], mine["k"], mine["o"]
        if len(embed) < len(want["embed"]):
            rows = {"rows": len(embed), "want": len(want["embed"])}
            raise Wrong(NO_PADDING.format(rank=rank, t=t, **rows))
        if t > K and k.dim() == 2 and len(k) < D:
            raise Wrong(CUT_INSIDE.format(rows=len(k)))
        if torch.equal(k, whole["k"]):
            raise Wrong(ALL_KV)
        if o.dim() == 2 and o.shape[1] == A * D:
            raise Wrong(WRONG_DIM)
        real = max(min(V - rank * len(want["embed"]), len(want["embed"])), 0)
        symptoms = [looks_like({"k": heads[rank % K]}, WRONG_REPLICA)]
        if embed.shape == want["embed"].shape and torch.equal(embed[:real], want["embed"][:real]):
            symptoms.append(looks_like({"embed": embed}, NOT_ZEROS))  # the ids' rows are right, what follows is not
        for name in want:
            compare_one(name, mine[name], want[name], symptoms=symptoms, where=f"on rank {rank} at t = {t}")


def _check_whole(merged: object, t: int, whole: dict[str, Tensor]) -> None:
    for name, want in whole.items():
        found = _tensor(f"what merge makes of {t} shards", merged, name)
        if name == "k" and found.dim() == 2 and len(found) > len(want):
            raise Wrong(REPLICAS_SAVED.format(found=len(found), want=len(want)))
        if name == "embed" and found.dim() == 2 and len(found) > V:
            raise Wrong(PADDING_KEPT.format(found=len(found), want=V))
        symptoms = [
            looks_like({"k": want[:D].repeat(K, 1)} if name == "k" else {}, FIRST_ONLY),
            looks_like({"k": want * (t // K)} if name == "k" else {}, SUMMED),
        ]
        compare_one(name, found, want, symptoms=symptoms, where=f"merged from t = {t}")
