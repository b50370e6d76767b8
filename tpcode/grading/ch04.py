"""Chapter 4, the row split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from tpcode.comm import group_rank, group_size
from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.compare import compare, compare_one, looks_like, part_only
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_calls, require_returned
from tpcode.grading.registry import exercise
from tpcode.runtime.notes import watch

# ---- 4.1 ------------------------------------------------------------------------------------------------------------

Z = ((1, 3, 5, 2),)
B = ((1, 2), (1, -1), (1, 0), (2, 1))
DY = ((3, -1),)

BESIDE = (
    "These are the parts side by side. Each is as wide as Y already: they are terms of the same entries, and added."
)
WHOLE_Y = "This is Y, the sum. A rank has its own terms of each entry; what they come to is asked for here."
OTHER_ROWS = "Here Z_{r} met the other rank's rows of B. Its columns meet the rows at the same place."
NO_TRANSPOSE = "This is dY B_r. dZ_r is dY B_rᵀ."
SUMMED_DZ = "This is dZ_0 + dZ_1. They are the gradients of different columns of Z: each is complete as it is."


@exercise("4.1")
def row_split_by_hand(Y_0, Y_1, Y, dZ_0, dZ_1) -> str:
    """Vectors of two numbers."""
    typed = {"Y_0": Y_0, "Y_1": Y_1, "Y": Y, "dZ_0": dZ_0, "dZ_1": dZ_1}
    right, symptoms = _by_hand()
    for name, want in right.items():
        got = typed[name]
        got = got[0] if isinstance(got, (list, tuple)) and len(got) == 1 else got  # [[4, -1]] is [4, -1]
        if name == "Y" and isinstance(got, (list, tuple)) and list(got) == [*right["Y_0"].tolist(), *right["Y_1"]]:
            raise Wrong(f"Y is {list(got)}.\n{BESIDE}")
        compare_one(name, got, want, symptoms=symptoms, reveal=False)
    return "[4, -1] + [9, 2] = [13, 1] forward, and nothing to add backward."


def _by_hand() -> tuple[dict[str, Tensor], list]:
    z, b, dy = (torch.tensor(matrix, dtype=torch.float64) for matrix in (Z, B, DY))
    z_of, b_of = z.chunk(2, 1), b.chunk(2)  # [1, 2] and [2, 2] on each rank

    def named(name, values):
        return {f"{name}_{rank}": value.flatten() for rank, value in enumerate(values)}

    parts = [z_r @ b_r for z_r, b_r in zip(z_of, b_of, strict=True)]
    dz = [dy @ b_r.T for b_r in b_of]
    transposed = [z_r @ b_r.T for z_r, b_r in zip(z_of, b_of, strict=True)]
    y = sum(parts)
    crossed = [z_of[0] @ b_of[1], z_of[1] @ b_of[0]]
    return named("Y", parts) | {"Y": y.flatten()} | named("dZ", dz), [
        looks_like(named("Y", [y] * 2), WHOLE_Y),
        *(looks_like({f"Y_{r}": value.flatten()}, OTHER_ROWS.format(r=r)) for r, value in enumerate(crossed)),
        looks_like(named("Y", transposed) | {"Y": sum(transposed).flatten()}, "B_r is transposed here."),
        looks_like({"Y": parts[0].flatten()}, "This is rank 0's part. The parts of both ranks are added."),
        looks_like({"Y": parts[1].flatten()}, "This is rank 1's part. The parts of both ranks are added."),
        looks_like({"Y": y.flatten() / 2}, "This is the mean of the parts. They are added."),
        looks_like(named("dZ", [sum(dz)] * 2), SUMMED_DZ),
        looks_like(
            named("dZ", [2 * value for value in dz]), "This is twice the gradient: dY was summed over the ranks."
        ),
        looks_like(named("dZ", [dy @ b_r for b_r in b_of]), NO_TRANSPOSE),
    ]


# ---- 4.2 ------------------------------------------------------------------------------------------------------------

HIDDEN, WIDTH, TOKENS = 6, 8, (2, 3)

BIAS_T_TIMES = "(out - dense) / bias is {n}: the bias was added on every rank before the sum, and counts {t} times."
BIAS_MISSING = "(out - dense) / bias is -1: the bias is missing."
BIAS_SHARED = "(out - dense) / bias is {n}: only 1/{t} of the bias arrived."
JOINED = "These are the ranks' parts side by side. Each has terms of every entry: they are added."


@exercise("4.2")
def the_bias_counts_once(row_forward: Callable) -> str:
    """`row_forward(z_r, weight_r, bias)` on each rank: the dense layer's output."""
    z, weight, bias, _ = _random()
    for t in SIZES:
        results = on_ranks(_forward_on_a_rank, t, row_forward, z, weight, bias)
        require_returned(row_forward, results)
        if t > 1 and all(getattr(y, "shape", ())[-1:] == (t * HIDDEN,) for y in results):
            raise Wrong(f"Y at t = {t} has {t * HIDDEN} features, not {HIDDEN}.\n{JOINED}")
        want = linear(z, weight, bias)
        compare([{"Y": y} for y in results], {"Y": want}, t=t, symptoms=_bias_symptoms(t, z, weight, bias))
    return "(out - dense) / bias = 0 at t = 1, 2, 4."


def _random() -> list[Tensor]:
    """z [b, s, F], weight [h, F], bias [h], dy [b, s, h]."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((*TOKENS, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (*TOKENS, HIDDEN))
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _mine(x: Tensor) -> Tensor:
    """This rank's part of the last dimension."""
    return x.chunk(group_size(), -1)[group_rank()].clone()


def _forward_on_a_rank(row_forward: Callable, z: Tensor, weight: Tensor, bias: Tensor):
    with torch.no_grad():
        return row_forward(_mine(z), _mine(weight), bias.clone())


def _bias_symptoms(t: int, z: Tensor, weight: Tensor, bias: Tensor) -> list:
    dense = linear(z, weight)
    parts = [linear(z_r, w_r) for z_r, w_r in zip(z.chunk(t, -1), weight.chunk(t, -1), strict=True)]
    return [
        looks_like({"Y": dense + t * bias}, BIAS_T_TIMES.format(n=t - 1, t=t)),
        looks_like({"Y": dense}, BIAS_MISSING),
        looks_like({"Y": dense + bias / t}, BIAS_SHARED.format(n=f"1/{t} - 1", t=t)),
        part_only({"Y": parts}),
        part_only({"Y": [part + bias for part in parts]}),
        looks_like({"Y": dense / t + bias}, "The parts were averaged. They are added."),
    ]


# ---- 4.3 ------------------------------------------------------------------------------------------------------------

SUMMED_AGAIN = "Every rank holds the whole dY already: summing it again multiplies every gradient below by t."
NOTHING_TO_SEND = "Every rank has all of dY: backward has nothing to ask for."


@exercise("4.3")
def reduce_and_its_backward(Reduce: type, row_parallel: Callable) -> str:
    """`Reduce`, an autograd.Function, and `row_parallel(z_r, weight_r, bias)` that uses it."""
    if not (isinstance(Reduce, type) and issubclass(Reduce, torch.autograd.Function)):
        raise Wrong(f"Reduce should be a class made from torch.autograd.Function, and it is {Reduce!r:.60}.")
    for name in ("forward", "backward"):
        if stub := stub_in(getattr(Reduce, name)):
            raise Unfilled(f"replace {stub} in Reduce.{name}.")
    z, weight, bias, dy = _random()
    for t in SIZES:
        results = on_ranks(_pass_on_a_rank, t, row_parallel, z, weight, bias, dy)
        require_returned(row_parallel, results)
        want, symptoms = _row_reference(t, z, weight, bias, dy)
        compare(results, want, t=t, symptoms=symptoms)
        if t > 1:
            require_calls(results, "forward", 1, "One all-reduce, of the parts, is all that is needed.")
            require_calls(results, "backward", 0, NOTHING_TO_SEND)
    return "Y, dZ, dW and dbias on every rank at t = 1, 2, 4; 1 collective forward, 0 backward."


def _pass_on_a_rank(layer: Callable, z: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict | None:
    """One pass of the layer with this rank's shard; None if the layer returned nothing."""
    z, weight, bias = (part.clone().requires_grad_() for part in (_mine(z), _mine(weight), bias))
    with watch() as forward:
        y = layer(z, weight, bias)
    if blanks(y):
        return None
    if y.shape != dy.shape:
        return {"Y": y.detach()}  # the comparison says that the shape is wrong
    if not y.requires_grad:
        raise Wrong("no gradient flows back from Y: detach() cuts it off, and so does a collective outside of Reduce.")
    with watch() as backward:
        y.backward(dy)
    found = {"Y": y.detach(), "dbias": bias.grad, "dZ": z.grad, "dW": weight.grad}
    return found | {"forward": forward, "backward": backward}


def _row_reference(t: int, z: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[list[dict], list]:
    """What each rank should hold, and what it may hold instead."""
    y, tokens, dtokens = linear(z, weight, bias), z.flatten(0, 1), dy.flatten(0, 1)
    dz, dw = dy @ weight, dtokens.T @ tokens  # [b, s, F], [h, F]
    want = [
        {"Y": y, "dbias": dtokens.sum(0), "dZ": dz_r, "dW": dw_r}
        for dz_r, dw_r in zip(dz.chunk(t, -1), dw.chunk(t, -1), strict=True)
    ]
    if t == 1:
        return want, []
    times_t = {name: [t * mine[name] for mine in want] for name in ("dZ", "dW")}
    parts = [linear(z_r, w_r, bias) for z_r, w_r in zip(z.chunk(t, -1), weight.chunk(t, -1), strict=True)]
    return want, [part_only({"Y": parts}), looks_like(times_t, SUMMED_AGAIN, per_rank=True)]


# ---- 4.4 ------------------------------------------------------------------------------------------------------------

OWN_LOSS_ONLY = (
    "It is what this rank's loss says, and no more: the other ranks' losses depend on this part of the sum too."
)


@exercise("4.4")
def losses_that_differ(backward_of_the_sum: Callable) -> str:
    """`backward_of_the_sum(dy)` on each rank: dy [t, h], zero but in row r, to the gradient of this rank's part."""
    fewest = True
    for t in SIZES:
        generator = torch.Generator().manual_seed(44)
        parts, c = (torch.randn((t, t, HIDDEN), dtype=torch.float64, generator=generator) for _ in range(2))
        results = on_ranks(_gradient_of_a_part, t, backward_of_the_sum, parts, c[0])
        require_returned(backward_of_the_sum, [gradient for gradient, _ in results])
        want = c[0] * parts.sum(0)  # of Σ_r Σ c[r] y[r]² / 2, for every part alike
        rows = [torch.zeros_like(want).index_copy(0, torch.tensor([r]), want[[r]]) for r in range(t)]
        symptoms = [looks_like({"dpart": rows}, OWN_LOSS_ONLY, per_rank=True)] if t > 1 else []
        compare([{"dpart": gradient} for gradient, _ in results], {"dpart": want}, t=t, symptoms=symptoms)
        fewest &= t == 1 or all("all_gather" in "".join(calls) for _, calls in results)
    how = (
        "an all-gather of the rows, half of an all-reduce's wire" if fewest else "an all-gather of the rows sends half"
    )
    return f"the whole dY on every rank at t = 1, 2, 4 ({how})."


def _gradient_of_a_part(backward: Callable, parts: Tensor, c: Tensor) -> tuple:
    """What `backward` makes of this rank's dy, its loss being Σ c[r] y[r]² / 2; and what it called."""
    r = group_rank()
    y = parts.sum(0).requires_grad_()  # [t, h]: what the all-reduce gives every rank
    (c[r] * y[r] ** 2 / 2).sum().backward()
    with watch() as calls:
        gradient = backward(y.grad)
    return gradient, calls
