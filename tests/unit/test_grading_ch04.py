"""Exercises 4.1 to 4.4: right answers in several styles pass, each wrong one hears what is wrong with it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checking import refused
from torch.nn.functional import linear

from tpcode.comm import all_gather, all_reduce, group_rank, group_size, reduce_from_tp, reduce_scatter
from tpcode.grading import Wrong, ch04, check

# ---- 4.1 ------------------------------------------------------------------------------------------------------------

RIGHT = {"Y_0": [4, -1], "Y_1": [9, 2], "Y": [13, 1], "dZ_0": [1, 4], "dZ_1": [3, 5]}


@pytest.mark.parametrize("typed", [list, lambda v: [v], np.array, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_parts_by_hand_pass(typed, capsys):
    check("4.1", **{name: typed(value) for name, value in RIGHT.items()})
    assert capsys.readouterr().out.startswith("4.1 right")


WRONG_BY_HAND = [
    ({"Y": [4, -1, 9, 2]}, ch04.BESIDE),
    ({"Y_0": [13, 1]}, ch04.WHOLE_Y),
    ({"Y_1": [13, 1]}, ch04.WHOLE_Y),
    ({"Y_0": [7, 3]}, "Here Z_0 met the other rank's rows"),
    ({"Y_1": [7, 8]}, "Here Z_1 met the other rank's rows"),
    ({"Y_0": [7, -2]}, "B_r is transposed"),
    ({"Y_1": [5, 12]}, "B_r is transposed"),
    ({"Y": [12, 10]}, "B_r is transposed"),
    ({"Y": [4, -1]}, "rank 0's part"),
    ({"Y": [9, 2]}, "rank 1's part"),
    ({"Y": [6.5, 0.5]}, "the mean of the parts"),
    ({"dZ_0": [4, 9]}, ch04.SUMMED_DZ),
    ({"dZ_1": [4, 9]}, ch04.SUMMED_DZ),
    ({"dZ_0": [2, 8]}, "twice the gradient"),
    ({"dZ_1": [6, 10]}, "twice the gradient"),
    ({"dZ_0": [2, 7]}, ch04.NO_TRANSPOSE),
    ({"dZ_1": [1, -1]}, ch04.NO_TRANSPOSE),
]


@pytest.mark.parametrize("wrong, said", WRONG_BY_HAND)
def test_wrong_numbers_hear_why(wrong, said):
    with pytest.raises(Wrong) as error:
        check("4.1", **RIGHT | wrong)
    assert said in str(error.value)
    assert str(error.value).startswith(f"4.1 not yet right: {next(iter(wrong))}")


def test_each_wrong_number_differs_from_the_right_one():
    assert all(RIGHT[name] != value for wrong, _ in WRONG_BY_HAND for name, value in wrong.items())


# ---- 4.2 ------------------------------------------------------------------------------------------------------------


def after_the_sum(z_r, weight_r, bias):
    return all_reduce(linear(z_r, weight_r)) + bias


def on_rank_0_only(z_r, weight_r, bias):
    return all_reduce(linear(z_r, weight_r, bias if dist.get_rank() == 0 else None))


def torchs_own(z_r, weight_r, bias):
    y = z_r @ weight_r.T
    dist.all_reduce(y)
    return y + bias


@pytest.mark.parametrize("row_forward", [after_the_sum, on_rank_0_only, torchs_own])
def test_forwards_pass(row_forward, capsys):
    check("4.2", row_forward)
    assert capsys.readouterr().out.startswith("4.2 right")


@pytest.mark.parametrize(
    "row_forward, said",
    [
        (lambda z, w, b: all_reduce(linear(z, w, b)), "(out - dense) / bias is 1: the bias was added on every rank"),
        (lambda z, w, b: all_reduce(linear(z, w)), ch04.BIAS_MISSING),
        (lambda z, w, b: all_reduce(linear(z, w)) + b / group_size(), "only 1/2 of the bias arrived"),
        (lambda z, w, b: linear(z, w, b), "rank 0's own part only"),
        (lambda z, w, b: linear(z, w), ch04.BIAS_MISSING),  # at t = 1 it is all that is wrong
        (lambda z, w, b: all_reduce(linear(z, w), op="avg") + b, "The parts were averaged"),
        (lambda z, w, b: all_gather(linear(z, w, b), dim=-1), ch04.JOINED),
    ],
)
def test_wrong_forwards_hear_why(row_forward, said):
    refused(said, "4.2", row_forward)


# ---- 4.3 ------------------------------------------------------------------------------------------------------------


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return all_reduce(part)

    @staticmethod
    def backward(ctx, dy):
        return dy


class TorchsOwn(Reduce):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, dy):
        return dy.clone()


class SumsTwice(Reduce):
    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy)


class SumsAndDivides(Reduce):
    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy) / group_size()


class NeverSums(Reduce):
    @staticmethod
    def forward(ctx, part):
        return part.view_as(part)


class Averages(Reduce):
    @staticmethod
    def backward(ctx, dy):
        return dy / group_size()


class Stub(Reduce):
    @staticmethod
    def backward(ctx, dy): ...


def layer_with(reduce):
    def row_parallel(z_r, weight_r, bias):
        return reduce(linear(z_r, weight_r)) + bias

    return row_parallel


@pytest.mark.parametrize(
    "reduce, layer",
    [
        (Reduce, layer_with(Reduce.apply)),
        (TorchsOwn, layer_with(TorchsOwn.apply)),
        (Reduce, layer_with(reduce_from_tp)),
    ],
)
def test_reduces_pass(reduce, layer, capsys):
    check("4.3", reduce, layer)
    assert capsys.readouterr().out.startswith("4.3 right")


@pytest.mark.parametrize(
    "reduce, layer, said",
    [
        (SumsTwice, None, ch04.SUMMED_AGAIN),
        (SumsAndDivides, None, ch04.NOTHING_TO_SEND),
        (NeverSums, None, "own part only"),
        (Averages, None, "It is 1/2 of the right value"),
        (Reduce, lambda z, w, b: Reduce.apply(linear(z, w, b)), "Y on rank 0 at t = 2"),
        (Reduce, lambda z, w, b: Reduce.apply(linear(z, w)).detach() + b, "dZ is missing"),
        (Reduce, lambda z, w, b: (Reduce.apply(linear(z, w)) + b).detach(), "no gradient flows back"),
        (Reduce.apply, layer_with(Reduce.apply), "Reduce should be a class"),
    ],
)
def test_wrong_reduces_hear_why(reduce, layer, said):
    refused(said, "4.3", reduce, layer or layer_with(reduce.apply))


# ---- 4.4 ------------------------------------------------------------------------------------------------------------


def gathers_rows(dy):
    return all_gather(dy[[group_rank()]], dim=0)


def sums(dy):
    return all_reduce(dy)


def sums_by_halves(dy):
    return all_gather(reduce_scatter(dy, dim=0), dim=0)


@pytest.mark.parametrize("backward", [gathers_rows, sums, sums_by_halves])
def test_backwards_of_a_sum_pass(backward, capsys):
    check("4.4", backward)
    out = capsys.readouterr().out
    assert out.startswith("4.4 right")


def test_it_says_which_answer_sends_less(capsys):
    check("4.4", sums)
    check("4.4", gathers_rows)
    first, second = capsys.readouterr().out.splitlines()
    assert "an all-gather of the rows sends half" in first and "half of an all-reduce's wire" in second


@pytest.mark.parametrize(
    "backward, said",
    [
        (lambda dy: dy, ch04.OWN_LOSS_ONLY),
        (lambda dy: all_reduce(dy) / group_size(), "averaged where a sum is needed"),
        (lambda dy: all_reduce(dy)[[group_rank()]], "has shape [1, 6], not [2, 6]"),
        (lambda dy: reduce_scatter(dy, dim=0), "has shape [1, 6], not [2, 6]"),
    ],
)
def test_wrong_backwards_hear_why(backward, said):
    refused(said, "4.4", backward)


# ---- stubs ----------------------------------------------------------------------------------------------------------


def hole(*answers):
    y = None
    return y


@pytest.mark.parametrize(
    "id, answers, said",
    [
        ("4.1", [None] * 5, "replace None in Y_0, Y_1"),
        ("4.2", (hole,), "replace None in hole"),
        ("4.3", (Stub, layer_with(Stub.apply)), "replace ... in Reduce.backward"),
        ("4.4", (hole,), "replace None in hole"),
    ],
)
def test_stubs_are_recognised(id, answers, said):
    refused(f"{id} is not filled in yet: {said}", id, *answers)
