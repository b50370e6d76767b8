"""Chapter 9, details that bite."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from io import StringIO
from itertools import combinations
from math import sqrt
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tpcode import dense, training
from tpcode.comm import all_reduce, group_rank, group_size
from tpcode.config import ModelConfig
from tpcode.grading.answers import blanks, calls_in
from tpcode.grading.compare import compare, looks_like
from tpcode.grading.failures import Wrong
from tpcode.grading.numbers import called
from tpcode.grading.ranks import SIZES, on_ranks, require_calls, require_returned
from tpcode.grading.registry import exercise
from tpcode.layers import Placement
from tpcode.model import ParallelTransformer
from tpcode.runtime.notes import watch
from tpcode.shapes import divide, padded_vocab

# ---- 9.1 ------------------------------------------------------------------------------------------------------------

WEIGHTS = {"up": ((48, 32), 0), "down": ((32, 48), 1)}  # whole shape [outputs, inputs], and where it is cut
SPREAD = 0.1  # how far a measured standard deviation of 1536 numbers may be off, as a fraction; 5 of its own deviations

NO_TENSOR = "{call} returned {kind}; it should return a tensor."
WHOLE_KEPT = "{call} is the whole weight. A rank keeps its part along dim = {dim}."
OTHER_DIM = "{call} has shape {got}: it was cut along the other dimension. This weight is cut along dim = {dim}."
OTHER_SHAPE = "{call} has shape {got}, not {want}."
NOT_ITS_OWN = (
    "called twice, with other random numbers drawn in between, {call} gives two different shards. Hand the generator "
    "to every draw: generator=generator."
)
HASH = "hash() of a text is another number in each process, so ranks would draw from different seeds."
NO_NAME = "two weights of one shape and different names begin with the same values: the name has no part in the seed."
NO_SEED = "the seeds 7 and 8 give the same weight."
SAME_SHARD = (
    "ranks {pair} of t = {t} begin {name} with the same shard: each drew the beginning of the same sequence. Training "
    "never parts them. Draw the whole weight on every rank, then slice."
)
FAN_IN = (
    "at t = {t} the shards of {name}, put together, are the weight of one device times √{t}: fan-in was read off the "
    "shard, which has {inputs} inputs. The whole weight has {all_inputs}."
)
OTHER_RANKS = (
    "at t = {t} the ranks have the right values of {name}, but not in order: rank r's part is the r-th of t equal "
    "pieces that lie side by side."
)
OTHER_MODEL = (
    "at t = {t} the shards of {name} differ from each other and are, put together, not the weight that one device "
    "begins with: what is drawn depends on r or t. Then no run at t = {t} can be compared with one at t = 1."
)
FAN_OUT = "the standard deviation of {name} is 1/√outputs. Each output adds up its inputs: 1/√inputs."
OTHER_SPREAD = "the standard deviation of {name} is {got:.3f} on one device, and 1/√inputs is {want:.3f}."


@exercise("9.1")
def first_weights_independent_of_t(first_shard: Callable) -> str:
    """`first_shard(name, shape, dim, seed, r, t)`: rank r's shard of a weight of this whole shape."""
    if "hash" in calls_in(first_shard):
        raise Wrong(HASH)
    ones = {name: _shard(first_shard, name, 0, 1) for name in WEIGHTS}
    for name, whole in ones.items():
        _require_repeatable(first_shard, name, whole)
        _require_spread(name, whole)
    shape, dim = WEIGHTS["up"]
    if torch.equal(first_shard("gate", shape, dim, 7, 0, 1), ones["up"]):
        raise Wrong(NO_NAME)
    if torch.equal(first_shard("up", shape, dim, 8, 0, 1), ones["up"]):
        raise Wrong(NO_SEED)
    for name, whole in ones.items():
        for t in SIZES[1:]:
            _require_slices(name, [_shard(first_shard, name, r, t) for r in range(t)], whole)
    return "the same weights at t = 1, 2, 4, to the last bit, and no two ranks alike."


def _shard(first_shard: Callable, name: str, r: int, t: int) -> Tensor:
    shape, dim = WEIGHTS[name]
    call = f'first_shard("{name}", {shape}, {dim}, 7, {r}, {t})'
    shard = called("first_shard", first_shard, (name, shape, dim, 7, r, t))
    if not isinstance(shard, Tensor):
        raise Wrong(NO_TENSOR.format(call=call, kind=type(shard).__name__))
    want, other = list(shape), list(shape)
    want[dim] //= t
    other[1 - dim] //= t
    got = list(shard.shape)
    if got != want:
        text = WHOLE_KEPT if got == list(shape) else OTHER_DIM if got == other else OTHER_SHAPE
        raise Wrong(text.format(call=call, dim=dim, got=got, want=want))
    return shard.detach().clone()


def _require_repeatable(first_shard: Callable, name: str, whole: Tensor) -> None:
    torch.rand(3)
    if not torch.equal(_shard(first_shard, name, 0, 1), whole):
        shape, dim = WEIGHTS[name]
        raise Wrong(NOT_ITS_OWN.format(call=f'first_shard("{name}", {shape}, {dim}, 7, 0, 1)'))


def _require_spread(name: str, whole: Tensor) -> None:
    outputs, inputs = whole.shape
    got, want = whole.std().item(), 1 / sqrt(inputs)
    if abs(got / want - 1) > SPREAD:
        is_fan_out = abs(got * sqrt(outputs) - 1) <= SPREAD
        raise Wrong((FAN_OUT if is_fan_out else OTHER_SPREAD).format(name=name, got=got, want=want))


def _require_slices(name: str, shards: list[Tensor], whole: Tensor) -> None:
    t, dim = len(shards), WEIGHTS[name][1]
    for a, b in combinations(range(t), 2):
        if torch.equal(shards[a], shards[b]):
            raise Wrong(SAME_SHARD.format(pair=f"{a} and {b}", t=t, name=name))
    merged = torch.cat(shards, dim)
    if torch.equal(merged, whole):
        return
    where = {"t": t, "name": name}
    if torch.allclose(merged, whole * sqrt(t), rtol=1e-5):
        raise Wrong(FAN_IN.format(inputs=whole.shape[1] // t, all_inputs=whole.shape[1], **where))
    in_order = torch.equal(merged.flatten().sort().values, whole.flatten().sort().values)
    raise Wrong((OTHER_RANKS if in_order else OTHER_MODEL).format(**where))


# ---- 9.2 ------------------------------------------------------------------------------------------------------------

RUBBISH = 50.0  # what stands in the gradient of padding

COUNTED = {  # what may be counted too often
    "replicated": "gamma is on every rank, and its squares were added {t} times: one rank counts them.",
    "replicas": "each row of kv is on {copies} ranks, and its squares were added {copies} times: the first counts it.",
    "padding": "the padding of table was counted: it is no part of the model, whatever stands in its gradient.",
}
OWN_ONLY = "This is rank {rank}'s own. The squares are summed over the ranks before the root is taken."
ROOTS_ADDED = "The ranks' norms were added. Squares add up, roots do not: first the sum over the ranks, then the root."
NORMS_ADDED = "The parameters' norms were added. Squares add up, roots do not: one root, at the very end."
NO_ROOT = "This is the sum of squares: the root is missing."
MEAN = "The squares were averaged over the ranks. They are of different entries: add them."
RANK_0_ALONE = "Rank 0's squares of everything: what is cut has other entries on the other ranks."
NO_REPLICATED = "gamma is missing: some rank has to count what is on every rank."
OTHER_BITS = (
    "the norm is right, and differs between ranks in its last bits. Each rank would scale what all have alike by "
    "another factor. Return what the all-reduce gives, and do the same to it on every rank."
)
ONE_CALL = "One all-reduce of one number will do: add up the squares of all parameters first."
NOT_ONE_NUMBER = "grad_norm returned {what}; it should return one number."


@exercise("9.2")
def norm_from_placements(grad_norm: Callable) -> str:
    """`grad_norm(grads, placements)` on each rank: this rank's gradients and their placements by name, to a number."""
    for t in (1, 4, 2):  # at 4 there are replicas and padding
        results = on_ranks(_norm_on_a_rank, t, grad_norm)
        require_returned(grad_norm, [result["norm"] for result in results])
        want, symptoms = _norm_reference(t)
        compare(results, {"norm": want}, t=t, symptoms=symptoms)
        if len({result["norm"] for result in results}) > 1:
            raise Wrong(OTHER_BITS)
        if t > 1:
            require_calls(results, "grad_norm", 1, ONE_CALL)
    return "the dense norm, the same bits on every rank, at t = 1, 2, 4; one number sent."


def _norm_on_a_rank(grad_norm: Callable) -> dict:
    t, rank = group_size(), group_rank()
    with watch() as calls:
        norm = grad_norm(_gradients(rank, t), _norm_placements(t))
    if blanks(norm):
        return {"norm": None, "grad_norm": calls}
    if isinstance(norm, Tensor) and norm.numel() == 1:
        norm = norm.item()
    if isinstance(norm, bool) or not isinstance(norm, int | float):
        what = f"a tensor of shape {list(norm.shape)}" if isinstance(norm, Tensor) else f"{norm!r:.40}"
        raise Wrong(NOT_ONE_NUMBER.format(what=what))
    return {"norm": float(norm), "grad_norm": calls}


def _norm_placements(t: int) -> dict[str, Placement]:
    return {
        "gamma": Placement(),
        "up": Placement(0, (8,)),
        "down": Placement(1, (8,)),
        "kv": Placement(0, (2,), replicas=max(1, t // 2)),
        "table": Placement(0, (10,), pad=True),
    }


def _wholes() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = {"gamma": (6,), "up": (8, 6), "down": (6, 8), "kv": (2, 6), "table": (10, 6)}
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}


def _gradients(rank: int, t: int, filling: float = RUBBISH) -> dict[str, Tensor]:
    """This rank's, with `filling` where the table is padding."""
    found = {name: _norm_placements(t)[name].shard(whole, rank, t) for name, whole in _wholes().items()}
    found["table"][_norm_placements(t)["table"].rows(rank, t) < 0] = filling
    return found


def _squares(grads: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: grad.square().sum().item() for name, grad in grads.items()}


def _norm_reference(t: int) -> tuple[float, list]:
    once = _squares(_wholes())
    with_padding, without = ([_squares(_gradients(r, t, fill)) for r in range(t)] for fill in (RUBBISH, 0.0))
    total, copies = sum(once.values()), max(1, t // 2)
    padding = sum(of_rank["table"] for of_rank in with_padding) - once["table"]
    extra = {"replicated": (t - 1) * once["gamma"], "replicas": (copies - 1) * once["kv"], "padding": padding}
    extra = {name: more for name, more in extra.items() if more > 1e-9}
    text = {name: COUNTED[name].format(t=t, copies=copies) for name in extra}

    def one(value: float, sentence: str):
        return looks_like({"norm": value}, sentence)

    everywhere = [
        one(total, NO_ROOT),
        one(sum(sqrt(squares) for squares in once.values()), NORMS_ADDED),
        one(sqrt(total - once["gamma"]), NO_REPLICATED),
    ]
    if t == 1:
        return sqrt(total), everywhere
    counted = [  # what each rank should add
        sum(of_rank.values()) - of_rank["gamma"] * (r > 0) - of_rank["kv"] * (r % copies > 0)
        for r, of_rank in enumerate(without)
    ]
    own, own_true = ([sum(of_rank.values()) for of_rank in by_rank] for by_rank in (with_padding, without))
    too_often = [
        one(sqrt(total + sum(extra[name] for name in names)), "\n".join(text[name] for name in names))
        for size in range(1, len(extra) + 1)
        for names in combinations(extra, size)
    ]
    of_a_rank = [list(map(sqrt, squares)) for squares in (counted, own, own_true)]

    def not_summed(difference) -> str | None:
        for norms in of_a_rank:
            if difference.equals(norms[difference.rank]):
                alike = all(torch.equal(difference.got, other) for other in difference.all_got)
                return RANK_0_ALONE if alike else OWN_ONLY.format(rank=difference.rank)
        return None

    return sqrt(total), [
        *everywhere,
        *too_often,
        *(one(sum(norms), ROOTS_ADDED) for norms in of_a_rank),
        *(one(sqrt(sum(squares) / t), MEAN) for squares in (counted, own, own_true)),
        not_summed,
    ]


# ---- 9.3 ------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a": "no copy (f) in the column splits",
    "b": "the gradients of KV replicas are not summed",
    "c": "one dropout stream for everything",
    "d": "the norm counts replicated parameters t times",
}
TRUTH = {"A": "c", "B": "a", "C": "d", "D": "b"}  # which run has which fault
STEPS, LAST = 16, 4

FIRST_LOSS_RIGHT = "Other masks change the forward pass, and so the first loss. In run {run} the first loss is right."
FIRST_LOSS_WRONG = "This fault leaves the forward pass as it is. In run {run} the first loss is already another."
NOT_THAT = {  # (typed, true): what speaks against it
    ("a", "b"): "Without copy (f) most gradients behind the head are wrong. In run {run} it is very few.",
    ("a", "c"): FIRST_LOSS_WRONG,
    ("a", "d"): "Without copy (f) gradients are wrong. In run {run} they are all right.",
    ("b", "a"): "Only K and V have replicas. In run {run} far more gradients are wrong.",
    ("b", "c"): FIRST_LOSS_WRONG,
    ("b", "d"): "Unsummed, the gradients of K and V are parts. In run {run} all gradients are right.",
    ("c", "a"): FIRST_LOSS_RIGHT,
    ("c", "b"): FIRST_LOSS_RIGHT,
    ("c", "d"): FIRST_LOSS_RIGHT,
    ("d", "a"): "A norm comes after the gradients, and cannot make them wrong. In run {run} many of them are.",
    ("d", "b"): "A norm comes after the gradients, and cannot make them wrong. In run {run} a few of them are.",
    ("d", "c"): FIRST_LOSS_WRONG,
}
DOWN = "Look at the first and the last number of each wrong run: which of the four is higher at the end?"


@exercise("9.3")
def curves_and_faults(fault_of: Mapping, going_down) -> str:
    """`fault_of`: by run, "a" to "d"; `going_down`: how many of the four wrong runs have a falling loss."""
    for run, true in TRUTH.items():
        typed = fault_of.get(run)
        if typed not in FAULTS:
            raise Wrong(f'fault_of["{run}"] is {typed!r}; it should be one of {", ".join(map(repr, FAULTS))}.')
        if typed != true:
            against = NOT_THAT[typed, true].format(run=run)
            raise Wrong(f"run {run} has another fault than {typed}, {FAULTS[typed]}.\n{against}")
    if going_down != len(TRUTH):
        raise Wrong(f"the faults are right; going_down is not {going_down!r}.\n{DOWN}")
    return "four faults, and four losses that go down. None of them is the dense model's."


def wrong_runs() -> dict[str, dict]:
    """The right run at t = 2 and the four wrong ones, in the notebook's names: the loss of each step; and of step 0
    against one device, whether the loss and the norm are right, and how many gradients are not; at the end, whether
    the ranks still agree on what all of them have."""
    (alone,) = on_ranks(_run, 1, None)
    found = {}
    for run, fault in {"right": None, **TRUTH}.items():
        by_rank = on_ranks(_run, 2, fault)
        first = by_rank[0]
        wrong = {
            name
            for result in by_rank
            for name, grad in result["grads"].items()
            if (grad - alone["grads"][name]).abs().max() > 1e-9
        }
        found[run] = {
            "losses": first["losses"],
            "first loss": abs(first["losses"][0] - alone["losses"][0]) < 1e-9,
            "norm": abs(first["norm"] - alone["norm"]) < 1e-9,
            "wrong gradients": len(wrong),
            "alike": all(torch.equal(result[name], first[name]) for result in by_rank for name in ("norms", "kv")),
            "gradients": len(alone["grads"]),
        }
    return found


def show_runs(found: Mapping[str, Mapping]) -> None:
    """Print them as two tables."""
    shown = (0, 1, 4, 8, 12, STEPS - 1)
    print("loss at step " + "".join(f"{step:6}" for step in shown) + f"   mean of the last {LAST}")
    for run, of_run in found.items():
        values = "".join(f"{of_run['losses'][step]:6.2f}" for step in shown)
        print(f"{run:13}{values}{sum(of_run['losses'][-LAST:]) / LAST:9.2f}")
    print("\nof step 0    loss   wrong gradients  norm    ranks alike at the end")
    for run, of_run in found.items():
        loss, norm = ("right" if of_run[name] else "OTHER" for name in ("first loss", "norm"))
        wrong = f"{of_run['wrong gradients']:2} of {of_run['gradients']}"
        print(f"{run:13}{loss}  {wrong:15}  {norm}   {'yes' if of_run['alike'] else 'NO'}")


def _without_copy(layer, x):
    return linear(x, layer.weight, layer.bias)


def _unsummed(weight, *_, **__):
    return weight


def _clip_all_squares(model, limit):
    grads = [parameter.grad for parameter in model.parameters()]
    norm = all_reduce(sum(grad.square().sum() for grad in grads)).sqrt()
    for grad in grads:
        grad.mul_((limit / norm).clamp(max=1))
    return norm.item()


_INSTEAD = {
    "a": ("layers.linear.ColumnParallelLinear.forward", _without_copy),
    "b": ("layers.attention.copy_to_replicas", _unsummed),
    "c": ("layers.dropout.Dropout.keep", dense.Dropout.keep),
    "d": ("training.clip_grad_norm", _clip_all_squares),
}


class _SGD:
    def __init__(self, parameters, lr: float):
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.sub_(self.lr * parameter.grad)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _run(fault: str | None) -> dict:
    """A small Llama learns the letters of a text, with dropout and clipping; all ranks have its one KV head."""
    letters, batches = _letters()
    sizes = {"hidden": 24, "ffn": 48, "heads": 4, "kv_heads": 1, "layers": 1, "max_seq": 16, "dropout": 0.2}
    config = ModelConfig(family="llama", vocab=letters, tied=False, **sizes)
    with patch(f"tpcode.{_INSTEAD[fault][0]}", _INSTEAD[fault][1]) if fault else nullcontext():
        model = ParallelTransformer(config, dtype=torch.float64, std=None, seed=5)
        model.loss(*batches[0]).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        norm = training.clip_grad_norm(model, float("inf"))
        found = {"norm": norm, "grads": _whole(model, grads)}
        optimizer = _SGD(model.parameters(), 0.5)
        optimizer.zero_grad()
        found["losses"] = training.train(model, batches, max_norm=0.5, optimizer=optimizer, progress=False)
    norms = torch.cat([model.blocks[0].norm_1.weight, model.norm.weight])
    queries = sizes["hidden"] // group_size()  # rows of this rank's queries; the key's and the value's follow
    kv = model.blocks[0].attention.qkv.weight[queries:]
    return found | {"norms": norms.detach(), "kv": kv.detach()}


def _whole(model: ParallelTransformer, grads: list[Tensor]) -> dict[str, Tensor]:
    """Gradients by the dense parameters' names, gathered."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.data = grad
    whole = {name: parameter.detach() for name, parameter in model.to_dense().named_parameters()}
    for parameter, kept in zip(model.parameters(), own, strict=True):
        parameter.data = kept
    return whole


def _letters() -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """The number of different letters in the Zen of Python, and batches of its letters."""
    with redirect_stdout(StringIO()):
        text = codecs.decode(import_module("this").s, "rot13")
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    generator = torch.Generator().manual_seed(4)
    starts = torch.randint(len(numbers) - 16, (STEPS, 4), generator=generator)
    windows = numbers.unfold(0, 17, 1)[starts]  # [steps, b, s + 1]
    return len(letters), [(window[:, :-1], window[:, 1:]) for window in windows]


# ---- 9.4 ------------------------------------------------------------------------------------------------------------

HEIGHTS = ((10, 2, 4), (10, 4, 2), (10, 1, 4), (10, 4, 1), (10, 4, 3), (10, 3, 4), (5, 2, 4), (5, 4, 2))  # V, from, to

NOT_A_LIST = "{call} should return a list of {t} tensors; it returned {what}."
KEPT = (
    "{call}: the ranks get {got} rows. That is the shards' {all} rows cut in {t}, their padding included: padding "
    "belongs to the old t. Take it off first: the model has {V} rows."
)
UNEQUAL = "{call}: the ranks get {got} rows. All ranks need the same number, {want}: pad the table first, then cut."
LOST = "{call}: the ranks get {got} rows, {total} in all, and the table has {V}: rows at its end are lost. Round up."
OTHER_ROWS = "{call}: the ranks get {got} rows; it should be {want} each."
RUBBISH_KEPT = (
    "{call}: rank {rank} has something else than zeros where the table is padding. What stood in the old padding went "
    "along: cut it off, and put new zeros on."
)
PAD_EACH = (
    "{call}: zeros were put at the end of each rank's rows. Rank r's rows begin with id r·W, so only the table as a "
    "whole is padded, at its end."
)
CHANGED = "{call} changed the shards that it was given: they are another's."


@exercise("9.4")
def reshard_a_padded_table(reshard: Callable) -> str:
    """`reshard(shards, V, t_to)`: the rows of each of len(shards) ranks, to a list with those of each of t_to ranks."""
    for V, t_from, t_to in HEIGHTS:
        _check_reshard(reshard, V, t_from, t_to)
    return "V = 10 and V = 5, from and to 1, 2, 3 and 4 ranks, to the last bit, without the old padding."


def _check_reshard(reshard: Callable, V: int, t_from: int, t_to: int) -> None:
    table = torch.arange(1.0, 3 * V + 1, dtype=torch.float64).view(V, 3)
    given = _cut(table, t_from, filling=-7.0)
    shards = [shard.clone() for shard in given]
    where = {"call": f"reshard of V = {V} from {t_from} to {t_to} ranks", "t": t_to, "V": V}
    got = called("reshard", reshard, (shards, V, t_to))
    if any(not torch.equal(shard, kept) for shard, kept in zip(shards, given, strict=True)):
        raise Wrong(CHANGED.format(**where))
    if not isinstance(got, list | tuple) or len(got) != t_to or not all(isinstance(shard, Tensor) for shard in got):
        what = f"{len(got)} things" if isinstance(got, list | tuple) else f"a {type(got).__name__}"
        raise Wrong(NOT_A_LIST.format(what=what, **where))
    want = _cut(table, t_to, filling=0.0)
    _require_rows(got, len(want[0]), sum(map(len, given)), where)
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        true = max(0, min(len(right), V - rank * len(right)))
        if mine.shape == right.shape and torch.equal(mine[:true], right[:true]) and mine[true:].any():
            raise Wrong(RUBBISH_KEPT.format(rank=rank, **where))
    each = [pad(part, (0, 0, 0, len(want[0]) - len(part))) for part in table.tensor_split(t_to)]
    symptoms = [looks_like({"rows": each}, PAD_EACH.format(**where), per_rank=True)]
    compare([{"rows": mine} for mine in got], [{"rows": right} for right in want], t=t_to, symptoms=symptoms)


def _cut(table: Tensor, t: int, filling: float) -> list[Tensor]:
    """The shards of a table, whose padding is filled with this."""
    rows = padded_vocab(len(table), t, multiple=1)
    padded = torch.cat([table, table.new_full((rows - len(table), table.shape[1]), filling)])
    return list(padded.split(divide(rows, t, "rows")))


def _require_rows(got: list[Tensor], want: int, all_rows: int, where: dict) -> None:
    rows = [len(shard) if shard.dim() else 0 for shard in got]
    if rows == [want] * len(rows):
        return
    where = {**where, "got": rows, "want": want, "total": sum(rows), "all": all_rows}
    if sum(rows) == all_rows != where["V"]:
        raise Wrong(KEPT.format(**where))
    if sum(rows) < where["V"]:
        raise Wrong(LOST.format(**where))
    raise Wrong((UNEQUAL if len(set(rows)) > 1 else OTHER_ROWS).format(**where))
