"""Exercises 3.1 to 3.5: right answers in several styles pass, each wrong one hears what is wrong with it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checking import refused
from torch.nn.functional import linear

from tpcode.comm import all_gather, all_reduce, copy_to_tp, gather_from_tp, reduce_scatter
from tpcode.grading import Wrong, ch03, check

# ---- 3.1 ------------------------------------------------------------------------------------------------------------

RIGHT = {
    "Y_0": [1, 3],
    "Y_1": [5, 2],
    "dA_0": [[3, 2], [6, 4]],
    "dA_1": [[1, 3], [2, 6]],
    "dX_0": [5, 2],
    "dX_1": [3, 4],
    "dX": [8, 6],
}


@pytest.mark.parametrize("typed", [list, np.array, lambda m: torch.tensor(m, dtype=torch.float64)])
def test_the_split_by_hand_passes(typed, capsys):
    check("3.1", **{name: typed(value) for name, value in RIGHT.items()})
    assert capsys.readouterr().out.startswith("3.1 right")


def test_vectors_may_be_typed_as_rows(capsys):
    check("3.1", **{name: value if name.startswith("dA") else [value] for name, value in RIGHT.items()})
    assert capsys.readouterr().out.startswith("3.1 right")


WRONG_BY_HAND = [
    ({"Y_0": [3, 2]}, ch03.ROWS_AS_COLUMNS),
    ({"Y_1": [3, 3]}, ch03.ROWS_AS_COLUMNS),
    ({"Y_0": [6, 5]}, "nothing is added"),
    ({"Y_0": [1, 5]}, "every other column"),
    ({"Y_0": [1, 3, 5, 2]}, "has shape [4], not [2]"),
    ({"dA_0": [[4, 5], [8, 10]]}, ch03.SUMMED_DA),
    ({"dA_1": [[4, 5], [8, 10]]}, ch03.SUMMED_DA),
    ({"dA_0": [[3, 6], [2, 4]]}, "It is transposed."),
    ({"dX_0": [8, 6]}, ch03.WHOLE_DX),
    ({"dX_1": [8, 6]}, ch03.WHOLE_DX),
    ({"dX_0": [3, 5]}, ch03.NO_TRANSPOSE),
    ({"dX_1": [6, 3]}, ch03.NO_TRANSPOSE),
    ({"dX": [9, 8]}, ch03.NO_TRANSPOSE),
    ({"dX": [5, 2]}, "rank 0's part"),
    ({"dX": [3, 4]}, "rank 1's part"),
    ({"dX": [4, 3]}, "the mean of the parts"),
    ({"dX": [5, 2, 3, 4]}, "side by side"),
]


@pytest.mark.parametrize("wrong, said", WRONG_BY_HAND)
def test_wrong_numbers_hear_why(wrong, said):
    with pytest.raises(Wrong) as error:
        check("3.1", **RIGHT | wrong)
    assert said in str(error.value)
    assert str(error.value).startswith(f"3.1 not yet right: {next(iter(wrong))}")


def test_each_wrong_number_differs_from_the_right_one():
    assert all(RIGHT[name] != value for wrong, _ in WRONG_BY_HAND for name, value in wrong.items())


# ---- 3.2 ------------------------------------------------------------------------------------------------------------


def by_chunk(weight, r, t):
    return weight.chunk(t)[r]


def by_slice(weight, r, t):
    rows = weight.shape[0] // t
    return weight[r * rows : (r + 1) * rows].clone()


def by_transposes(weight, r, t):
    return torch.split(weight.T, weight.shape[1] // t, dim=1)[r].T


@pytest.mark.parametrize("my_part", [by_chunk, by_slice, by_transposes])
def test_rows_pass(my_part, capsys):
    check("3.2", my_part)
    assert capsys.readouterr().out.startswith("3.2 right")


@pytest.mark.parametrize(
    "my_part, said",
    [
        (lambda weight, r, t: weight.chunk(t, 1)[r], ch03.WRONG_DIMENSION),
        (lambda weight, r, t: weight.chunk(t, 1)[r].T, "And they are transposed"),
        (lambda weight, r, t: weight.T.chunk(t)[r], "And they are transposed"),
        (lambda weight, r, t: weight[r::t], "every t-th row"),
        (lambda weight, r, t: weight.chunk(t)[0], "rank 0's part, whichever rank asks"),
        (lambda weight, r, t: weight, "has shape [8, 8], not [4, 8]"),
    ],
)
def test_wrong_parts_hear_why(my_part, said):
    refused(said, "3.2", my_part)


# ---- 3.3 ------------------------------------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx_r):
        return all_reduce(dx_r)


class InPlaceCopy(Copy):
    """torch's own collective, which the ledger does not see, on the tensor that came."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dx_r):
        dist.all_reduce(dx_r)
        return dx_r


class Silent(Copy):
    @staticmethod
    def backward(ctx, dx_r):
        return dx_r


class SumsForward(Copy):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x.detach())


class Averages(Copy):
    @staticmethod
    def backward(ctx, dx_r):
        return all_reduce(dx_r) / dist.get_world_size()


class Twice(Copy):
    @staticmethod
    def backward(ctx, dx_r):
        return all_reduce(all_reduce(dx_r)) / dist.get_world_size()


class Stub(Copy):
    @staticmethod
    def backward(ctx, dx_r):
        dx = None
        return dx


def layer_with(copy):
    def column_parallel(x, weight_r, bias_r):
        return linear(copy(x), weight_r, bias_r)

    return column_parallel


def by_product(x, weight_r, bias_r):
    return Copy.apply(x) @ weight_r.T + bias_r


def reduces_weights(x, weight_r, bias_r):
    return linear(Copy.apply(x), Copy.apply(weight_r), bias_r)


def reduces_bias(x, weight_r, bias_r):
    return linear(Copy.apply(x), weight_r, Copy.apply(bias_r))


class Reduce(Copy):
    @staticmethod
    def forward(ctx, y):
        return all_reduce(y.detach())

    @staticmethod
    def backward(ctx, dy):
        return dy


def adds_up_outputs(x, weight_r, bias_r):
    return Reduce.apply(linear(Copy.apply(x), weight_r, bias_r))


def returns_everything(x, weight_r, bias_r):
    return gather_from_tp(linear(Copy.apply(x), weight_r, bias_r))


@pytest.mark.parametrize(
    "copy, layer",
    [
        (Copy, layer_with(Copy.apply)),
        (InPlaceCopy, layer_with(InPlaceCopy.apply)),
        (Copy, layer_with(copy_to_tp)),
        (Copy, by_product),
    ],
)
def test_layers_pass(copy, layer, capsys):
    check("3.3", copy, layer)
    assert capsys.readouterr().out.startswith("3.3 right")


@pytest.mark.parametrize(
    "copy, layer, said",
    [
        (Copy, linear, ch03.ONE_PART),
        (Silent, layer_with(Silent.apply), ch03.ONE_PART),
        (SumsForward, layer_with(SumsForward.apply), "x was summed over the ranks"),
        (Averages, layer_with(Averages.apply), "It is 1/2 of the right value"),
        (Twice, layer_with(Twice.apply), "backward made 2 calls on rank 0 at t = 2"),
        (Copy, lambda x, weight_r, bias_r: Copy.apply(linear(x, weight_r, bias_r)), ch03.COPY_BEHIND),
        (Copy, reduces_weights, ch03.REDUCED_WEIGHT),
        (Copy, reduces_bias, ch03.REDUCED_WEIGHT),
        (Copy, adds_up_outputs, ch03.NOT_ADDED),
        (Copy, returns_everything, "Y on rank 0 at t = 2 has shape [2, 3, 8], not [2, 3, 4]"),
        (Copy, lambda x, weight_r, bias_r: by_product(x, weight_r, bias_r).detach(), "no gradient flows back"),
        (Copy.apply, layer_with(Copy.apply), "Copy should be a class"),
    ],
)
def test_wrong_layers_hear_why(copy, layer, said):
    refused(said, "3.3", copy, layer)


def asks_the_others(x, weight_r, bias_r):
    everyone = all_gather(x.detach(), dim=0)  # for nothing
    return linear(Copy.apply(x), weight_r, bias_r) + 0 * everyone.sum()


def test_a_forward_that_talks_is_refused():
    refused(
        "forward made 1 calls on rank 0 at t = 2 (all_gather_single float64 [2, 3, 6]", "3.3", Copy, asks_the_others
    )


# ---- 3.4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mend_A", [all_reduce, lambda dx_r: all_gather(dx_r.unsqueeze(0), dim=0).sum(0)])
def test_named_faults_pass(mend_A, capsys):
    check("3.4", ch03.LAYERS, mend_A)
    assert capsys.readouterr().out.startswith("3.4 right")


@pytest.mark.parametrize("layer", ch03.LAYERS)
@pytest.mark.parametrize("fault", ch03.FAULTS)
def test_each_other_name_is_refused_with_what_it_would_show(layer, fault):
    if fault == ch03.LAYERS[layer]:
        return
    said = "A layer is more than its output" if fault == "no fault" else f'with "{fault}" it would be'
    assert f"layer {layer}" in refused(said, "3.4", ch03.LAYERS | {layer: fault}, all_reduce)


def test_names_that_are_none_and_wrong_cures_hear_why():
    refused("none of the names: no copy", "3.4", ch03.LAYERS | {"B": "bias"}, all_reduce)
    refused("the keys A, B, C, D", "3.4", {"A": "no copy"}, all_reduce)
    refused("own part only", "3.4", ch03.LAYERS, lambda dx_r: dx_r)
    refused("2 times the right value", "3.4", ch03.LAYERS, lambda dx_r: all_reduce(all_reduce(dx_r)))


def test_tables_show_no_number_twice_in_a_way_that_misleads():
    """A gradient that happens to equal an output, or another rank's, would point at a fault that is not there."""
    tables = ch03.on_ranks(ch03._layer_with, 2, "no copy")
    rows = [tuple(table[key]) for table in tables for key in ("Y_r", "dX", "dbias_r")]
    assert len(set(rows)) == len(rows)


# ---- 3.5 ------------------------------------------------------------------------------------------------------------


def split(dy):
    return dy.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]


def scatter(dy):
    return reduce_scatter(dy, dim=-1)


def split_by_index(dy):
    share = dy.shape[-1] // dist.get_world_size()
    return dy[..., dist.get_rank() * share :][..., :share].clone()


def sum_then_split(dy):
    return split(all_reduce(dy))


def mean_of_all(dy):
    return scatter(dy) / dist.get_world_size()


@pytest.mark.parametrize("same, parts", [(split, scatter), (split_by_index, sum_then_split), (mean_of_all, scatter)])
def test_backwards_of_a_gather_pass(same, parts, capsys):
    check("3.5", same, parts)
    out = capsys.readouterr().out
    assert out.startswith("3.5 right") and ("would do without" in out) == (same is mean_of_all)


@pytest.mark.parametrize(
    "same, parts, said",
    [
        (scatter, scatter, "(a) is 2 times the gradient"),
        (split, split, "(b) is only what this rank's part"),
        (split, mean_of_all, "averaged where a sum is needed"),
        (lambda dy: dy, scatter, "has shape [2, 3, 8], not [2, 3, 4]"),
        (lambda dy: dy.chunk(dist.get_world_size(), dim=-1)[0], scatter, "belongs to rank 0"),
    ],
)
def test_wrong_backwards_hear_why(same, parts, said):
    refused(said, "3.5", same, parts)


# ---- stubs ----------------------------------------------------------------------------------------------------------


def hole(*answers):
    value = None
    return value


@pytest.mark.parametrize(
    "id, answers, said",
    [
        ("3.1", [None] * 7, "replace None in Y_0, Y_1"),
        ("3.2", (hole,), "replace None in hole"),
        ("3.3", (Stub, by_product), "replace None in Copy.backward"),
        ("3.3", (Copy, hole), "replace None in hole"),
        ("3.4", (dict.fromkeys("ABCD"), all_reduce), "replace None in faults"),
        ("3.4", (ch03.LAYERS, hole), "replace None in hole"),
        ("3.5", (hole, scatter), "replace None in hole"),
        ("3.5", (split, hole), "replace None in hole"),
    ],
)
def test_stubs_are_recognised(id, answers, said):
    refused(f"{id} is not filled in yet: {said}", id, *answers)
