"""Chapter 3, the column split."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from tpcode.comm import all_gather, all_reduce, group_rank, group_size
from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.compare import compare, compare_one, looks_like, part_only
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_calls, require_returned
from tpcode.grading.registry import exercise
from tpcode.runtime.notes import watch

# ---- 3.1 ------------------------------------------------------------------------------------------------------------

X = ((1, 2),)
A = ((1, 1, 3, 0), (0, 1, 1, 1))
DY = ((3, 2, 1, 3),)

WHOLE_DX = "This is dX, the sum. A rank knows its own columns only; what they say about X is asked for here."
SUMMED_DA = "This is dA_0 + dA_1. They are gradients of different columns: each is complete as it is."
ROWS_AS_COLUMNS = "A_r is transposed here: its columns have to meet X, and A_r itself is [2, 2] either way."
NO_TRANSPOSE = "This is dY_r A_r. dX_r is dY_r A_rᵀ: over the columns."


@exercise("3.1")
def column_split_by_hand(Y_0, Y_1, dA_0, dA_1, dX_0, dX_1, dX) -> str:
    """Vectors of two numbers; dA_r as lists of rows."""
    typed = {"Y_0": Y_0, "Y_1": Y_1, "dA_0": dA_0, "dA_1": dA_1, "dX_0": dX_0, "dX_1": dX_1, "dX": dX}
    right, symptoms = _by_hand()
    for name, want in right.items():
        got = typed[name]
        if not name.startswith("dA"):
            got = _row(got)  # [[5, 2]] is [5, 2]
        if name == "dX":
            _refuse_side_by_side(got, right)
        compare_one(name, got, want, symptoms=symptoms, reveal=False)
    return "both halves of Y, both dA_r as they stand, and [5, 2] + [3, 4] = [8, 6]."


def _by_hand() -> tuple[dict[str, Tensor], list]:
    x, a, dy = (torch.tensor(matrix, dtype=torch.float64) for matrix in (X, A, DY))
    halves = list(zip(a.chunk(2, 1), dy.chunk(2, 1), strict=True))
    y = [x @ a_r for a_r, _ in halves]  # [1, 2] [2, 2] -> [1, 2]
    da = [x.T @ dy_r for _, dy_r in halves]  # [2, 1] [1, 2] -> [2, 2]
    dx = [dy_r @ a_r.T for a_r, dy_r in halves]  # [1, 2] [2, 2] -> [1, 2]
    transposed = [dy_r @ a_r for a_r, dy_r in halves]

    def named(name, values):
        return {f"{name}_{rank}": value for rank, value in enumerate(values)}

    def flat(name, values):
        return named(name, [value.flatten() for value in values])

    right = flat("Y", y) | named("dA", da) | flat("dX", dx) | {"dX": sum(dx).flatten()}
    alternate = [x @ a[:, rank::2] for rank in range(2)]
    symptoms = [
        looks_like(flat("Y", [x @ a_r.T for a_r, _ in halves]), ROWS_AS_COLUMNS),
        looks_like(
            flat("Y", [sum(y)] * 2), "These are the two halves added. They are other columns: nothing is added."
        ),
        looks_like(flat("Y", alternate), "These are every other column. Rank 0 has the left half, rank 1 the right."),
        looks_like(named("dA", [sum(da)] * 2), SUMMED_DA),
        looks_like(flat("dX", [sum(dx)] * 2), WHOLE_DX),
        looks_like(flat("dX", transposed) | {"dX": sum(transposed).flatten()}, NO_TRANSPOSE),
        looks_like({"dX": dx[0].flatten()}, "This is rank 0's part. The parts of both ranks are added."),
        looks_like({"dX": dx[1].flatten()}, "This is rank 1's part. The parts of both ranks are added."),
        looks_like({"dX": sum(dx).flatten() / 2}, "This is the mean of the parts. They are added."),
    ]
    return right, symptoms


def _row(got):
    """A vector, also if it was typed as a matrix of one row."""
    return got[0] if isinstance(got, (list, tuple)) and len(got) == 1 else got


def _refuse_side_by_side(got, right: Mapping[str, Tensor]) -> None:
    beside = [*right["dX_0"].tolist(), *right["dX_1"].tolist()]
    if isinstance(got, (list, tuple)) and list(got) == beside:
        raise Wrong(
            f"dX is {list(got)}.\nThese are the parts side by side. X has two features, and so has dX: add them."
        )


# ---- 3.2 ------------------------------------------------------------------------------------------------------------

WRONG_DIMENSION = "These are columns of the weight, which are rows of A. A's columns are the weight's rows (W = Aᵀ)."


@exercise("3.2")
def a_square_weight_is_cut_by_rows(my_part: Callable) -> str:
    """`my_part(weight, r, t)`: rank r's rows of a square weight."""
    weight = torch.arange(64, dtype=torch.float64).reshape(8, 8)
    for t in (2, 4):
        share = 8 // t
        for r in range(t):
            part = my_part(weight.clone(), r, t)
            require_returned(my_part, [part])
            rows, columns = weight[r * share : (r + 1) * share], weight[:, r * share : (r + 1) * share]
            symptoms = [
                looks_like({"my_part": columns.T}, f"{WRONG_DIMENSION} (And they are transposed.)"),
                looks_like(
                    {"my_part": weight[r::t]}, "These are every t-th row. A rank has neighbouring columns of A."
                ),
                looks_like({"my_part": weight[:share]}, "This is rank 0's part, whichever rank asks."),
            ]
            if getattr(part, "shape", None) == columns.shape and torch.equal(part, columns):
                raise Wrong(f"my_part of rank {r} at t = {t} has shape {list(part.shape)}.\n{WRONG_DIMENSION}")
            compare_one("my_part", part, rows, symptoms=symptoms, where=f"of rank {r} at t = {t}")
    return "rows of the weight, at t = 2 and 4."


# ---- 3.3 ------------------------------------------------------------------------------------------------------------

HIDDEN, WIDTH, TOKENS = 6, 8, (2, 3)
NOT_ADDED = "These are the ranks' Y_r added up. They are other columns of Y: side by side, never added."
ONE_PART = "It is what this rank's columns say, and no more: copy's backward has to add the parts of all ranks."
COPY_BEHIND = "dY_r was summed over the ranks: Copy stands behind the product. It belongs in front of it, on x."
REDUCED_WEIGHT = (
    "It is the sum of the ranks' gradients. They are of different columns: each is complete where it stands."
)


@exercise("3.3")
def column_parallel_layer(Copy: type, column_parallel: Callable) -> str:
    """`Copy`, an autograd.Function, and `column_parallel(x, weight_r, bias_r)` that uses it."""
    _require_bodies(Copy)
    x, weight, bias, dy = _random((*TOKENS, HIDDEN), (WIDTH, HIDDEN), (WIDTH,), (*TOKENS, WIDTH))
    for t in SIZES:
        results = on_ranks(_on_a_rank, t, column_parallel, x, weight, bias, dy)
        require_returned(column_parallel, results)
        want, symptoms = _column_reference(t, x, weight, bias, dy)
        compare(results, want, t=t, symptoms=symptoms)
        if t > 1:
            require_calls(results, "forward", 0, "Every rank has X and its own columns: there is nothing to ask for.")
            require_calls(results, "backward", 1, "One all-reduce, of dX, is all that is needed.")
    return "Y, dX, dW and dbias on every rank at t = 1, 2, 4; 0 collectives forward, 1 backward."


def _require_bodies(Copy: type) -> None:
    if not (isinstance(Copy, type) and issubclass(Copy, torch.autograd.Function)):
        raise Wrong(f"Copy should be a class made from torch.autograd.Function, and it is {Copy!r:.60}.")
    for name in ("forward", "backward"):
        if stub := stub_in(getattr(Copy, name)):
            raise Unfilled(f"replace {stub} in Copy.{name}.")


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _on_a_rank(layer: Callable, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict | None:
    """One pass of the layer with this rank's shard; None if the layer returned nothing."""
    r, t = group_rank(), group_size()
    x, weight, bias = (
        part.clone().requires_grad_() for part in (x, weight.chunk(t)[r], bias.chunk(t)[r])
    )  # [b, s, h], [F/t, h], [F/t]
    with watch() as forward:
        y = layer(x, weight, bias)
    if blanks(y):
        return None
    if y.shape != (*x.shape[:-1], weight.shape[0]):
        return {"Y": y.detach()}  # the comparison says that the shape is wrong
    if not y.requires_grad:
        raise Wrong("no gradient flows back from Y: detach() cuts it off, and so does a collective outside of Copy.")
    with watch() as backward:
        y.backward(dy.chunk(t, -1)[r])
    found = {"Y": y.detach(), "dX": x.grad, "dW": weight.grad, "dbias": bias.grad}
    return found | {"forward": forward, "backward": backward}


def _column_reference(t: int, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[list[dict], list]:
    """What each rank should hold, and what it may hold instead."""
    y, tokens, dtokens = linear(x, weight, bias), x.flatten(0, 1), dy.flatten(0, 1)
    dw, dx_of = dtokens.T @ tokens, [dy_r @ w_r for dy_r, w_r in zip(dy.chunk(t, -1), weight.chunk(t), strict=True)]
    pieces = zip(y.chunk(t, -1), dw.chunk(t), dtokens.sum(0).chunk(t), strict=True)
    want = [{"Y": y_r, "dX": sum(dx_of), "dW": dw_r, "dbias": db_r} for y_r, dw_r, db_r in pieces]
    if t == 1:
        return want, []
    summed = {name: sum(mine[name] for mine in want) for name in ("Y", "dW", "dbias")}
    behind = [sum(dy.chunk(t, -1)) @ w_r for w_r in weight.chunk(t)]
    from_t_x = [linear(t * x, w_r, b_r) for w_r, b_r in zip(weight.chunk(t), bias.chunk(t), strict=True)]
    return want, [
        looks_like({"Y": summed["Y"]}, NOT_ADDED),
        looks_like({"Y": from_t_x}, "x was summed over the ranks, but it is the same on all of them.", per_rank=True),
        looks_like({"dX": dx_of}, ONE_PART, per_rank=True),
        looks_like({"dX": behind}, COPY_BEHIND, per_rank=True),
        looks_like({"dW": summed["dW"], "dbias": summed["dbias"]}, REDUCED_WEIGHT),
    ]


# ---- 3.4 ------------------------------------------------------------------------------------------------------------

FAULTS = ("no copy", "copy twice", "weight gradients summed", "forward summed", "mean", "no fault")
LAYERS = {"A": "no copy", "B": "forward summed", "C": "weight gradients summed", "D": "copy twice"}
TABLE_X, TABLE_A, TABLE_BIAS, TABLE_DY = ((3, 1),), ((1, 0, 2, 1), (2, 1, 1, 3)), (1, 0, 1, 0), ((1, 2, 4, 1),)


def show_table(name: str) -> None:
    """Run faulty layer `name`, "A" to "D", on 2 ranks; print each property on each rank, and what it should be."""
    found, right = (on_ranks(_layer_with, 2, fault) for fault in (LAYERS[name], "no fault"))
    print(f"layer {name}")
    for rank, (mine, wanted) in enumerate(zip(found, right, strict=True)):
        for key, value in mine.items():
            verdict = "right" if value == wanted[key] else f"should be {wanted[key]}"
            print(f"    rank {rank}  {key:7} {value!s:17} {verdict}")


def _layer_with(fault: str) -> dict[str, list]:
    """A column-parallel layer with a fault, written without autograd: whole numbers, as lists."""
    r, t = group_rank(), group_size()
    x, a, bias, dy = (torch.tensor(values) for values in (TABLE_X, TABLE_A, TABLE_BIAS, TABLE_DY))
    a_r, bias_r, dy_r = a.chunk(t, 1)[r], bias.chunk(t)[r], dy.chunk(t, 1)[r]
    y, dx, dw, dbias = x @ a_r + bias_r, dy_r @ a_r.T, dy_r.T @ x, dy_r.sum(0)
    if fault != "no copy":
        dx = all_reduce(dx)
    match fault:
        case "copy twice":
            dx = all_reduce(dx)
        case "weight gradients summed":
            dw, dbias = all_reduce(dw), all_reduce(dbias)
        case "forward summed":
            y = all_reduce(y)
        case "mean":
            dx = dx / t
    found = {"Y_r": y[0], "dX": dx[0], "dW_r": dw, "dbias_r": dbias}
    return {key: value.tolist() for key, value in found.items()}


@exercise("3.4")
def four_faulty_layers(faults: Mapping[str, str], mend_A: Callable) -> str:
    """`faults`: a name of `FAULTS` for each layer; `mend_A(dx_r)`, on a rank, returns what dX should be."""
    if not isinstance(faults, Mapping) or set(faults) != set(LAYERS):
        raise Wrong(f"faults should be a dict with the keys {', '.join(LAYERS)}; it is {faults!r:.80}.")
    for name, fault in LAYERS.items():
        if faults[name] not in FAULTS:
            raise Wrong(f"layer {name}: {faults[name]!r} is none of the names: {', '.join(FAULTS)}.")
        if faults[name] != fault:
            raise Wrong(_where_they_differ(name, faults[name]))
    parts = [mine["dX"] for mine in on_ranks(_layer_with, 2, "no copy")]
    mended = on_ranks(_mend, 2, mend_A, parts)
    require_returned(mend_A, mended)
    dx = [sum(entries) for entries in zip(*parts, strict=True)]
    compare([{"dX": mine} for mine in mended], {"dX": dx}, symptoms=[part_only({"dX": parts})])
    return "all four faults, and A is mended. Its output was right all the time."


def _mend(mend_A: Callable, parts: list[list[int]]):
    return mend_A(torch.tensor(parts[group_rank()]))


def _where_they_differ(name: str, fault: str) -> str:
    """What the named fault would show, where the table shows something else."""
    table, would = (on_ranks(_layer_with, 2, which) for which in (LAYERS[name], fault))
    for rank, (found, other) in enumerate(zip(table, would, strict=True)):
        for key, value in found.items():
            if value != other[key]:
                shows = f"the table shows {key} = {value} on rank {rank}"
                if fault == "no fault":
                    return f"layer {name}: {shows}, and it should be {other[key]}. A layer is more than its output."
                return f'layer {name}: {shows}, and with "{fault}" it would be {other[key]}.'
    raise ValueError(f"{fault!r} and {LAYERS[name]!r} show the same table")


# ---- 3.5 ------------------------------------------------------------------------------------------------------------

SAME_LOSS_SUMMED = (
    "(a) is {t} times the gradient: the ranks' losses are one and the same loss, and it was counted {t} times."
)
OTHERS_UNHEARD = "(b) is only what this rank's part of the loss says: the other parts depend on these columns too."


@exercise("3.5")
def who_reads_the_gathered_output(backward_same_loss: Callable, backward_parts_of_the_loss: Callable) -> str:
    """Two functions from dy [b, s, F] on a rank to the gradient of its own [b, s, F/t]."""
    y, *weights = _random((*TOKENS, WIDTH), *[(*TOKENS, WIDTH)] * max(SIZES))
    needless = 0
    for t in SIZES:
        calls = _check_gather(backward_same_loss, y, [weights[0]] * t, same=True)
        needless += calls if t > 1 else 0
        _check_gather(backward_parts_of_the_loss, y, weights[:t], same=False)
    note = " (a) would do without a collective." if needless else ""
    return f"the gradient of one loss in both cases, at t = 1, 2, 4.{note}"


def _check_gather(backward: Callable, y: Tensor, weights: list[Tensor], same: bool) -> int:
    """Raise Wrong unless `backward` gives each rank its gradient; returns how many collectives it called."""
    t = len(weights)
    results = on_ranks(_gradient_of_the_gathered, t, backward, y, weights)
    require_returned(backward, [gradient for gradient, _ in results])
    want, symptoms = _gather_reference(same, y, weights)
    compare([{"dy_r": gradient} for gradient, _ in results], want, t=t, symptoms=symptoms)
    return sum(len(calls) for _, calls in results)


def _gradient_of_the_gathered(backward: Callable, y: Tensor, weights: list[Tensor]) -> tuple:
    """What `backward` makes of this rank's dy, its loss being Σ weights[r] y² / 2; and what it called."""
    r, t = group_rank(), group_size()
    whole = all_gather(y.chunk(t, -1)[r].contiguous(), dim=-1).requires_grad_()  # [b, s, F/t] -> [b, s, F]
    (weights[r] * whole**2 / 2).sum().backward()
    with watch() as calls:
        gradient = backward(whole.grad)
    return gradient, calls


def _gather_reference(same: bool, y: Tensor, weights: list[Tensor]) -> tuple[list[dict], list]:
    t = len(weights)
    dy = (weights[0] if same else sum(weights)) * y
    want = [{"dy_r": piece} for piece in dy.chunk(t, -1)]
    if t == 1:
        return want, []
    own = [(w * y).chunk(t, -1)[r] for r, w in enumerate(weights)]
    if same:
        wrong = looks_like({"dy_r": [t * piece for piece in own]}, SAME_LOSS_SUMMED.format(t=t), per_rank=True)
    else:
        wrong = looks_like({"dy_r": own}, OTHERS_UNHEARD, per_rank=True)
    return want, [wrong]
