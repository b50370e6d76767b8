"""Chapter 11, sequence parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softmax

from tpcode.comm import (
    all_reduce,
    copy_to_tp,
    gather_sequence,
    group_rank,
    group_size,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_sequence,
)
from tpcode.config import ModelConfig
from tpcode.dense import GPT2, Attention
from tpcode.grading.answers import blanks
from tpcode.grading.ch08 import NORMS, AttentionPart, FFNPart
from tpcode.grading.compare import Difference, compare, compare_one, looks_like
from tpcode.grading.failures import Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_returned
from tpcode.grading.registry import exercise
from tpcode.layers import LayerNorm, ParallelAttention
from tpcode.runtime.notes import watch

AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"


def _random(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _counted(calls: Sequence[str]) -> Counter:
    """How often each operation was called, whatever torch's name for it: "all_gather_single", "all_gather"."""
    names = (AG, RS, AR)
    return Counter(next((name for name in names if call.startswith(name)), call.split()[0]) for call in calls)


def _in_words(counts: Mapping[str, int]) -> str:
    words = [f"{n} {name.replace('_', '-')}{'s' if n > 1 else ''}" for name, n in sorted(counts.items())]
    return " and ".join(words) or "no collective"


def _require_counts(got: Sequence[Mapping], want: Mapping[str, Mapping[str, int]], hints: Callable) -> None:
    """Raise Wrong unless every rank made exactly these collectives in each phase."""
    t = len(got)
    for rank, mine in enumerate(got):
        for phase, expected in want.items():
            found = _counted(mine[phase])
            if found != Counter(expected):
                raise Wrong(
                    f"{phase} made {_in_words(found)} on rank {rank} at t = {t}; the ledger has {_in_words(expected)}."
                    f"\n{hints(phase, found)}".rstrip()
                )


# ---- 11.1 -----------------------------------------------------------------------------------------------------------

SUMMANDS = torch.tensor(  # [rank, token, feature]
    [
        [[1, 4], [0, 5], [2, 3]],
        [[9, 3], [3, 3], [7, 0]],
        [[2, 2], [6, 3], [1, 8]],
    ]
)

OWN_SUMMANDS = "That is each rank's own summand for its token. A reduce-scatter adds up the summands of all ranks."
WHOLE_SUM = "That is what an all-reduce leaves: the whole sum on every rank. Here rank r has the sum for token r alone."
NEXT_TOKEN = "The tokens are one rank off: rank r's piece is token r."
BY_FEATURES = "The pieces are features. The sequence is cut: rank r has both features of token r."
NORM_OF_SUMMANDS = "These are norms of summands, added up. The norm of a sum is not the sum of norms: first the sum."
NOT_NORMED = "That is the sum, not yet normed: subtract each token's smallest feature."
LARGEST = "Subtract the token's smallest feature, not its largest."
SMALLEST_OF_ALL = "The smallest of all tokens was subtracted. A norm looks at one token, and at no other."
ADDED_UP = "An all-gather adds nothing: it puts the pieces side by side."
ONE_PIECE = "That is one rank's piece. After the all-gather every rank has all three."
ONE_HALF = "That is one half alone. The other half sends as much."
PAYLOAD = "That is the payload, the 6 entries of the tensor. On a ring of 3 ranks each half sends 2/3 of it."
TWICE = "That is twice the payload, what many ranks send. On 3 ranks it is 2·2/3 of it."
ALL_RANKS = "That is what all three ranks send together. It is asked for one."
LESS = "Sequence parallelism sends no less: a reduce-scatter and an all-gather are the two halves of an all-reduce."


@exercise("11.1")
def halves_on_paper(
    after_reduce_scatter, after_norm, after_all_gather, entries_by_all_reduce, entries_by_halves
) -> str:
    """What each of three ranks holds, [rank][feature]; what each holds in the end, [token][feature]; entries sent."""
    total = SUMMANDS.sum(0)
    normed = _toy_norm(total)
    of_summands = _toy_norm(SUMMANDS).sum(0)
    scattered = [
        looks_like({"after_reduce_scatter": SUMMANDS.diagonal(0, 0, 1).T}, OWN_SUMMANDS),
        looks_like({"after_reduce_scatter": total.roll(1, 0)}, NEXT_TOKEN),
        looks_like({"after_reduce_scatter": total.roll(-1, 0)}, NEXT_TOKEN),
    ]
    symptoms = [
        looks_like({"after_norm": of_summands, "after_all_gather": of_summands}, NORM_OF_SUMMANDS),
        looks_like({"after_norm": total, "after_all_gather": total}, NOT_NORMED),
        looks_like({"after_norm": total - total.amax(-1, keepdim=True)}, LARGEST),
        looks_like({"after_norm": total - total.min()}, SMALLEST_OF_ALL),
    ]
    _require_whole_or(after_reduce_scatter, total)
    compare_one("after_reduce_scatter", after_reduce_scatter, total, symptoms=scattered, reveal=False)
    compare_one("after_norm", after_norm, normed, symptoms=symptoms, reveal=False)
    _require_all_pieces(after_all_gather, normed)
    compare_one("after_all_gather", after_all_gather, normed, symptoms=symptoms, reveal=False)
    for name, value in {"entries_by_all_reduce": entries_by_all_reduce, "entries_by_halves": entries_by_halves}.items():
        hints = {4: ONE_HALF if name == "entries_by_all_reduce" else LESS, 6: PAYLOAD, 12: TWICE, 24: ALL_RANKS}
        compare_one(name, value, 8, symptoms=[looks_like({name: n}, hint) for n, hint in hints.items()], reveal=False)
    return "all three steps, and 8 entries from each rank either way."


def _toy_norm(x: Tensor) -> Tensor:
    return x - x.amin(-1, keepdim=True)


def _require_whole_or(answer, total: Tensor) -> None:
    """Name what has the shape of another way to share the sum out."""
    shape = list(torch.as_tensor(answer).shape) if _is_numbers(answer) else None
    if shape == [3, 3, 2]:
        raise Wrong(f"after_reduce_scatter has three tokens on each rank.\n{WHOLE_SUM}")
    if shape in ([2, 3], [3, 3]):
        raise Wrong(f"after_reduce_scatter has shape {shape}, not {list(total.shape)}.\n{BY_FEATURES}")


def _require_all_pieces(answer, normed: Tensor) -> None:
    shape = list(torch.as_tensor(answer).shape) if _is_numbers(answer) else None
    if shape == [2]:
        added = torch.equal(torch.as_tensor(answer), normed.sum(0))
        raise Wrong(f"after_all_gather has shape [2], not [3, 2].\n{ADDED_UP if added else ONE_PIECE}")


def _is_numbers(answer) -> bool:
    try:
        torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


# ---- 11.2 -----------------------------------------------------------------------------------------------------------

PAIRS = {"forward": {AG: 2, RS: 2}, "backward": {AG: 2, RS: 2}}

NORM_SAW_ALL = (
    "The norm on rank {rank} saw {got} tokens of each sequence, and this rank has {want}: it was gathered too early. "
    "Output and gradients come out right, but each norm's work and memory is there {t} times again. Gather behind the "
    "norm."
)
REDUCED_THEN_CUT = (
    "An all-reduce sends both halves, and then a slice throws most of it away: keep each rank's tokens in the sum "
    "itself, reduce_scatter_sequence."
)
SPLIT_BACK = (
    "The gather's backward is a plain split (replicated_consumer=True): each rank keeps its own part of dX and loses "
    "what the other ranks' heads and columns say of its tokens."
)
COPY_TOO = "Copy (f) is still there: it sums dX over the ranks, and then the gather's own backward sums it again."
NO_BIAS = "The row layers' biases are missing."
BIAS_IN_SUM = "The row layers' biases were added before the sum, on every rank: they are in there t times."
NORMED_STREAM = "The stream itself was normed. The norm is for the branch alone; what is added to is x as it came."
SWAPPED = "The two norms changed places."


def _one(x, n, p):
    return x + reduce_scatter_sequence(p(gather_sequence(n(x)))) + p.bias


def _normed(x, n, p):
    return _one(n(x), lambda x: x, p)


def _both(block: Callable) -> Callable:
    return lambda x, n1, a, n2, m: block(block(x, n1, a), n2, m)


WRONG_SLICES: dict[str, Callable] = {
    SPLIT_BACK: _both(
        lambda x, n, p: x + reduce_scatter_sequence(p(gather_sequence(n(x), replicated_consumer=True))) + p.bias
    ),
    COPY_TOO: _both(lambda x, n, p: x + reduce_scatter_sequence(p(copy_to_tp(gather_sequence(n(x))))) + p.bias),
    NO_BIAS: _both(lambda x, n, p: x + reduce_scatter_sequence(p(gather_sequence(n(x))))),
    BIAS_IN_SUM: _both(lambda x, n, p: x + reduce_scatter_sequence(p(gather_sequence(n(x))) + p.bias)),
    NORMED_STREAM: _both(_normed),
    SWAPPED: lambda x, n1, a, n2, m: _both(_one)(x, n2, a, n1, m),
}
_THEN_CUT = _both(lambda x, n, p: x + scatter_sequence(reduce_from_tp(p(gather_sequence(n(x))))) + p.bias)


@exercise("11.2")
def layer_of_slices(layer_of_slices: Callable) -> str:
    """`layer_of_slices(x, norm_1, attention, norm_2, ffn)` on this rank's [b, s/t, h]; parts as in exercise 8.2."""
    for t in SIZES:
        got = on_ranks(_slices_job, t, layer_of_slices)
        require_returned(layer_of_slices, [mine["Y"] for mine in got])
        if t > 1:
            _require_own_tokens(got)
        compare(got, _slices_of_dense(t), t=t, symptoms=[_known_slices(t)])
        if t > 1:
            _require_counts(got, PAIRS, _pair_hints)
    return "the dense layer at t = 1, 2 and 4, in 4 all-gathers and 4 reduce-scatters."


def _slices_job(layer: Callable) -> dict:
    dense, x, dy = _layer_and_inputs()
    parts = nn.ModuleDict(
        {"norm_1": dense.ln_1, "attention": AttentionPart(dense.attn), "norm_2": dense.ln_2, "ffn": FFNPart(dense.mlp)}
    )
    seen: list[int] = []
    for norm in (dense.ln_1, dense.ln_2):
        norm.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    leaf, own_dy = scatter_sequence(x).clone().requires_grad_(), scatter_sequence(dy)
    with watch() as forward:
        y = layer(leaf, *parts.values())
    if y is None or y is Ellipsis:
        return {"Y": y}
    if not isinstance(y, Tensor) or y.shape != own_dy.shape or not y.requires_grad:
        raise Wrong(_bad_slice(y, own_dy))
    with watch() as backward:
        y.backward(own_dy)
    if leaf.grad is None:
        raise Wrong("no gradient comes back to x: use gather_sequence and reduce_scatter_sequence.")
    found = {"Y": y.detach(), "dX": leaf.grad, "seen": max(seen, default=0)}
    norms = {name: parts.get_parameter(name) for name in NORMS}
    found |= {f"d {name}, summed": all_reduce(p.grad) for name, p in norms.items() if p.grad is not None}
    return found | {"forward": forward, "backward": backward}


def _bad_slice(y, like: Tensor) -> str:
    if not isinstance(y, Tensor):
        return f"layer_of_slices returned {y!r:.40}; it should be a tensor."
    if y.shape != like.shape:
        return f"Y has shape {list(y.shape)}, not {list(like.shape)}: this rank's tokens, all features."
    return "Y has no gradient: a plain collective gives none. Use the pairs along the sequence."


def _layer_and_inputs() -> tuple[nn.Module, Tensor, Tensor]:
    """A dense layer of which every entry is distinct; [b, s, h] both."""
    config = ModelConfig(family="gpt2", hidden=8, ffn=32, heads=4, layers=1, vocab=4, max_seq=4)
    layer = GPT2(config, std=None, core="explicit", dtype=torch.float64).transformer.h[0]
    x, dy, *values = _random(11, (2, 4, 8), (2, 4, 8), *(tuple(p.shape) for p in layer.parameters()))
    for parameter, value in zip(layer.parameters(), values, strict=True):
        parameter.data = value * 0.4 + float(parameter.dim() == 1)
    return layer, x, dy


def _slices_of_dense(t: int) -> list[dict]:
    layer, x, dy = _layer_and_inputs()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    whole = {f"d {name}, summed": layer.get_parameter(name.replace("norm_", "ln_")).grad for name in NORMS}
    pairs = zip(y.detach().chunk(t, 1), leaf.grad.chunk(t, 1), strict=True)
    return [{"Y": own, "dX": dx, **whole} for own, dx in pairs]


def _require_own_tokens(got: Sequence[Mapping]) -> None:
    t, want = len(got), 4 // len(got)
    for rank, mine in enumerate(got):
        if mine["seen"] > want:
            raise Wrong(NORM_SAW_ALL.format(rank=rank, got=mine["seen"], want=want, t=t))


def _known_slices(t: int) -> Callable[[Difference], str | None]:
    """A symptom: the value is that of one of WRONG_SLICES, which is run on ranks only now."""

    def symptom(difference: Difference) -> str | None:
        for fault in WRONG_SLICES:
            known = _wrong_slices(t, fault)[difference.rank].get(difference.name)
            if known is not None and difference.equals(known):
                return fault
        return None

    return symptom


@cache
def _wrong_slices(t: int, fault: str) -> list[dict]:
    return on_ranks(_wrong_slices_job, t, fault)


def _wrong_slices_job(fault: str) -> dict:
    return _slices_job(WRONG_SLICES[fault])


def _pair_hints(phase: str, found: Counter) -> str:
    if phase == "forward" and found[AR]:
        return REDUCED_THEN_CUT
    if phase == "backward" and found[AR]:
        return COPY_TOO
    return ""


# ---- 11.3 -----------------------------------------------------------------------------------------------------------

PARTS = ("positions.weight", "norm.weight", "norm.bias", "o_proj.bias")
MEAN = "It is the mean of the ranks' parts. A gradient sums over tokens, wherever they stand."
SHARES_ADDED = "These are the ranks' shares of a cut parameter, added up: gradients of different rows or columns."
WHOLE_ALREADY = (
    "q_norm is used by each rank on its own heads, and so its parts were summed within backward already: a second sum "
    "makes it t times too large."
)
FORGOTTEN = {
    "positions.weight": "Each rank looked up the positions of its own tokens, and has zeros in the others' rows.",
    "norm.weight": "Each rank normed its own tokens: its gradient of gamma knows no others.",
    "norm.bias": "The norm's bias was added to this rank's tokens alone, like its weight.",
    "o_proj.bias": "A row layer's bias is added after the reduce-scatter, to this rank's tokens alone.",
}
TOO_MUCH_SENT = (
    "it sent {got} numbers on rank {rank}; the parts are {want}. Sum what is a part, and send nothing for the rest."
)


@exercise("11.3")
def finalize_eight_gradients(finalize: Callable) -> str:
    """`finalize(grads)`: this rank's eight gradients by name -> the dense ones', or this rank's shares of them."""
    for t in (2, 4):
        by_rank = on_ranks(_finalize_job, t, finalize)
        require_returned(finalize, [mine[0] for mine in by_rank])
        before, want = [mine[1] for mine in by_rank], [mine[2] for mine in by_rank]
        got = [_by_name(mine[0], before[0]) for mine in by_rank]
        compare(got, want, t=t, symptoms=_grad_symptoms(before))
        size = sum(before[0][name].numel() for name in PARTS)
        for rank, (*_, sent) in enumerate(by_rank):
            if sent > size:
                raise Wrong(TOO_MUCH_SENT.format(got=sent, rank=rank, want=size))
    return "four of eight are summed, at t = 2 and 4, and the others are left alone."


def _finalize_job(finalize: Callable) -> tuple:
    """What finalize returned; the gradients that it was given; the right ones; and how many numbers were sent."""
    own = _own_gradients()
    given = {name: grad.clone() for name, grad in own.items()}
    with watch() as calls:
        result = finalize(given)
    sent = sum(_numbers_in(call) for call in calls)
    right = {name: all_reduce(grad) if name in PARTS else grad for name, grad in own.items()}
    if isinstance(result, Mapping):
        result = {name: grad.detach() if isinstance(grad, Tensor) else grad for name, grad in result.items()}
    return result, own, right, sent


def _own_gradients() -> dict[str, Tensor]:
    """Of positions, a norm, and attention with QK-norm, under sequence parallelism: each rank's after backward."""
    torch.manual_seed(3)
    with torch.device("cpu"):
        dense = Attention(8, 4, bias=True, qk_norm="head", core="explicit", dtype=torch.float64)
        norm, table = nn.LayerNorm(8, dtype=torch.float64), nn.Embedding(4, 8, dtype=torch.float64)
    for parameter in (*norm.parameters(), dense.q_norm.weight, dense.k_norm.weight):
        nn.init.normal_(parameter, mean=1.0)
    x, dy = _random(12, (2, 4, 8), (2, 4, 8))
    attention = ParallelAttention.from_dense(dense, sequence_parallel=True)
    norm, positions = LayerNorm.from_dense(norm, partial_grad=True), table.weight
    own = torch.arange(4).chunk(group_size())[group_rank()]
    attention(norm(scatter_sequence(x) + positions[own])).backward(scatter_sequence(dy))
    return {
        "positions.weight": positions.grad,
        "norm.weight": norm.weight.grad,
        "norm.bias": norm.bias.grad,
        "qkv.weight": attention.qkv.weight.grad,
        "qkv.bias": attention.qkv.bias.grad,
        "q_norm.weight": attention.q_norm.weight.grad,
        "o_proj.weight": attention.o_proj.weight.grad,
        "o_proj.bias": attention.o_proj.bias.grad,
    }


def _by_name(result, names: Mapping) -> Mapping:
    if not isinstance(result, Mapping):
        raise Wrong(f"finalize returned {result!r:.60}; it should return the gradients by name, as it was given them.")
    if missing := [name for name in names if name not in result]:
        raise Wrong(f"finalize returned no {', '.join(missing)}: all eight gradients come back, changed or not.")
    return result


def _grad_symptoms(before: Sequence[Mapping[str, Tensor]]) -> list:
    t = len(before)
    sums = {name: torch.stack([mine[name] for mine in before]).sum(0) for name in before[0]}
    cut = ("qkv.weight", "qkv.bias", "o_proj.weight")
    symptoms = [
        looks_like({name: sums[name] / t for name in PARTS}, MEAN),
        looks_like({name: sums[name] for name in cut}, SHARES_ADDED),
        looks_like({name: sums[name] / t for name in cut}, SHARES_ADDED),
        looks_like({"q_norm.weight": sums["q_norm.weight"]}, WHOLE_ALREADY),
    ]
    for name, sentence in FORGOTTEN.items():
        symptoms.append(looks_like({name: [mine[name] for mine in before]}, sentence, per_rank=True))
    return symptoms


def _numbers_in(call: str) -> int:
    """How many numbers a call sends, "all_reduce SUM float64 [2, 3]"; 0 where there is no shape."""
    shape = call[call.rfind("[") + 1 : call.rfind("]")] if "[" in call else "0"
    count = 1
    for size in filter(None, (part.strip() for part in shape.split(","))):
        count *= int(size)
    return count


# ---- 11.4 -----------------------------------------------------------------------------------------------------------

COLUMN = {"forward": {AG: 1}, "backward": {AG: 1, RS: 1}}
WHOLE_KEPT = (
    "the layer keeps {got} bytes of activations on rank {rank} at t = {t}; the slice is {want}. The gathered X is "
    "kept: memory was not saved. Make gather and product one autograd.Function, and save x_r."
)
HIDDEN = (
    "Backward needs all of X for dW, and gathered nothing: the whole X was kept after all, on ctx or in a closure, "
    "where it takes the same memory. Keep the slice, and gather it again."
)
OWN_TOKENS_ONLY = "It is the product with this rank's own tokens. dW sums over all tokens: gather X again."
OWN_PART = "It is this rank's part for its tokens. The other ranks' columns used them too: reduce-scatter the parts."
REDUCED_DX = (
    "An all-reduce gives each rank all of dX, of which it needs its own tokens: a reduce-scatter sends half as much."
)
DW_SUMMED = "dW is whole where it stands: it is of this rank's columns, and every token is in it. Nobody adds it up."


@exercise("11.4")
def column_that_keeps_its_slice(column_of_slices: Callable) -> str:
    """`column_of_slices(x_r, weight)`: [b, s/t, h] and [F/t, h] -> [b, s, F/t]."""
    for t in SIZES:
        got = on_ranks(_column_job, t, column_of_slices)
        require_returned(column_of_slices, [mine["Y_r"] for mine in got])
        compare(got, [_column_want(rank, t) for rank in range(t)], t=t, symptoms=_column_symptoms(t))
        if t == 1:
            continue
        slice_bytes = 8 * 2 * 4 * 6 // t
        for rank, mine in enumerate(got):
            if mine["kept"] > slice_bytes:
                raise Wrong(WHOLE_KEPT.format(got=mine["kept"], rank=rank, t=t, want=slice_bytes))
        _require_counts(got, COLUMN, _column_hints)
    return "1/t of the input kept, and 3 units a column layer: with 2 for each row layer that is the layer's 10."


@cache
def _column_inputs() -> list[Tensor]:
    return _random(14, (2, 4, 6), (8, 6), (2, 4, 8))


def _column_job(column: Callable) -> dict:
    x, whole, dy = _column_inputs()
    r, t = group_rank(), group_size()
    leaf = scatter_sequence(x).clone().requires_grad_()
    weight = whole.chunk(t)[r].clone().requires_grad_()
    own_dy, storages = dy.chunk(t, -1)[r], {}
    known = {weight.untyped_storage().data_ptr()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with watch() as forward, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = column(leaf, weight)
    if y is None or y is Ellipsis:
        return {"Y_r": y}
    if not isinstance(y, Tensor) or y.shape != own_dy.shape:
        got = list(y.shape) if isinstance(y, Tensor) else f"{y!r:.40}"
        raise Wrong(f"Y_r is {got}, not {list(own_dy.shape)}: all tokens, this rank's columns.")
    if not y.requires_grad:
        raise Wrong("Y_r has no gradient: a plain collective gives none. Write an autograd.Function.")
    kept = sum(size for _, size in storages.values())
    with watch() as backward:
        y.backward(own_dy)
    missing = [name for name, tensor in {"x_r": leaf, "weight": weight}.items() if tensor.grad is None]
    if missing:
        raise Wrong(f"no gradient comes back to {' and '.join(missing)}.")
    found = {"Y_r": y.detach(), "dX_r": leaf.grad, "dW_r": weight.grad, "kept": kept}
    return found | {"forward": forward, "backward": backward}


def _column_want(rank: int, t: int) -> dict:
    x, whole, dy = _column_inputs()
    columns, own_dy = whole.chunk(t)[rank], dy.chunk(t, -1)[rank]
    dw = own_dy.flatten(0, 1).T @ x.flatten(0, 1)
    return {"Y_r": x @ columns.T, "dX_r": (dy @ whole).chunk(t, 1)[rank], "dW_r": dw}


def _column_symptoms(t: int) -> list:
    x, whole, dy = _column_inputs()
    columns, dys = whole.chunk(t), dy.chunk(t, -1)
    own_dw = [
        dys[r].chunk(t, 1)[r].flatten(0, 1).T @ x.chunk(t, 1)[r].flatten(0, 1) for r in range(t)
    ]  # with this rank's tokens alone
    own_dx = [(dys[r] @ columns[r]).chunk(t, 1)[r] for r in range(t)]
    summed = sum(dys[r].flatten(0, 1).T @ x.flatten(0, 1) for r in range(t))
    return [
        looks_like({"dW_r": own_dw}, OWN_TOKENS_ONLY, per_rank=True),
        looks_like({"dX_r": own_dx}, OWN_PART, per_rank=True),
        looks_like({"dW_r": summed}, DW_SUMMED),
    ]


def _column_hints(phase: str, found: Counter) -> str:
    if phase != "backward":
        return ""
    if found[AR]:
        return REDUCED_DX
    return HIDDEN if not found[AG] else ""


# ---- 11.5 -----------------------------------------------------------------------------------------------------------

ROUTER_T_TIMES = (
    "The router's share of it is in there {t} times: every rank computes the same probabilities, so each has all of "
    "their gradient already. For the router the backward is a split."
)
COLUMN_LOST = (
    "What the other ranks' columns say of these tokens is lost: for the column product each rank has a part, and the "
    "backward is a reduce-scatter."
)
AVERAGED = (
    "All of it was divided by t. The router's share is t times too large after a reduce-scatter; the column's is not."
)
GATE_SUMMED = "The router's own gradient is whole on every rank: all ranks saw all tokens."
NO_ROUTER = "The router's share is missing: no gradient comes back through the probabilities."


@exercise("11.5")
def router_beside_a_column(router_and_column: Callable) -> str:
    """`router_and_column(x_r, gate, weight)`: [b, s/t, h], [e, h], [F/t, h] -> P [b, s, e], Y_r [b, s, F/t]."""
    for t in SIZES:
        got = on_ranks(_router_job, t, router_and_column)
        require_returned(router_and_column, [mine["P"] for mine in got])
        compare(got, [_router_want(rank, t)[0] for rank in range(t)], t=t, symptoms=_router_symptoms(t))
        for rank, mine in enumerate(got):
            calls = _counted([*mine["forward"], *mine["backward"]])
            if t > 1 and (calls[AG] > 2 or calls[AR] or calls[RS] > 1):
                raise Wrong(
                    f"{_in_words(calls)} on rank {rank} at t = {t}. At most 2 all-gathers and 1 reduce-scatter are "
                    "needed."
                )
    return "a split for the router, a reduce-scatter for the columns, at t = 1, 2 and 4."


@cache
def _router_inputs() -> list[Tensor]:
    return _random(15, (2, 4, 6), (3, 6), (8, 6), (2, 4, 3), (2, 4, 8))


def _router_job(function: Callable) -> dict:
    x, gate, whole, dp, dy = _router_inputs()
    r, t = group_rank(), group_size()
    leaf = scatter_sequence(x).clone().requires_grad_()
    gate, weight = gate.clone().requires_grad_(), whole.chunk(t)[r].clone().requires_grad_()
    with watch() as forward:
        returned = function(leaf, gate, weight)
    if blanks(returned):
        return {"P": None}
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise Wrong("router_and_column returns two tensors: the probabilities and Y_r.")
    p, y = returned
    own_dy = dy.chunk(t, -1)[r]
    for name, tensor, like in (("the probabilities", p, dp), ("Y_r", y, own_dy)):
        if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else f"{tensor!r:.40}"
            raise Wrong(f"{name}: {got}, not {list(like.shape)}, all tokens.")
        if not tensor.requires_grad:
            raise Wrong(f"{name}: no gradient flows back through them. A plain collective gives none.")
    with watch() as backward:
        torch.autograd.backward([p, y], [dp, own_dy])
    grads = {"dX_r": leaf, "d gate": gate, "dW_r": weight}
    if missing := [name for name, tensor in grads.items() if tensor.grad is None]:
        raise Wrong(f"no gradient arrives for {' and '.join(missing)}.")
    found = {"P": p.detach(), "Y_r": y.detach()} | {name: tensor.grad for name, tensor in grads.items()}
    return found | {"forward": forward, "backward": backward}


@cache
def _router_want(rank: int, t: int) -> tuple[dict, Tensor, Tensor, Tensor]:
    """What is right on a rank; and of its dX the router's share, the columns' share, and its own part of that."""
    x, gate, whole, dp, dy = _router_inputs()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, gate)]
    p = softmax(linear(*leaves), -1)
    p.backward(dp)
    columns, own_dy = whole.chunk(t)[rank], dy.chunk(t, -1)[rank]
    by_router, by_columns = leaves[0].grad.chunk(t, 1)[rank], (dy @ whole).chunk(t, 1)[rank]
    own_part = (own_dy @ columns).chunk(t, 1)[rank]
    right = {
        "P": p.detach(),
        "Y_r": x @ columns.T,
        "dX_r": by_router + by_columns,
        "d gate": leaves[1].grad,
        "dW_r": own_dy.flatten(0, 1).T @ x.flatten(0, 1),
    }
    return right, by_router, by_columns, own_part


def _router_symptoms(t: int) -> list:
    wants = [_router_want(rank, t) for rank in range(t)]

    def dx(combine: Callable, sentence: str):
        return looks_like({"dX_r": [combine(*shares) for _, *shares in wants]}, sentence, per_rank=True)

    return [
        dx(lambda router, columns, part: t * router + columns, ROUTER_T_TIMES.format(t=t)),
        dx(lambda router, columns, part: router + part, COLUMN_LOST),
        dx(lambda router, columns, part: (t * router + columns) / t, AVERAGED),
        dx(lambda router, columns, part: columns, NO_ROUTER),
        looks_like({"d gate": t * wants[0][0]["d gate"]}, GATE_SUMMED),
    ]
