"""Chapter 6, attention by heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from tpcode.comm import group_rank, group_size
from tpcode.dense import Attention, explicit_attention
from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.compare import Difference, compare, looks_like
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_calls, require_output, require_returned
from tpcode.grading.registry import exercise
from tpcode.runtime import RankError
from tpcode.runtime.notes import watch
from tpcode.shapes import head_groups


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _integers(name: str, value) -> list[int]:
    """A list of whole numbers, whatever it was typed as: a list, a range, a tensor."""
    try:
        numbers = [float(item) for item in value]
    except (TypeError, ValueError):
        raise Wrong(f"{name} should be a list of whole numbers; it is {value!r:.60}.") from None
    if any(item != int(item) for item in numbers):
        raise Wrong(f"{name} should hold whole numbers; it is {value!r:.60}.")
    return [int(item) for item in numbers]


# ---- 6.1 ------------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, QUERY = 12, 4, 7
RANKS = (1, 2, 3, 4, 6, 12)

UNEVEN = (
    "{t} divides the 12 query heads, and that is not enough. Rank 0's query heads {queries} read KV head {reads}, and "
    "rank 1's {others} read {other_reads}: no two ranks would have the same to do. t divides the KV heads, or is a "
    "multiple of them."
)
DIVIDES_BOTH = "t = {t} divides the query heads and the KV heads: each rank gets whole groups."
SEVERAL_RANKS = "12 is a multiple of the 4 KV heads: each of them is on 3 ranks, as a copy."
EVERY_TH = "These are every {t}-th head. A rank has neighbours, as the columns of W_q lie."
OWN_NUMBERS = "These count from 0 on the rank. The rank's heads have their numbers in the whole model."
NOT_WITH_7 = "That is rank {rank}'s share. Asked for is the rank that holds query head 7."
ALL_KV = "These are all KV heads. A rank holds those that its query heads read, and no others."
AS_QUERIES = "These are the query heads' own numbers. Three query heads share a KV head, so there are four."
MODULO = "That is i % 4. Query head i reads KV head i // 3: a KV head serves three neighbours."
STRIDED = "These are every 4th rank. KV head 2 serves the query heads 6, 7 and 8, and they are on neighbouring ranks."


@exercise("6.1")
def heads_on_ranks(held: Mapping, with_kv_2: Sequence[int]) -> str:
    """`held[t]`: "refused", or the query heads and the KV heads of the rank with query head 7; then t = 12's ranks
    that hold KV head 2."""
    if not isinstance(held, Mapping) or set(held) != set(RANKS):
        raise Wrong(f"held should be a dict with the keys {', '.join(map(str, RANKS))}.")
    for t in RANKS:
        _require_share(t, held[t])
    numbers = _integers("with_kv_2", with_kv_2)
    if sorted(numbers) != [6, 7, 8]:
        hint = {(2, 6, 10): STRIDED, (7,): "That is one of them. KV head 2 serves three query heads."}
        raise Wrong(f"with_kv_2 is {numbers}.\n{hint.get(tuple(sorted(numbers)), '')}".rstrip())
    return "1, 2, 4 and 12 work; at t = 12 each KV head is on three ranks."


def _require_share(t: int, answer) -> None:
    try:
        groups = head_groups(HEADS, KV_HEADS, t)
    except ValueError:
        groups = None
    if isinstance(answer, str) and answer.strip().lower().strip('."') == "refused":
        if groups is None:
            return
        raise Wrong(f"t = {t} works.\n{SEVERAL_RANKS if groups.replicas > 1 else DIVIDES_BOTH.format(t=t)}")
    if groups is None:
        raise Wrong(f"t = {t} is refused.\n{_why_uneven(t)}")
    if isinstance(answer, str) or not isinstance(answer, Iterable) or len(pair := list(answer)) != 2:
        raise Wrong(f'held[{t}] should be "refused", or two lists: query heads, KV heads. It is {answer!r:.60}.')
    queries, kv = (sorted(_integers(f"held[{t}]", numbers)) for numbers in pair)
    rank = next(r for r in range(t) if QUERY in groups.heads_of(r))
    if queries != list(groups.heads_of(rank)):
        raise Wrong(f"held[{t}]: the query heads are not {queries}.\n{_why_queries(groups, rank, queries)}".rstrip())
    if kv != list(groups.kv_heads_of(rank)):
        raise Wrong(f"held[{t}]: the KV heads are not {kv}.\n{_why_kv(groups, rank, kv)}".rstrip())


def _why_uneven(t: int) -> str:
    share = HEADS // t
    queries, others = list(range(share)), list(range(share, 2 * share))
    reads, other_reads = ([i * KV_HEADS // HEADS for i in of_rank] for of_rank in (queries, others))
    written = (", ".join(map(str, numbers)) for numbers in (queries, reads, others, other_reads))
    return UNEVEN.format(t=t, **dict(zip(("queries", "reads", "others", "other_reads"), written, strict=True)))


def _why_queries(groups, rank: int, queries: list[int]) -> str:
    t = groups.t
    if queries == list(range(QUERY % t, HEADS, t)):
        return EVERY_TH.format(t=t)
    if queries == list(range(groups.heads_per_rank)):
        return OWN_NUMBERS
    other = next((r for r in range(t) if r != rank and queries == list(groups.heads_of(r))), None)
    return "" if other is None else NOT_WITH_7.format(rank=other)


def _why_kv(groups, rank: int, kv: list[int]) -> str:
    queries = list(groups.heads_of(rank))
    if kv == queries:
        return AS_QUERIES
    if kv == list(range(KV_HEADS)):
        return ALL_KV
    if kv == sorted({i % KV_HEADS for i in queries}):
        return MODULO
    return OWN_NUMBERS if kv == list(range(groups.kv_heads_per_rank)) else ""


# ---- 6.2 ------------------------------------------------------------------------------------------------------------

_H, _A, _D = 6, 4, 4  # a·d is not h, so that a wrong cut does not fit by chance
_X, _DY = _random(2, 3, _H, seed=1), _random(2, 3, _H, seed=2)
PARTS = ("q", "k", "v", "o")

CUT_INSIDE = (
    "Each softmax saw {piece} of a head's {d} features, and so a part of each score. Either a rank has a piece of each "
    "head, or its columns are read as {a} heads where they are {share}. A rank has {share} whole heads of size {d}."
)
NO_COPY = "Every rank used X, so each holds a part of dX. Copy (f) adds the parts; it is missing."
NO_REDUCE = "This is rank {rank}'s own part of Y. Reduce (g) adds the parts; it is missing."
THREE_COPIES = (
    "Q, K and V read one X. One copy (f) in front of the three adds their parts of dX on the rank, before the sum."
)
NO_WORD = "The heads need no word from each other: the only collective forward is the one that adds the parts of Y."
EVERY_TH_HEAD = "These are every t-th head's rows. A rank has neighbouring heads."
NOT_CAUSAL = "Later tokens were read as well. `explicit_attention` is causal."

PART_OF_SCORE = "Each rank's softmax saw its own part of the scores. The parts are added before it."
PIECE_SCALE = (
    "The sum is there, and divided by the root of the piece's size. A score is divided by √d of the whole head."
)
SUM_AFTER = "The weights were averaged over the ranks, after softmax. It is the scores that are in parts, before it."


@exercise("6.2")
def attention_of_whole_heads(MyAttention: type, inside_a_head: Callable) -> str:
    """`MyAttention(dense)` with parameters q, k, v, o; `inside_a_head(q_r, k_r, v_r, d)` for heads cut by features."""
    for t in SIZES:
        got = _run_attention(MyAttention, t)
        want, symptoms = _dense_attention(t)
        compare(got, want, t=t, symptoms=symptoms)
        if t > 1:
            require_calls(got, "forward", 1, NO_WORD)
            require_calls(got, "backward", 1, THREE_COPIES)
    for t in (2, 4):
        _require_mended(inside_a_head, t)
    return (
        "whole heads: Y, dX and every gradient at t = 1, 2, 4, one all-reduce each way. Cut inside: right too, and it "
        "adds up all the scores, a·s·s elements a sequence where s·h would do."
    )


def _attention() -> Attention:
    dense = Attention(_H, _A, head_dim=_D, dtype=torch.float64, core="explicit")
    for number, parameter in enumerate(dense.parameters()):
        parameter.data = _random(*parameter.shape, seed=10 + number)
    return dense


def _run_attention(MyAttention: type, t: int) -> list[dict]:
    try:
        return on_ranks(_attention_job, t, MyAttention)
    except RankError:
        own = [method for name, method in vars(MyAttention).items() if name in ("__init__", "forward")]
        _require_filled("MyAttention", own)
        raise


def _require_filled(name: str, functions: Iterable[Callable]) -> None:
    if stub := next(filter(None, map(stub_in, functions)), ""):
        raise Unfilled(f"replace {stub} in {name}.") from None


def _attention_job(MyAttention: type) -> dict:
    attention, x = MyAttention(_attention()), _X.clone().requires_grad_()
    parts = {name: getattr(attention, name, None) for name in PARTS}
    for name, part in parts.items():
        if not isinstance(part, nn.Parameter):
            raise Wrong(f"MyAttention.{name} should be this rank's weight, an nn.Parameter; it is {part!r:.40}.")
    with watch() as forward:
        y = attention(x)
    require_output(y, _DY)
    with watch() as backward:
        y.backward(_DY)
    return {"Y": y.detach(), "dX": x.grad, "forward": forward, "backward": backward} | {
        f"d{name}": part.grad for name, part in parts.items()
    }


def _dense_attention(t: int) -> tuple[list[dict], list]:
    """What each rank should hold, and what it may hold instead."""
    dense, x = _attention(), _X.clone().requires_grad_()
    y = dense(x)
    y.backward(_DY)
    layers = (dense.q_proj, dense.k_proj, dense.v_proj)
    rows = [layer.weight.grad.chunk(t) for layer in layers]
    columns = dense.o_proj.weight.grad.chunk(t, 1)
    want = [
        {"Y": y.detach(), "dX": x.grad} | dict(zip(("dq", "dk", "dv", "do"), shares, strict=True))
        for shares in zip(*rows, columns, strict=True)
    ]
    wrong = [looks_like({"Y": _not_causal(dense)}, NOT_CAUSAL)]
    return want, wrong if t == 1 else [*wrong, *_attention_symptoms(dense, t)]


@torch.no_grad()
def _not_causal(dense: Attention) -> Tensor:
    q, k, v = _heads_of_x(dense)
    mixed = (q @ k.mT * _D**-0.5).softmax(-1) @ v
    return dense.o_proj(mixed.transpose(1, 2).flatten(2))


def _heads_of_x(dense: Attention) -> list[Tensor]:
    """Q, K and V of _X: [b, a, s, d] each."""
    layers = (dense.q_proj, dense.k_proj, dense.v_proj)
    return [layer(_X).unflatten(-1, (_A, _D)).transpose(1, 2) for layer in layers]


def _attention_symptoms(dense: Attention, t: int) -> list:
    share, piece = _A // t, _D // t
    parts_of_y, parts_of_dx = _parts(dense, t)
    numbers = {"a": _A, "share": share, "piece": piece, "d": _D}
    strided = {
        f"d{name}": [layer.weight.grad.unflatten(0, (_A, _D))[r::t].flatten(0, 1) for r in range(t)]
        for name, layer in zip("qkv", (dense.q_proj, dense.k_proj, dense.v_proj), strict=True)
    }

    def own_part(difference: Difference) -> str | None:
        mine = difference.name == "Y" and difference.equals(parts_of_y[difference.rank])
        return NO_REDUCE.format(rank=difference.rank) if mine else None

    return [
        own_part,
        looks_like({"dX": parts_of_dx}, NO_COPY, per_rank=True),
        looks_like({"Y": _cut_inside(dense, t)}, CUT_INSIDE.format(**numbers)),
        looks_like(strided, EVERY_TH_HEAD, per_rank=True),
    ]


def _parts(dense: Attention, t: int) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank's part of Y and of dX."""
    of_y, of_dx = [], []
    for r in range(t):
        x = _X.clone().requires_grad_()
        rows = [layer.weight.detach().chunk(t)[r] for layer in (dense.q_proj, dense.k_proj, dense.v_proj)]
        q, k, v = (linear(x, w).unflatten(-1, (-1, _D)).transpose(1, 2) for w in rows)
        mixed = explicit_attention(q, k, v).transpose(1, 2).flatten(2)
        y = linear(mixed, dense.o_proj.weight.detach().chunk(t, 1)[r])
        y.backward(_DY)
        of_y.append(y.detach())
        of_dx.append(x.grad)
    return of_y, of_dx


@torch.no_grad()
def _cut_inside(dense: Attention, t: int) -> Tensor:
    """Y where every rank takes its piece of every head's features, and runs softmax on it."""
    pieces = [[x.chunk(t, -1)[r] for x in _heads_of_x(dense)] for r in range(t)]
    mixed = torch.cat([explicit_attention(*of_rank) for of_rank in pieces], -1)  # [b, a, s, d]
    return dense.o_proj(mixed.transpose(1, 2).flatten(2))


def _require_mended(inside_a_head: Callable, t: int) -> None:
    with torch.no_grad():
        q, k, v = _heads_of_x(_attention())
    try:
        got = on_ranks(_inside_job, t, inside_a_head, q, k, v)
    except RankError:
        _require_filled("inside_a_head", [inside_a_head])
        raise
    require_returned(inside_a_head, got)
    want = explicit_attention(q, k, v).chunk(t, -1)
    compare([{"M_r": m} for m in got], [{"M_r": m} for m in want], t=t, symptoms=_inside_symptoms(q, k, v, t))


@torch.no_grad()
def _inside_job(inside_a_head: Callable, q: Tensor, k: Tensor, v: Tensor):
    r, t = group_rank(), group_size()
    return inside_a_head(*(x.chunk(t, -1)[r].clone() for x in (q, k, v)), _D)


def _inside_symptoms(q: Tensor, k: Tensor, v: Tensor, t: int) -> list:
    pieces = list(zip(*(x.chunk(t, -1) for x in (q, k, v)), strict=True))
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)

    def weights(scores: Tensor) -> Tensor:
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    own = [weights(q_r @ k_r.mT * _D**-0.5) for q_r, k_r, _ in pieces]
    own_scale = [weights(q_r @ k_r.mT * (_D // t) ** -0.5) for q_r, k_r, _ in pieces]
    whole_scores = weights(q @ k.mT * (_D // t) ** -0.5)

    def mixed(p: Sequence[Tensor]) -> dict:
        return {"M_r": [p_r @ v_r for p_r, (_, _, v_r) in zip(p, pieces, strict=True)]}

    return [
        looks_like(mixed(own), PART_OF_SCORE, per_rank=True),
        looks_like(mixed(own_scale), PART_OF_SCORE, per_rank=True),
        looks_like(mixed([whole_scores] * t), PIECE_SCALE, per_rank=True),
        looks_like(mixed([sum(own) / t] * t), SUM_AFTER, per_rank=True),
    ]


# ---- 6.3 ------------------------------------------------------------------------------------------------------------

FUSED = ((4, 2, 2, 2), (4, 2, 2, 1), (8, 4, 3, 2), (8, 4, 3, 4), (6, 6, 2, 3))  # a, k, d, t

PLAIN = "This is a plain chunk of all rows. Q, K and V are three matrices: a share of each."
IN_THIRDS = "This takes Q, K and V for three equal thirds. Q has a·d rows, K and V have k·d each."
HEADS_NOT_ROWS = "These are numbers of heads. A head is d rows of the weight."
OTHER_LAYOUT = "That would be right for the other layout."
OTHER_ORDER = "The right rows, in another order. The layer splits what it gets into queries, then keys, then values."
FILE_ORDER = "The right rows, in another order. Keep them as they lie: a group's queries, its key, its value."
ALL_ROWS_OF_KV = "Every rank has all keys and values here. k/t heads of each are its share."


@exercise("6.3")
def rows_of_a_fused_matrix(rows_stacked: Callable, rows_grouped: Callable) -> str:
    """Both (r, t, a, k, d) -> the rows of the fused weight [(a + 2k)·d, h] that rank r gets; t divides k."""
    for function, layout in ((rows_stacked, stacked), (rows_grouped, grouped)):
        for a, k, d, t in FUSED:
            for r in range(t):
                _require_rows(function, layout, (r, t, a, k, d))
    return "a share of Q, of K and of V each, in both layouts, at four sizes."


def stacked(a: int, k: int, d: int) -> list[str]:
    """Whose each row is, [q|k|v]: "q0", "q0", …"""
    names = [f"{kind}{i}" for kind, count in (("q", a), ("k", k), ("v", k)) for i in range(count)]
    return [name for name in names for _ in range(d)]


def grouped(a: int, k: int, d: int) -> list[str]:
    """Whose each row is, by KV group."""
    per = a // k
    names = [[*(f"q{j * per + i}" for i in range(per)), f"k{j}", f"v{j}"] for j in range(k)]
    return [name for group in names for name in group for _ in range(d)]


def right_rows(layout: Callable, r: int, t: int, a: int, k: int, d: int) -> list[int]:
    """Rank r's rows in this layout, in its order."""
    groups = head_groups(a, k, t)
    own = {f"q{i}" for i in groups.heads_of(r)} | {f"{kind}{j}" for kind in "kv" for j in groups.kv_heads_of(r)}
    return [row for row, name in enumerate(layout(a, k, d)) if name in own]


def _require_rows(function: Callable, layout: Callable, sizes: tuple[int, ...]) -> None:
    name = function.__name__
    given = function(*sizes)
    require_returned(function, [given])
    got, want = _integers(name, given), right_rows(layout, *sizes)
    if got == want:
        return
    r, t, a, k, d = sizes
    call = f"{name}(r={r}, t={t}, a={a}, k={k}, d={d})"
    if bad := [row for row in got if not 0 <= row < (a + 2 * k) * d]:
        raise Wrong(
            f"{call} has row {bad[0]}, and the matrix has {(a + 2 * k) * d} rows.\n{_why_rows(got, layout, sizes)}"
        )
    heads, right = (_heads_in(layout(a, k, d), rows) for rows in (got, want))
    raise Wrong(f"{call} gives rows of {heads}; right are those of {right}.\n{_why_rows(got, layout, sizes)}".rstrip())


def _heads_in(names: list[str], rows: list[int]) -> str:
    return " ".join(dict.fromkeys(names[row] for row in rows)) or "nothing"


def _why_rows(got: list[int], layout: Callable, sizes: tuple[int, ...]) -> str:
    r, t, a, k, d = sizes
    want, other = right_rows(layout, *sizes), stacked if layout is grouped else grouped
    if sorted(got) == sorted(want):
        return OTHER_ORDER if layout is stacked else FILE_ORDER
    total = (a + 2 * k) * d
    thirds = [
        range(part * total // 3 + r * (total // 3 // t), part * total // 3 + (r + 1) * (total // 3 // t))
        for part in range(3)
    ]
    known = {
        PLAIN: list(range(r * total // t, (r + 1) * total // t)),
        OTHER_LAYOUT: right_rows(other, *sizes),
        IN_THIRDS: [row for third in thirds for row in third],
        HEADS_NOT_ROWS: right_rows(layout, r, t, a, k, 1),
        ALL_ROWS_OF_KV: [*range(r * a * d // t, (r + 1) * a * d // t), *range(a * d, total)],
    }
    return next((text for text, rows in known.items() if got == rows), "")


# ---- 6.4 ------------------------------------------------------------------------------------------------------------

COUNTS = ((2, 1), (4, 2), (4, 1), (4, 4), (8, 2), (6, 3))  # t, k
ON_RANKS = ((2, 1), (4, 2), (4, 4))

EVERY_KTH = "These are every k-th rank. Neighbours hold the same KV head, since neighbouring query heads read it."
SWAPPED = "These are t/k groups of k ranks. There is one group for each KV head, so k groups, of t/k ranks."
EVERYONE = "That is one group of all ranks. Different KV heads are on different groups."
NOT_EQUAL = (
    "Same weight, same x, same K, and yet it is only this rank's part: what comes back to K is what this rank's own "
    "query heads say. Replicated means held alike, and not that the gradients are equal."
)
OVER_ALL = "This is the sum over all ranks. The others' gradients are of other KV heads: sum over the replicas alone."
COPIED_AGAIN = "dX was summed here. x has been through copy (f) already, together with the queries: leave it as it is."
MEAN_OF_PARTS = "This is the mean over the replicas. One device would have added what all query heads say: sum."
ONE_SUM = "One sum backward, over the replicas, and nothing forward."


@exercise("6.4")
def gradients_of_replicas(replicas: Callable, keys: Callable) -> str:
    """`replicas(t, k)`: the ranks that hold each KV head. `keys(x, weight_r, group)`: K of this rank's KV head."""
    for t, k in COUNTS:
        _require_groups(replicas, t, k)
    for t, k in ON_RANKS:
        results = on_ranks(_replicas_job, t, keys, k)
        require_returned(keys, results)
        want, symptoms = _replicas_reference(t, k)
        compare(results, want, t=t, symptoms=symptoms)
        if t > k:
            require_calls(results, "forward", 0, ONE_SUM)
            require_calls(results, "backward", 1, ONE_SUM)
    return "dW_k is whole on every replica, at (t, k) = (2, 1), (4, 2) and (4, 4), by one sum over t/k ranks."


def _require_groups(replicas: Callable, t: int, k: int) -> None:
    given = replicas(t, k)
    require_returned(replicas, [given])
    try:
        got = [_integers("replicas", group) for group in given]
    except TypeError:
        raise Wrong(f"replicas should return a list of lists of ranks; it returned {given!r:.60}.") from None
    size = t // k
    want = [list(range(j * size, (j + 1) * size)) for j in range(k)]
    if got != want:
        known = {
            EVERY_KTH: [list(range(j, t, k)) for j in range(k)],
            SWAPPED: [list(range(j * k, (j + 1) * k)) for j in range(size)],
            EVERYONE: [list(range(t))],
        }
        hint = next((text for text, groups in known.items() if got == groups), "")
        raise Wrong(f"replicas(t={t}, k={k}) is {got}, not {want}.\n{hint}".rstrip())


def _replicas_values(t: int, k: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x, each KV head's weight, and what comes back to K on each rank."""
    weights = [_random(_D, _H, seed=60 + j) for j in range(k)]
    return _random(2, 3, _H, seed=50), weights, [_random(2, 3, _D, seed=70 + r) for r in range(t)]


def _replicas_job(keys: Callable, k: int) -> dict | None:
    r, t = group_rank(), group_size()
    size = t // k
    groups = [dist.new_group(list(range(j * size, (j + 1) * size))) for j in range(k)]  # all of them, on every rank
    x, weights, back = _replicas_values(t, k)
    x, weight = x.requires_grad_(), weights[r // size].requires_grad_()
    with watch() as forward:
        out = keys(x, weight, groups[r // size])
    if blanks(out):
        return None
    if out.shape == back[r].shape and not out.requires_grad:
        raise Wrong("no gradient flows back from K: a plain collective gives none. Use copy_to_tp, or your own pair.")
    with watch() as backward:
        if out.shape == back[r].shape:
            out.backward(back[r])
    return {"K": out.detach(), "dW_k": weight.grad, "dX": x.grad, "forward": forward, "backward": backward}


def _replicas_reference(t: int, k: int) -> tuple[list[dict], list]:
    x, weights, back = _replicas_values(t, k)
    size = t // k
    own = [g.flatten(0, 1).T @ x.flatten(0, 1) for g in back]  # [d, n] [n, h] -> [d, h], each rank's part
    summed = [sum(own[r // size * size : (r // size + 1) * size]) for r in range(t)]
    dx = [g @ weights[r // size] for r, g in enumerate(back)]
    want = [{"K": linear(x, weights[r // size]), "dW_k": summed[r], "dX": dx[r]} for r in range(t)]
    if size == 1:
        return want, [looks_like({"dW_k": sum(own)}, OVER_ALL), looks_like({"dX": sum(dx)}, COPIED_AGAIN)]
    dx_of_group = [sum(dx[r // size * size : (r // size + 1) * size]) for r in range(t)]
    return want, [
        looks_like({"dW_k": own}, NOT_EQUAL, per_rank=True),
        looks_like({"dW_k": sum(own)}, OVER_ALL),
        looks_like({"dW_k": [value / size for value in summed]}, MEAN_OF_PARTS, per_rank=True),
        looks_like({"dX": sum(dx)}, COPIED_AGAIN),
        looks_like({"dX": dx_of_group}, COPIED_AGAIN, per_rank=True),
    ]


# ---- 6.5 ------------------------------------------------------------------------------------------------------------

EPS = 1e-6
SUMS = ("none", "all", "replicas")
OVER_WHICH = {
    "norm in front of attention": ("none", "Every rank norms the same x alike, so each has the whole gradient of it."),
    "bias of W_o": ("none", "It is added to the same sum on every rank: dY summed over tokens, the same everywhere."),
    "gamma of QK-norm": ("all", "Every rank uses it on heads of its own, so all ranks hold parts of one gradient."),
    "W_k of a KV head on 2 ranks": (
        "replicas",
        "Only the ranks that hold this KV head use it, each for query heads of its own: these two hold the parts.",
    ),
    "W_q of this rank's heads": (
        "none",
        "It is on this rank alone, and so is all that uses it: whole where it stands.",
    ),
}
OWN_GAMMA = "It is what this rank's own heads say. gamma is used by the heads of all ranks: add the parts."
OVER_HEADS = "The mean of squares was taken over all heads of the rank. Here it is over each head's d features alone."
NORM_NEEDS_NO_WORD = "A head is whole on its rank, and so is its norm: nothing is sent forward."


@exercise("6.5")
def one_gamma_for_all_heads(head_norm: Callable, summed_over: Mapping) -> str:
    """`head_norm(q, gamma)` for q [b, s, a/t, d] and gamma [d]; `summed_over`: a name of SUMS for each weight."""
    for t in SIZES:
        results = on_ranks(_norm_job, t, head_norm)
        require_returned(head_norm, results)
        want, symptoms = _norm_reference(t)
        compare(results, want, t=t, symptoms=symptoms)
        if t > 1:
            require_calls(results, "forward", 0, NORM_NEEDS_NO_WORD)
            require_calls(results, "backward", 1, "One all-reduce, of dgamma, is all that is needed.")
    if not isinstance(summed_over, Mapping) or set(summed_over) != set(OVER_WHICH):
        raise Wrong(f"summed_over should be a dict with the keys {', '.join(map(repr, OVER_WHICH))}.")
    for name, (right, why) in OVER_WHICH.items():
        given = str(summed_over[name]).strip().lower()
        if given not in SUMS:
            raise Wrong(f"{name}: {summed_over[name]!r} is none of {', '.join(map(repr, SUMS))}.")
        if given != right:
            raise Wrong(f'{name}: not "{given}".\n{why}')
    return "dgamma on every rank at t = 1, 2, 4 by one sum backward; and it depends on who uses a weight."


def _norm_values() -> tuple[Tensor, Tensor, Tensor]:
    """q [b, s, a, d], gamma [d], and what comes back."""
    return _random(2, 3, _A, _D, seed=90), 1 + _random(_D, seed=91) / 4, _random(2, 3, _A, _D, seed=92)


def _norm_job(head_norm: Callable) -> dict | None:
    r, t = group_rank(), group_size()
    q, gamma, back = _norm_values()
    q, gamma, back = q.chunk(t, 2)[r].clone().requires_grad_(), gamma.requires_grad_(), back.chunk(t, 2)[r]
    with watch() as forward:
        y = head_norm(q, gamma)
    if blanks(y):
        return None
    if y.shape != q.shape:
        return {"Y": y.detach()}  # the comparison says that the shape is wrong
    if not y.requires_grad:
        raise Wrong("no gradient flows back from Y: a plain collective gives none. Use copy_to_tp, or your own pair.")
    with watch() as backward:
        y.backward(back)
    return {"Y": y.detach(), "dq": q.grad, "dgamma": gamma.grad, "forward": forward, "backward": backward}


def _norm_reference(t: int) -> tuple[list[dict], list]:
    q, gamma, back = _norm_values()
    q, gamma = q.requires_grad_(), gamma.requires_grad_()
    y = rms_norm(q, (_D,), gamma, EPS)
    y.backward(back)
    want = [
        {"Y": y_r, "dq": dq, "dgamma": gamma.grad}
        for y_r, dq in zip(y.detach().chunk(t, 2), q.grad.chunk(t, 2), strict=True)
    ]
    pieces = q.detach().chunk(t, 2)
    over_heads = [rms_norm(piece, piece.shape[2:], gamma.detach().expand(piece.shape[2:]), EPS) for piece in pieces]
    wrong = [looks_like({"Y": over_heads}, OVER_HEADS, per_rank=True)]
    if t > 1:
        normed = y.detach() / gamma.detach()
        own = [(b_r * n_r).sum((0, 1, 2)) for b_r, n_r in zip(back.chunk(t, 2), normed.chunk(t, 2), strict=True)]
        wrong.append(looks_like({"dgamma": own}, OWN_GAMMA, per_rank=True))
    return want, wrong
