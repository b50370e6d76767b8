"""Chapter 5, the FFN, column then row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from tpcode.comm import all_reduce, group_rank, group_size, record
from tpcode.comm.ledger import Event, Ledger
from tpcode.dense import FFN, SwiGLU, gelu_tanh
from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.compare import Difference, compare, looks_like
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_output, require_returned
from tpcode.grading.registry import exercise
from tpcode.layers import ColumnParallelLinear, RowParallelLinear
from tpcode.runtime import RankError


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _filled(module: nn.Module, seed: int) -> nn.Module:
    """The module with the same random parameters in every process."""
    for number, parameter in enumerate(module.parameters()):
        parameter.data = _random(*parameter.shape, seed=seed + number)
    return module


# ---- 5.1 ------------------------------------------------------------------------------------------------------------

WIDTH = 4  # F / h
ORDERS = ("column, row", "column, column", "row, column", "row, row")

ANY_ORDER = "You gave all four orders the same number. What does each order's second layer want, and what is there?"
AS_NARROW = (
    f"Between the layers the tensor is [b, s, F], and F = {WIDTH}h: it counts {WIDTH} times as much as [b, s, h]."
)
ONE_WAY = "An all-reduce counts 2: it sends what a reduce-scatter and an all-gather send."
GATHER_AS_SUM = "Columns are put side by side, not added: that takes an all-gather, which sends half of an all-reduce."
NO_OUTPUT = "The output is not yet whole on every rank, as the input was: the next block wants it there."
NO_COLUMNS = "The second layer, cut by columns, wants all of Z on every rank, and each has its own columns only."
NO_SUM = "After a row cut each rank has a summand of H, and GeLU wants the finished sum."
SLICE_SENDS = "A rank that has all of a tensor takes its own slice of it without sending anything."
BETWEEN = "Something was sent between the layers. What the column cut leaves on a rank is what the row cut wants there."
BOTH_WAYS = "That is forward and backward; forward alone is asked for."
REDUCE_SCATTERED = (
    "6 is right for a reduce-scatter of H. Here the layers are used as they are: H is summed by an all-reduce."
)

# The numbers that known slips lead to. Right are 2, 4 + 1, 8 + 1 and 8 + 2; the check takes them from the ledger.
SLIPS = {
    "column, row": {0: NO_OUTPUT, 1: ONE_WAY, 4: BOTH_WAYS, 6: BETWEEN, 10: BETWEEN},
    "column, column": {1: NO_COLUMNS, 2: AS_NARROW, 4: NO_OUTPUT, **dict.fromkeys((6, 9, 10), GATHER_AS_SUM)},
    "row, column": {1: NO_SUM, 3: AS_NARROW, 5: ONE_WAY, 8: NO_OUTPUT, 10: GATHER_AS_SUM},
    "row, row": {
        2: NO_SUM,
        4: AS_NARROW,
        5: ONE_WAY,
        6: REDUCE_SCATTERED,
        8: NO_OUTPUT,
        **dict.fromkeys((11, 14, 15), SLICE_SENDS),
    },
}


@exercise("5.1")
def units_of_four_orders(units: Mapping) -> str:
    """`units[order]` for each of ORDERS: forward's wire per rank, in units of bsh(t-1)/t elements, at F = 4h."""
    answers = _numbers_by_order(units)
    if len(set(answers.values())) == 1:
        raise Wrong(ANY_ORDER)
    ledgers = {order: units_by_ledger(order, t=2) for order in ORDERS}
    for order, given in answers.items():
        if given != ledgers[order]:
            hint = SLIPS[order].get(given, "")
            raise Wrong(f'"{order}" does not send {given:g} units.\n{hint}'.rstrip())
    return "2, 5, 9 and 10 units, and the ledgers of two ranks say the same."


def _numbers_by_order(units: Mapping) -> dict[str, float]:
    if not isinstance(units, Mapping) or set(units) != set(ORDERS):
        raise Wrong(f"units should be a dict with the keys {', '.join(map(repr, ORDERS))}.")
    answers = {}
    for order in ORDERS:
        try:
            answers[order] = float(units[order])
        except (TypeError, ValueError):
            raise Wrong(f'"{order}" should be a number; it is {units[order]!r:.40}.') from None
    return answers


def units_by_ledger(order: str, t: int) -> Fraction:
    """What one of t ranks sends forward when an FFN of F = 4h runs in this order, in units of bsh(t-1)/t elements."""
    dense, x = FFN(8, WIDTH * 8, dtype=torch.float64), _random(2, 3, 8, seed=1)
    ledger = on_ranks(_forward_in_order, t, order, dense, x)[0]
    return Fraction(ledger.wire_bytes(phase="forward")) / (x.nbytes * Fraction(t - 1, t))


def _forward_in_order(order: str, dense: FFN, x: Tensor) -> Ledger:
    whole = {"column": {"gather_output": True}, "row": {"input_is_parallel": False}}
    classes = {"column": ColumnParallelLinear, "row": RowParallelLinear}
    first, second = order.split(", ")
    options = ({}, {}) if (first, second) == ("column", "row") else (whole[first], whole[second])
    a = classes[first].from_dense(dense.c_fc, **options[0])
    b = classes[second].from_dense(dense.c_proj, **options[1])
    with record() as ledger:
        b(dense.activation(a(x)))
    return ledger


# ---- 5.2 ------------------------------------------------------------------------------------------------------------

BUDGET = 2  # units of bsh(t-1)/t elements, each way
PARAMETERS = ("fc.weight", "fc.bias", "proj.weight", "proj.bias")

GATHERED_BETWEEN = (
    "You gathered Z between the layers, and then each rank took its own columns out of it again. It had them already: "
    "what the column layer leaves is what the row layer wants."
)
SUMMED_BETWEEN = "Something as wide as F was summed between the layers. Column then row needs nothing there."
SUMMED_Z = "You added the ranks' Z_r = GeLU(X A_r). They are different columns of Z, and are never summed."
NO_BIAS = "The second layer's bias is missing."
BIAS_T_TIMES = "The second layer's bias was added before the sum, on every rank: it is in there t times."
NO_COPY = "Every rank used X, so each holds a part of dX. Copy (f) adds the parts; it is missing."
NO_REDUCE = "Y is rank {rank}'s own summand. Reduce (g) adds them; it is missing."
NOT_IN_LEDGER = (
    "All values are right, and the ledger is empty: it sees the collectives of tpcode.comm only. Use copy_to_tp and "
    "reduce_from_tp, so that what you send can be counted."
)
BIAS_SHARED = "Only 1/{t} of the second layer's bias is in Y. It is added once, whole, after the sum."
OTHER_GELU = 'That is the exact GeLU, with erf. The dense FFN has the form with tanh: gelu(h, approximate="tanh").'
WRONG_CUT = {
    "fc.weight": "A is cut by columns, and A's columns are the weight's rows: dimension 0.",
    "proj.weight": "B is cut by rows, and B's rows are the weight's columns: dimension 1.",
}
TOO_MUCH_BACKWARD = "Backward needs one all-reduce, of dX. Weight gradients are whole where they stand."


@exercise("5.2")
def ffn_from_two_layers(MyFFN: type) -> str:
    """`MyFFN(dense)` with the parts `fc` and `proj`, each with this rank's `weight` and `bias`, in torch's layout."""
    for t in SIZES:
        got = _run_ffn(MyFFN, t)
        want, symptoms = _dense_ffn(t)
        compare(got, want, t=t, symptoms=symptoms)
        if t > 1:
            _require_budget(got[0]["ledger"], _X.numel(), t)
    return "Y and every gradient are the dense FFN's at t = 1, 2 and 4, for 2 units each way."


_H, _F = 6, 24
_X, _DY = _random(2, 3, _H, seed=2), _random(2, 3, _H, seed=3)


def _dense() -> FFN:
    return _filled(FFN(_H, _F, dtype=torch.float64), seed=4)


def _run_ffn(MyFFN: type, t: int) -> list[dict]:
    try:
        return on_ranks(_ffn_job, t, MyFFN, _dense(), _X, _DY)
    except RankError:
        own = [method for name, method in vars(MyFFN).items() if name in ("__init__", "forward")]
        stub = next(filter(None, map(stub_in, own)), "")
        if stub:
            raise Unfilled(f"replace {stub} in MyFFN.") from None
        raise


def _ffn_job(MyFFN: type, dense: FFN, x: Tensor, dy: Tensor) -> dict:
    ffn = MyFFN(dense)
    parameters = {name: _part(ffn, name) for name in PARAMETERS}
    _require_cuts(parameters)
    x = x.clone().requires_grad_()
    with record() as ledger:
        y = ffn(x)
        require_output(y, dy)
        y.backward(dy)
    return {"Y": y.detach(), "dX": x.grad, "ledger": ledger} | {
        f"d {name}": parameter.grad for name, parameter in parameters.items()
    }


def _part(ffn: nn.Module, name: str) -> Tensor:
    part = ffn
    for attribute in name.split("."):
        part = getattr(part, attribute, None)
    if not isinstance(part, Tensor):
        raise Wrong(f"MyFFN has no {name}: call its layers fc and proj, each with this rank's weight and bias.")
    return part


def _require_cuts(parameters: dict[str, Tensor]) -> None:
    """Before they meet in a product that does not fit: what torch says of that does not name the cut."""
    t = group_size()
    for name, shape, other in (("fc.weight", [_F // t, _H], 1), ("proj.weight", [_H, _F // t], 0)):
        found = list(parameters[name].shape)
        wrong = list(shape)
        wrong[1 - other], wrong[other] = wrong[1 - other] * t, wrong[other] // t
        if t > 1 and found in (wrong, wrong[::-1]):
            raise Wrong(f"MyFFN's {name} is {found} at t = {t}, not {shape}.\n{WRONG_CUT[name]}")


def _dense_ffn(t: int) -> tuple[list[dict], list]:
    """The right values on each rank, and what known mistakes look like."""
    dense, x = _dense(), _X.clone().requires_grad_()
    dense(x).backward(_DY)
    fc, proj = dense.c_fc, dense.c_proj
    y = dense(x).detach()
    by_rank = zip(fc.weight.grad.chunk(t), fc.bias.grad.chunk(t), proj.weight.grad.chunk(t, 1), strict=True)
    want = [
        {"Y": y, "dX": x.grad, "d fc.weight": w, "d fc.bias": b, "d proj.weight": p, "d proj.bias": proj.bias.grad}
        for w, b, p in by_rank
    ]
    with torch.no_grad():
        other_gelu = looks_like({"Y": proj(torch.nn.functional.gelu(fc(x)))}, OTHER_GELU)
    no_bias = looks_like({"Y": y - proj.bias}, NO_BIAS)
    return want, [no_bias, other_gelu, *(_ffn_symptoms(dense, x, y, t) if t > 1 else [])]


@torch.no_grad()
def _ffn_symptoms(dense: FFN, x: Tensor, y: Tensor, t: int) -> list:
    fc, proj = dense.c_fc, dense.c_proj
    z = dense.activation(fc(x)).chunk(t, -1)  # t pieces [b, s, F/t]
    parts = proj.weight.chunk(t, 1)
    summands = [linear(z_r, w_r) for z_r, w_r in zip(z, parts, strict=True)]
    h = fc(x).requires_grad_()
    with torch.enable_grad():
        dense.activation(h).backward(_DY @ proj.weight)  # dZ, then dH
    dx_parts = [dh @ w for dh, w in zip(h.grad.chunk(t, -1), fc.weight.chunk(t), strict=True)]
    total_z = sum(z)
    products = [linear(total_z, w_r) for w_r in parts]

    def own_summand(difference: Difference) -> str | None:
        own = summands[difference.rank]
        mine = difference.name == "Y" and (difference.equals(own) or difference.equals(own + proj.bias))
        return NO_REDUCE.format(rank=difference.rank) if mine else None

    return [
        own_summand,
        looks_like({"dX": dx_parts}, NO_COPY, per_rank=True),
        looks_like({"Y": y + (t - 1) * proj.bias}, BIAS_T_TIMES),
        looks_like({"Y": y + (1 / t - 1) * proj.bias}, BIAS_SHARED.format(t=t)),
        looks_like({"Y": sum(products) + proj.bias}, SUMMED_Z),
        looks_like({"Y": [part + proj.bias for part in products]}, SUMMED_Z, per_rank=True),
    ]


def _require_budget(ledger: Ledger, elements: int, t: int) -> None:
    """Raise Wrong unless each way stays within BUDGET units; values are right already."""
    if not ledger.events:
        raise Wrong(NOT_IN_LEDGER)
    unit = elements * 8 * Fraction(t - 1, t)
    for phase, cause in (("forward", _why_forward), ("backward", lambda events: TOO_MUCH_BACKWARD)):
        sent = Fraction(ledger.wire_bytes(phase=phase)) / unit
        if sent > BUDGET:
            events = [event for event in ledger.events if event.phase == phase]
            calls = ", ".join(f"{event.op} of {list(event.shape)}" for event in events)
            raise Wrong(
                f"all values are right, and {phase} sends {float(sent):g} units of bsh(t-1)/t elements at t = {t}; "
                f"the budget is {BUDGET}. The ledger has: {calls}.\n{cause(events)}"
            )


def _why_forward(events: list[Event]) -> str:
    wide = [event.op for event in events if event.shape[-1] == _F]
    if "all_gather" in wide:
        return GATHERED_BETWEEN
    return SUMMED_BETWEEN if wide else "Forward needs one all-reduce, of Y."


# ---- 5.3 ------------------------------------------------------------------------------------------------------------

WITH_ZERO = "With a 0 they are equal: GeLU(0) = 0. Take two numbers that are not 0."
STRAIGHT = (
    "Far to the right GeLU(x) is x, and far to the left it is 0: there it is a straight line, and sums pass through. "
    "Take numbers from where it bends."
)
ELEMENTWISE = (
    "Elementwise is not enough. It lets you cut columns apart; a sum passes through only where f(a + b) = f(a) + f(b)."
)
CONSTANT = "f(0) is {at_zero:g}, and a sum over t ranks has it t times."
NOTHING_LEFT = "Always 0 is exact, and lets nothing through. Find one that keeps something of H."
PAIRS = ((3.0, -5.0), (1.0, 1.0), (2.0, 3.0), (-1.0, -2.0), (0.5, 0.25), (100.0, -40.0))


@exercise("5.3")
def gelu_of_a_sum(a: float, b: float, activation: Callable) -> str:
    """Numbers with GeLU(a + b) ≠ GeLU(a) + GeLU(b), and an elementwise activation that may be applied to summands."""
    numbers = [_one_number("a", a), _one_number("b", b)]
    after, before = on_ranks(_gelu_after_and_before, 2, numbers)[0]
    if math.isclose(after, before, rel_tol=1e-9, abs_tol=1e-9):
        hint = WITH_ZERO if 0 in numbers else STRAIGHT
        raise Wrong(f"GeLU({a:g} + {b:g}) and GeLU({a:g}) + GeLU({b:g}) are both {after:.6g}.\n{hint}")
    for t in (2, 4):
        _require_additive(activation, t)
    return (
        f"GeLU({a:g} + {b:g}) = {after:.4g}, GeLU({a:g}) + GeLU({b:g}) = {before:.4g}, and your activation is exact on "
        "summands, at t = 2 and 4. What does the FFN become with it?"
    )


def _one_number(name: str, value) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Wrong(f"{name} should be a number; it is {value!r:.40}.") from None
    if not math.isfinite(number):
        raise Wrong(f"{name} should be a finite number; it is {number}.")
    return number


def _gelu_after_and_before(numbers: list[float]) -> tuple[float, float]:
    """GeLU of the ranks' sum, and the sum of the ranks' GeLUs."""
    mine = torch.tensor(numbers[group_rank()], dtype=torch.float64)
    return gelu_tanh(all_reduce(mine)).item(), all_reduce(gelu_tanh(mine)).item()


def _require_additive(activation: Callable, t: int) -> None:
    """The first half of a row, column FFN: X by columns, A by rows, and the activation before or after the sum."""
    x, weight = 3 * _random(5, 8, seed=20), _random(7, 8, seed=21)
    results = on_ranks(_summed_before_and_after, t, activation, x, weight)
    require_returned(activation, [early for early, _ in results])
    for rank, (early, late) in enumerate(results):
        early, late = (_of_shape(activation, value, [5, 7]) for value in (early, late))
        if not torch.allclose(early, late, rtol=1e-9, atol=1e-9):
            raise Wrong(
                f"at t = {t} the sum of f(H_r) is not f of the sum: on rank {rank} they differ by up to "
                f"{(early - late).abs().max():.3g}.\n{_why_not_additive(activation)}"
            )
    if not late.any():
        raise Wrong(NOTHING_LEFT)


def _summed_before_and_after(activation: Callable, x: Tensor, weight: Tensor) -> tuple:
    r, t = group_rank(), group_size()
    part = linear(x.chunk(t, -1)[r], weight.chunk(t, -1)[r])  # [n, h/t] [h/t, F] -> [n, F], a summand of H
    early = activation(part.clone())
    if not isinstance(early, Tensor):
        return early, early
    return all_reduce(early.detach().clone()), activation(all_reduce(part))


def _of_shape(activation: Callable, value, shape: list[int]) -> Tensor:
    if not isinstance(value, Tensor) or list(value.shape) != shape:
        what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.40}"
        name = getattr(activation, "__name__", "activation")
        raise Wrong(f"{name} should return a tensor of its input's shape {shape}; it returned {what}.")
    return value.detach()


def _why_not_additive(activation: Callable) -> str:
    """Two numbers that show it, with the learner's own function."""

    def f(value: float) -> float:
        return activation(torch.full((1, 1), value, dtype=torch.float64)).item()

    try:
        if not math.isclose(at_zero := f(0.0), 0.0, abs_tol=1e-12):
            return CONSTANT.format(at_zero=at_zero)
        for a, b in PAIRS:
            if not math.isclose(f(a) + f(b), f(a + b), rel_tol=1e-6, abs_tol=1e-6):
                example = f"Yours: f({a:g}) + f({b:g}) = {f(a) + f(b):.4g}, and f({a + b:g}) = {f(a + b):.4g}."
                return f"{example} {ELEMENTWISE}"
    except Exception:  # it takes no single number: say it without an example
        pass
    return ELEMENTWISE


# ---- 5.4 ------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a": "Both ranks hold the same Y, so the parts were added.",
    "b": "",
    "c": "Exchanged, gate and up would give a wrong Y on one rank too, and there it is right.",
    "d": "On one rank the down matrix is whole and Y is right; on two, its columns are cut as F is, in the middle.",
}
PLAIN = (
    "This is the plain cut still: chunk r of all 2F rows. On two ranks, rank 0 has the whole gate and no row of up. "
    "Each rank needs its share of both."
)
UP_FIRST = "Up stands above gate here. silu is applied to the first half, which has to be gate."
ALTERNATING = (
    "Rows of gate and up alternate here. The code takes the first half for gate: all of gate's rows come first."
)
COLUMNS = "This cuts the h columns of torch's weight. The columns of A are its rows."


@exercise("5.4")
def fused_gate_up(fault: str, my_part: Callable) -> str:
    """`fault` is a letter of FAULTS; `my_part(gate_up, r, t)` is rank r's [2F/t, h] of the fused [2F, h]."""
    letter = str(fault).strip().lower()
    if letter not in FAULTS:
        raise Wrong(f"fault should be one of {', '.join(map(repr, FAULTS))}; it is {fault!r:.40}.")
    if FAULTS[letter]:
        raise Wrong(f"the fault is not {letter}. {FAULTS[letter]}")
    for t in SIZES:
        _require_parts(my_part, t)
    for t in SIZES:
        compare(on_ranks(_swiglu_of_parts, t, my_part), _dense_swiglu_y(), t=t)
    return "b, and every rank has its share of gate and of up: Y is the dense one at t = 1, 2 and 4."


def _dense_swiglu() -> SwiGLU:
    return _filled(SwiGLU(_H, _F, dtype=torch.float64), seed=30)


def _gate_up() -> Tensor:
    dense = _dense_swiglu()
    return torch.cat([dense.gate_proj.weight, dense.up_proj.weight]).detach()


def _dense_swiglu_y() -> dict[str, Tensor]:
    return {"Y": _dense_swiglu()(_X).detach()}


def _require_parts(my_part: Callable, t: int) -> None:
    whole = _gate_up()
    gates, ups = (half.chunk(t) for half in whole.chunk(2))
    parts = [my_part(whole.clone(), r, t) for r in range(t)]
    require_returned(my_part, parts)
    shape = [2 * _F // t, _H]
    for r, part in enumerate(parts):
        if t > 1 and isinstance(part, Tensor) and part.shape == whole.chunk(t, 1)[0].shape:
            raise Wrong(f"my_part returned shape {list(part.shape)} for rank {r} of {t}, not {shape}.\n{COLUMNS}")
    pairs = list(zip(gates, ups, strict=True))
    symptoms = [
        looks_like({"part": [torch.cat([up, gate]) for gate, up in pairs]}, UP_FIRST, per_rank=True),
        looks_like({"part": [torch.stack(pair, 1).flatten(0, 1) for pair in pairs]}, ALTERNATING, per_rank=True),
    ]
    if t > 1:
        symptoms.insert(0, looks_like({"part": whole.chunk(t)}, PLAIN, per_rank=True))
    got = [{"part": part} for part in parts]
    compare(got, [{"part": torch.cat(pair)} for pair in pairs], t=t, symptoms=symptoms)


def _swiglu_of_parts(my_part: Callable) -> dict[str, Tensor]:
    r, t = group_rank(), group_size()
    gate, up = linear(_X, my_part(_gate_up(), r, t)).chunk(2, -1)
    down = _dense_swiglu().down_proj.weight.detach().chunk(t, 1)[r]
    return {"Y": all_reduce(linear(silu(gate) * up, down))}


# ---- 5.5 ------------------------------------------------------------------------------------------------------------

ONE_SUMMED = {
    "gate": "gate's part of dX was summed over the ranks, and up's was not: up read X past copy (f).",
    "up": "up's part of dX was summed over the ranks, and gate's was not: gate read X past copy (f).",
}
TWO_COPIES = (
    "Each copy (f) sums its own part of dX. One is enough: copy (f) belongs to X, which is replicated, and not to the "
    "layers that read it. Behind it the parts are added on the rank, before the sum."
)
TWICE_AS_WIDE = "One call, and twice the bytes: add the two parts of dX on the rank first, then send their sum."
NO_SUM_AT_ALL = "Every rank used X, so each holds a part of dX. No copy (f) is left to add them."


@exercise("5.5")
def one_copy_for_gate_and_up(one_copy: Callable) -> str:
    """`one_copy(x, gate, up, down)` with this rank's part of torch's weights: Y, and one all-reduce of dX."""
    for t in SIZES:
        got = on_ranks(_one_copy_job, t, one_copy)
        require_returned(one_copy, [None if of_rank["Y"] is None else of_rank for of_rank in got])
        want, symptoms = _dense_gated(t)
        compare(got, want, t=t, symptoms=symptoms)
        if t > 1:
            _require_one_sum(got[0]["ledger"], t)
    return "one all-reduce of dX for gate and up together, and every gradient is the dense one at t = 1, 2 and 4."


def _one_copy_job(one_copy: Callable) -> dict:
    r, t = group_rank(), group_size()
    dense, x = _dense_swiglu(), _X.clone().requires_grad_()
    gate, up = (
        layer.weight.detach().chunk(t)[r].clone().requires_grad_() for layer in (dense.gate_proj, dense.up_proj)
    )
    down = dense.down_proj.weight.detach().chunk(t, 1)[r].clone().requires_grad_()
    with record() as ledger:
        y = one_copy(x, gate, up, down)
        if blanks(y):
            return {"Y": None}
        require_output(y, _DY)
        y.backward(_DY)
    gradients = {"dX": x.grad, "d gate": gate.grad, "d up": up.grad, "d down": down.grad}
    return {"Y": y.detach(), "ledger": ledger} | gradients


def _dense_gated(t: int) -> tuple[list[dict], list]:
    dense, x = _dense_swiglu(), _X.clone().requires_grad_()
    y = dense(x)
    y.backward(_DY)
    gate, up, down = dense.gate_proj.weight, dense.up_proj.weight, dense.down_proj.weight
    by_rank = zip(gate.grad.chunk(t), up.grad.chunk(t), down.grad.chunk(t, 1), strict=True)
    want = [{"Y": y, "dX": x.grad, "d gate": g, "d up": u, "d down": d} for g, u, d in by_rank]
    if t == 1:
        return want, []
    parts = _parts_of_dx(t)
    total = {name: sum(of_ranks) for name, of_ranks in parts.items()}
    other = {"gate": "up", "up": "gate"}
    symptoms = [
        looks_like({"dX": [total[name] + part for part in parts[other[name]]]}, text, per_rank=True)
        for name, text in ONE_SUMMED.items()
    ]
    neither = [g + u for g, u in zip(parts["gate"], parts["up"], strict=True)]
    return want, [*symptoms, looks_like({"dX": neither}, NO_SUM_AT_ALL, per_rank=True)]


def _parts_of_dx(t: int) -> dict[str, list[Tensor]]:
    """Each rank's part of dX, from gate and from up."""
    dense = _dense_swiglu()
    leaves = {name: _X.clone().requires_grad_() for name in ("gate", "up")}
    g = linear(leaves["gate"], dense.gate_proj.weight).detach().requires_grad_()
    u = linear(leaves["up"], dense.up_proj.weight).detach().requires_grad_()
    dense.down_proj(silu(g) * u).backward(_DY)
    pairs = {"gate": (g.grad, dense.gate_proj.weight), "up": (u.grad, dense.up_proj.weight)}
    return {
        name: [dh @ w for dh, w in zip(grad.chunk(t, -1), weight.detach().chunk(t), strict=True)]
        for name, (grad, weight) in pairs.items()
    }


def _require_one_sum(ledger: Ledger, t: int) -> None:
    if not ledger.events:
        raise Wrong(NOT_IN_LEDGER)
    if (count := ledger.count(phase="backward")) > 1:
        raise Wrong(f"all gradients are right, and backward has {count} collectives at t = {t}.\n{TWO_COPIES}")
    sent, needed = ledger.payload_bytes(phase="backward"), _X.nbytes
    if sent != needed:
        raise Wrong(f"backward's payload is {sent} bytes at t = {t}, and dX has {needed}.\n{TWICE_AS_WIDE}")
