"""Exercises 5.1 to 5.5: right answers in several styles pass, each wrong one hears what is wrong with it."""

import pytest
import torch
from checking import refused
from torch import nn
from torch.nn.functional import gelu, leaky_relu, linear, silu

from tpcode.comm import (
    all_gather,
    all_reduce,
    copy_to_tp,
    gather_from_tp,
    group_rank,
    group_size,
    reduce_from_tp,
    scatter_to_tp,
)
from tpcode.grading import ch05, check
from tpcode.layers import ColumnParallelLinear, RowParallelLinear

# ---- 5.1 ------------------------------------------------------------------------------------------------------------

RIGHT_UNITS = {"column, row": 2, "column, column": 5, "row, column": 9, "row, row": 10}


@pytest.mark.parametrize(
    "units",
    [RIGHT_UNITS, {order: float(n) for order, n in RIGHT_UNITS.items()}, {**RIGHT_UNITS, "row, row": 4 * 2 + 2}],
)
def test_units_pass(units, capsys):
    check("5.1", units)
    assert capsys.readouterr().out.startswith("5.1 right: 2, 5, 9 and 10 units")


@pytest.mark.parametrize(
    "order, wrong, said",
    [
        ("column, row", 0, ch05.NO_OUTPUT),
        ("column, row", 1, ch05.ONE_WAY),
        ("column, row", 4, ch05.BOTH_WAYS),
        ("column, row", 2 + 4, ch05.BETWEEN),  # a gather of Z
        ("column, row", 2 + 8, ch05.BETWEEN),  # an all-reduce of Z
        ("column, column", 4, ch05.NO_OUTPUT),
        ("column, column", 1, ch05.NO_COLUMNS),
        ("column, column", 1 + 1, ch05.AS_NARROW),
        ("column, column", 8 + 2, ch05.GATHER_AS_SUM),
        ("column, column", 8 + 1, ch05.GATHER_AS_SUM),
        ("column, column", 4 + 2, ch05.GATHER_AS_SUM),
        ("row, column", 8, ch05.NO_OUTPUT),
        ("row, column", 1, ch05.NO_SUM),
        ("row, column", 2 + 1, ch05.AS_NARROW),
        ("row, column", 4 + 1, ch05.ONE_WAY),
        ("row, column", 8 + 2, ch05.GATHER_AS_SUM),
        ("row, row", 8, ch05.NO_OUTPUT),
        ("row, row", 2, ch05.NO_SUM),
        ("row, row", 2 + 2, ch05.AS_NARROW),
        ("row, row", 4 + 1, ch05.ONE_WAY),
        ("row, row", 4 + 2, ch05.REDUCE_SCATTERED),
        ("row, row", 1 + 8 + 2, ch05.SLICE_SENDS),
        ("row, row", 8 + 4 + 2, ch05.SLICE_SENDS),
        ("row, row", 1 + 8 + 4 + 2, ch05.SLICE_SENDS),
        ("row, row", 7, '"row, row" does not send 7 units.'),
    ],
)
def test_wrong_units_hear_why(order, wrong, said):
    message = refused(said, "5.1", RIGHT_UNITS | {order: wrong})
    assert message.startswith(f'5.1 not yet right: "{order}" does not send {wrong} units.')


def test_any_order_will_do():
    refused(ch05.ANY_ORDER, "5.1", dict.fromkeys(RIGHT_UNITS, 2))


def test_units_not_yet_typed_or_no_numbers():
    refused("5.1 is not filled in yet: replace None in units.", "5.1", {**RIGHT_UNITS, "row, row": None})
    refused("a dict with the keys 'column, row', ", "5.1", {"column, row": 2})
    refused("should be a number; it is 'two'", "5.1", {**RIGHT_UNITS, "row, row": "two"})


@pytest.mark.parametrize("order", RIGHT_UNITS)
def test_four_ranks_send_as_many_units(order):
    assert ch05.units_by_ledger(order, t=4) == RIGHT_UNITS[order]


# ---- 5.2 ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A rank's weight and bias."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())


class Own(nn.Module):
    """The whole FFN, cut right; `column` and `row` are what stands in for the two layers."""

    def __init__(self, dense):
        super().__init__()
        r, t = group_rank(), group_size()
        fc, proj = dense.c_fc, dense.c_proj
        self.fc = Layer(fc.weight.chunk(t)[r], fc.bias.chunk(t)[r])
        self.proj = Layer(proj.weight.chunk(t, 1)[r], proj.bias)

    def column(self, x):
        return linear(copy_to_tp(x), self.fc.weight, self.fc.bias)

    def row(self, z):
        return reduce_from_tp(linear(z, self.proj.weight)) + self.proj.bias

    def forward(self, x):
        return self.row(gelu(self.column(x), approximate="tanh"))


class OfTheBook(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.fc = ColumnParallelLinear.from_dense(dense.c_fc)
        self.proj = RowParallelLinear.from_dense(dense.c_proj)

    def forward(self, x):
        return self.proj(gelu(self.fc(x), approximate="tanh"))


class G(torch.autograd.Function):
    """Reduce (g), written by hand."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class ByHand(Own):
    """The products written with matrices, and an own g."""

    def column(self, x):
        return copy_to_tp(x) @ self.fc.weight.t() + self.fc.bias

    def row(self, z):
        return G.apply(z @ self.proj.weight.t()) + self.proj.bias


class BiasOnRankZero(Own):
    """The bias on one rank only, before the sum: the value is right. Its gradient is, too, on rank 0 alone."""

    def row(self, z):
        own = linear(z, self.proj.weight) + self.proj.bias * (group_rank() == 0)
        return reduce_from_tp(own)


@pytest.mark.parametrize("MyFFN", [Own, OfTheBook, ByHand])
def test_ffns_pass(MyFFN, capsys):
    check("5.2", MyFFN)
    assert capsys.readouterr().out.startswith("5.2 right: Y and every gradient")


class GatheredBetween(Own):
    def forward(self, x):
        z = gather_from_tp(gelu(self.column(x), approximate="tanh"))
        return self.row(scatter_to_tp(z))


class SummedBetween(Own):
    """Each rank computes its columns of H in the whole H, zeros elsewhere; an all-reduce of F puts them together."""

    def forward(self, x):
        r, t = group_rank(), group_size()
        own = self.column(x)
        pieces = [own if q == r else torch.zeros_like(own) for q in range(t)]
        h = reduce_from_tp(torch.cat(pieces, -1))
        return self.row(gelu(h, approximate="tanh").chunk(t, -1)[r])


class SummedZ(Own):
    def forward(self, x):
        return self.row(reduce_from_tp(gelu(self.column(x), approximate="tanh")))


class SummedZAndNoMore(SummedZ):
    def row(self, z):
        return linear(z, self.proj.weight, self.proj.bias)


class NoCopy(Own):
    def column(self, x):
        return linear(x, self.fc.weight, self.fc.bias)


class NoReduce(Own):
    def row(self, z):
        return linear(z, self.proj.weight, self.proj.bias)


class NoBias(Own):
    def row(self, z):
        return reduce_from_tp(linear(z, self.proj.weight)) + 0 * self.proj.bias


class BiasTTimes(Own):
    def row(self, z):
        return reduce_from_tp(linear(z, self.proj.weight, self.proj.bias))


class GWithASumBack(Own):
    def row(self, z):
        return reduce_from_tp(copy_to_tp(linear(z, self.proj.weight))) + self.proj.bias


class DWSummed(Own):
    """A sum of the weight's gradient that hits what is whole already."""

    def column(self, x):
        return linear(copy_to_tp(x), copy_to_tp(self.fc.weight), self.fc.bias)


class WrongDimension(Own):
    def __init__(self, dense):
        super().__init__(dense)
        r, t = group_rank(), group_size()
        self.fc = Layer(dense.c_fc.weight.chunk(t, 1)[r], dense.c_fc.bias)


class WrongRows(Own):
    def __init__(self, dense):
        super().__init__(dense)
        self.proj = Layer(dense.c_proj.weight.chunk(group_size(), 0)[group_rank()], dense.c_proj.bias)


class BiasShared(Own):
    def row(self, z):
        return reduce_from_tp(linear(z, self.proj.weight)) + self.proj.bias / group_size()


class ExactGelu(Own):
    def forward(self, x):
        return self.row(gelu(self.column(x)))


class CollectivesOfTorch(Own):
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            dy = dy.clone()
            torch.distributed.all_reduce(dy)
            return dy

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            torch.distributed.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, dy):
            return dy

    def column(self, x):
        return linear(self.F.apply(x), self.fc.weight, self.fc.bias)

    def row(self, z):
        return self.G.apply(linear(z, self.proj.weight)) + self.proj.bias


class Wasteful(Own):
    """Right values and a sum of dY that nobody needs."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return all_reduce(dy) / group_size()

    def forward(self, x):
        return self.Sum.apply(super().forward(x))


class OtherNames(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.first = ColumnParallelLinear.from_dense(dense.c_fc)


class NoHistory(Own):
    def forward(self, x):
        return super().forward(x).detach()


class NoReturn(Own):
    def forward(self, x):
        super().forward(x)


class Stub(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.fc = None  # replace None: a Column
        self.proj = None  # replace None: a Row

    def forward(self, x):
        y = None  # replace None
        return y


class HalfAStub(Own):
    def forward(self, x):
        y = None  # replace None
        return y


@pytest.mark.parametrize(
    "MyFFN, said",
    [
        (GatheredBetween, ch05.GATHERED_BETWEEN),
        (GatheredBetween, "forward sends 6 units of bsh(t-1)/t elements at t = 2; the budget is 2"),
        (SummedBetween, ch05.SUMMED_BETWEEN),
        (SummedZ, ch05.SUMMED_Z),
        (SummedZAndNoMore, ch05.SUMMED_Z),
        (NoCopy, ch05.NO_COPY),
        (NoReduce, ch05.NO_REDUCE.format(rank=0)),
        (NoBias, ch05.NO_BIAS),
        (BiasTTimes, ch05.BIAS_T_TIMES),
        (BiasOnRankZero, "d proj.bias on rank 1 at t = 2"),
        (GWithASumBack, "dX on rank 0 at t = 2"),
        (GWithASumBack, "It is 2 times the right value: what every rank already held whole was summed"),
        (DWSummed, "d fc.weight on rank 0 at t = 2"),
        (WrongDimension, ch05.WRONG_CUT["fc.weight"]),
        (WrongRows, ch05.WRONG_CUT["proj.weight"]),
        (BiasShared, "Only 1/2 of the second layer's bias"),
        (ExactGelu, ch05.OTHER_GELU),
        (CollectivesOfTorch, ch05.NOT_IN_LEDGER),
        (Wasteful, ch05.TOO_MUCH_BACKWARD),
        (OtherNames, "MyFFN has no fc.weight: call its layers fc and proj"),
        (NoHistory, "Y has no gradient"),
        (NoReturn, "the output should be a tensor; it is None"),
        (Stub, "5.2 is not filled in yet: replace None in MyFFN."),
        (HalfAStub, "5.2 is not filled in yet: replace None in MyFFN."),
    ],
)
def test_wrong_ffns_hear_why(MyFFN, said):
    refused(said, "5.2", MyFFN)


# ---- 5.3 ------------------------------------------------------------------------------------------------------------


def doubled(h):
    return 2 * h


@pytest.mark.parametrize(
    "a, b, activation",
    [
        (3.0, -5.0, doubled),
        (1, 1, lambda h: h),
        (torch.tensor(0.5), -0.5, nn.Identity()),
        (-1, 2, lambda h: leaky_relu(h, 1.0)),
        (2, 2, lambda h: -h / 4),
    ],
)
def test_refutations_pass(a, b, activation, capsys):
    check("5.3", a, b, activation)
    assert capsys.readouterr().out.startswith("5.3 right: GeLU(")


@pytest.mark.parametrize(
    "a, b, said",
    [
        (0, 3, ch05.WITH_ZERO),
        (0, 0, ch05.WITH_ZERO),
        (100, 200, ch05.STRAIGHT),
        (-50, -60, ch05.STRAIGHT),
        ("one", 2, "a should be a number"),
        (float("nan"), 2, "a should be a finite number"),
    ],
)
def test_numbers_that_refute_nothing_hear_why(a, b, said):
    refused(said, "5.3", a, b, doubled)


@pytest.mark.parametrize(
    "activation, said",
    [
        (torch.relu, f"Yours: f(3) + f(-5) = 3, and f(-2) = 0. {ch05.ELEMENTWISE}"),
        (gelu, ch05.ELEMENTWISE),
        (torch.square, "Yours: f(3) + f(-5) = 34, and f(-2) = 4."),
        (leaky_relu, ch05.ELEMENTWISE),
        (torch.abs, ch05.ELEMENTWISE),
        (torch.tanh, ch05.ELEMENTWISE),
        (lambda h: h.clamp(max=2.0), ch05.ELEMENTWISE),
        (lambda h: h + 1, ch05.CONSTANT.format(at_zero=1)),
        (torch.sigmoid, ch05.CONSTANT.format(at_zero=0.5)),
        (torch.zeros_like, ch05.NOTHING_LEFT),
        (lambda h: h.mean(), "a tensor of its input's shape [5, 7]; it returned shape []"),
        (lambda h: 3, "a tensor of its input's shape [5, 7]; it returned 3"),
    ],
)
def test_activations_that_are_not_exact_hear_why(activation, said):
    refused(said, "5.3", 3.0, -5.0, activation)


def test_an_activation_not_yet_written():
    def activation(h):
        z = None  # replace None: made of h
        return z

    refused("5.3 is not filled in yet: replace None in activation.", "5.3", 3.0, -5.0, activation)
    refused("5.3 is not filled in yet: replace None in a and b.", "5.3", None, None, activation)


# ---- 5.4 ------------------------------------------------------------------------------------------------------------


def shares(gate_up, r, t):
    gate, up = gate_up.chunk(2)
    return torch.cat([gate.chunk(t)[r], up.chunk(t)[r]])


def shares_by_view(gate_up, r, t):
    return gate_up.view(2, t, -1, gate_up.shape[1])[:, r].flatten(0, 1)


def shares_by_index(gate_up, r, t):
    width = gate_up.shape[0] // 2
    rows = range(r * width // t, (r + 1) * width // t)
    return gate_up[[*rows, *(width + row for row in rows)]]


@pytest.mark.parametrize("fault", ["b", "B"])
@pytest.mark.parametrize("my_part", [shares, shares_by_view, shares_by_index])
def test_shares_of_gate_and_up_pass(fault, my_part, capsys):
    check("5.4", fault, my_part)
    assert capsys.readouterr().out.startswith("5.4 right: b")


def up_first(gate_up, r, t):
    return torch.cat(shares(gate_up, r, t).chunk(2)[::-1])


def alternating(gate_up, r, t):
    return torch.stack(shares(gate_up, r, t).chunk(2), 1).flatten(0, 1)


@pytest.mark.parametrize(
    "my_part, said",
    [
        (lambda gate_up, r, t: gate_up.chunk(t)[r], ch05.PLAIN),
        (lambda gate_up, r, t: gate_up[r::t], "part on rank 0 at t = 2"),
        (up_first, ch05.UP_FIRST),
        (alternating, ch05.ALTERNATING),
        (lambda gate_up, r, t: shares(gate_up, t - 1 - r, t), "It is what belongs to rank 1."),
        (lambda gate_up, r, t: gate_up.chunk(t, 1)[r], ch05.COLUMNS),
        (lambda gate_up, r, t: gate_up.chunk(2)[0].chunk(t)[r], "has shape [24, 6], not [48, 6]"),
        (lambda gate_up, r, t: gate_up, "has shape [48, 6], not [24, 6]"),
    ],
)
def test_wrong_parts_hear_why(my_part, said):
    refused(said, "5.4", "b", my_part)


@pytest.mark.parametrize("letter", ["a", "c", "d"])
def test_another_fault_hears_why_it_is_not(letter):
    refused(f"the fault is not {letter}. {ch05.FAULTS[letter]}", "5.4", letter, shares)


def test_a_fault_that_is_no_letter_and_stubs():
    def my_part(gate_up, r, t):
        part = None  # replace None
        return part

    refused("one of 'a', 'b', 'c', 'd'; it is 'gate'", "5.4", "gate", shares)
    refused("5.4 is not filled in yet: replace None in fault.", "5.4", None, my_part)
    refused("5.4 is not filled in yet: replace None in my_part.", "5.4", "b", my_part)


# ---- 5.5 ------------------------------------------------------------------------------------------------------------


def gated(g, u, down):
    return reduce_from_tp(linear(silu(g) * u, down))


def copied_once(x, gate, up, down):
    x = copy_to_tp(x)
    return gated(linear(x, gate), linear(x, up), down)


def fused(x, gate, up, down):
    return gated(*linear(copy_to_tp(x), torch.cat([gate, up])).chunk(2, -1), down)


class AddedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up):
        ctx.save_for_backward(x, gate, up)
        return linear(x, gate), linear(x, up)

    @staticmethod
    def backward(ctx, dg, du):
        x, gate, up = ctx.saved_tensors
        dx = all_reduce(dg @ gate + du @ up)
        tokens = x.flatten(0, -2)
        return dx, dg.flatten(0, -2).t() @ tokens, du.flatten(0, -2).t() @ tokens


def own_function(x, gate, up, down):
    return gated(*AddedByHand.apply(x, gate, up), down)


@pytest.mark.parametrize("one_copy", [copied_once, fused, own_function])
def test_one_copy_passes(one_copy, capsys):
    check("5.5", one_copy)
    assert capsys.readouterr().out.startswith("5.5 right: one all-reduce of dX")


def two_copies(x, gate, up, down):
    return gated(linear(copy_to_tp(x), gate), linear(copy_to_tp(x), up), down)


def only_gate(x, gate, up, down):
    return gated(linear(copy_to_tp(x), gate), linear(x, up), down)


def only_up(x, gate, up, down):
    return gated(linear(x, gate), linear(copy_to_tp(x), up), down)


def no_copy(x, gate, up, down):
    return gated(linear(x, gate), linear(x, up), down)


def copy_of_a_pair(x, gate, up, down):
    one, other = copy_to_tp(torch.stack([x, x]))
    return gated(linear(one, gate), linear(other, up), down)


def copied_twice(x, gate, up, down):
    return copied_once(copy_to_tp(x), gate, up, down)


def not_summed(x, gate, up, down):
    x = copy_to_tp(x)
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def gathered(x, gate, up, down):
    return all_gather(linear(x, gate).detach(), -1)


def stub(x, gate, up, down): ...


@pytest.mark.parametrize(
    "one_copy, said",
    [
        (two_copies, "all gradients are right, and backward has 2 collectives at t = 2"),
        (two_copies, ch05.TWO_COPIES),
        (only_gate, ch05.ONE_SUMMED["gate"]),
        (only_up, ch05.ONE_SUMMED["up"]),
        (no_copy, ch05.NO_SUM_AT_ALL),
        (copy_of_a_pair, ch05.TWICE_AS_WIDE),
        (copied_twice, "dX on rank 0 at t = 2"),
        (not_summed, "Y on rank 0 at t = 2"),
        (gathered, "Y has shape [2, 3, 24], not [2, 3, 6]"),
        (stub, "5.5 is not filled in yet: replace ... in stub."),
    ],
)
def test_wrong_copies_hear_why(one_copy, said):
    refused(said, "5.5", one_copy)


def test_each_wrong_dx_is_another():
    parts = ch05._parts_of_dx(2)
    gate, up = parts["gate"], parts["up"]
    values = [sum(gate) + sum(up), sum(gate) + up[0], gate[0] + sum(up), gate[0] + up[0], 2 * (sum(gate) + sum(up))]
    for i, value in enumerate(values):
        assert all((value - other).abs().max() > 1e-3 for other in values[:i])
