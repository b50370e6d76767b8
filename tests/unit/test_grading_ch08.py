"""Exercises 8.1 to 8.3: right answers in several styles pass, each wrong one hears what is wrong with it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checking import passes, refused
from torch import nn

from tpcode.comm import all_reduce, copy_to_tp, gather_from_tp, group_size, reduce_from_tp
from tpcode.grading import ch08
from tpcode.grading.ch08 import AttentionPart, FFNPart
from tpcode.layers import LayerNorm, ParallelAttention, ParallelFFN

# ---- 8.1 ------------------------------------------------------------------------------------------------------------

LARGE, SMALL = 2 * 5 * 16 * 4, 2 * 5 * 4  # bytes of [b, s, h] and of [b, s]
RIGHT = {
    "forward_large": 5,
    "forward_small": 3,
    "backward_large": 5,
    "backward_small": 0,
    "recompute_large": 4,
    "payload_bytes": 10 * LARGE + 3 * SMALL,
    "wire_bytes": (10 * LARGE + 3 * SMALL) * 3 // 2,
}


@pytest.mark.parametrize("wire", [9780, 9780.0, torch.tensor(9780), 6520 * 2 * (1 - 1 / 4)])
def test_a_step_on_paper_passes(wire, capsys):
    passes(capsys, "8.1", **RIGHT | {"wire_bytes": wire})


WRONG_STEPS = [
    ({"forward_large": 4}, ch08.EMBEDDING),
    ({"forward_large": 2}, "A layer is two blocks"),
    ({"forward_large": 3}, ch08.ONLY_BOTH_ENDS),
    ({"forward_large": 10}, ch08.BOTH_TOGETHER),
    ({"forward_large": 8}, ch08.BOTH_TOGETHER),
    ({"forward_small": 0}, ch08.NO_LOSS),
    ({"forward_small": 2}, ch08.TWO_SUMS),
    ({"backward_large": 4}, ch08.HEAD),
    ({"backward_large": 2}, "A layer is two blocks"),
    ({"backward_large": 3}, ch08.ONLY_BOTH_ENDS),
    ({"backward_large": 6}, ch08.BOTH_ENDS),
    ({"backward_small": 3}, ch08.LOSS_IS_SILENT),
    ({"backward_small": 2}, ch08.LOSS_IS_SILENT),
    ({"backward_small": 1}, ch08.LOSS_IS_SILENT),
    ({"recompute_large": 5}, ch08.NOT_THE_END),
    ({"recompute_large": 2}, ch08.AGAIN_ONE),
    ({"recompute_large": 12}, ch08.AGAIN_ALL),
    ({"recompute_large": 14}, ch08.AGAIN_ALL),
    ({"payload_bytes": 1630}, ch08.ELEMENTS),
    ({"payload_bytes": 10 * LARGE}, ch08.NO_SMALL),
    ({"payload_bytes": 13 * LARGE}, ch08.SMALL_AS_LARGE),
    ({"payload_bytes": 8 * LARGE}, ch08.LAYERS_BYTES),
    ({"payload_bytes": 8 * LARGE + 3 * SMALL}, ch08.LARGE_4L),
    ({"payload_bytes": 9780}, ch08.WIRE_AS_PAYLOAD),
    ({"payload_bytes": 13040}, ch08.OTHER_DTYPE),
    ({"wire_bytes": 6520}, ch08.PAYLOAD_AS_WIRE),
    ({"wire_bytes": 13040}, ch08.DOUBLED),
    ({"wire_bytes": 4890}, ch08.ONE_PASS),
    ({"wire_bytes": 39120}, ch08.ALL_RANKS),
    ({"wire_bytes": 19560}, ch08.OTHER_DTYPE),
]


@pytest.mark.parametrize("wrong, said", WRONG_STEPS)
def test_wrong_numbers_of_a_step_hear_why(wrong, said):
    message = refused(said, "8.1", **RIGHT | wrong)
    (name, value) = next(iter(wrong.items()))
    assert message.startswith(f"8.1 not yet right: {name}") and value != RIGHT[name]
    assert f" {RIGHT[name]}" not in message.split("\n")[0]  # nothing is given away


def test_what_is_wrong_has_a_value_of_its_own_for_each_number():
    for name in RIGHT:
        values = [wrong[name] for wrong, _ in WRONG_STEPS if name in wrong]
        assert len(set(values)) == len(values)


def test_a_number_left_out_is_named():
    assert "recompute_large" in refused("replace None", "8.1", **RIGHT | {"recompute_large": None})


# ---- 8.2 ------------------------------------------------------------------------------------------------------------


class OfParts(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.norm_1, self.norm_2 = dense.ln_1, dense.ln_2
        self.attention, self.ffn = AttentionPart(dense.attn), FFNPart(dense.mlp)

    def forward(self, x):
        for norm, part in ((self.norm_1, self.attention), (self.norm_2, self.ffn)):
            x = x + reduce_from_tp(part(copy_to_tp(norm(x)))) + part.bias
        return x


class OfThePackage(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.norm_1, self.norm_2 = LayerNorm.from_dense(dense.ln_1), LayerNorm.from_dense(dense.ln_2)
        self.attention, self.ffn = ParallelAttention.from_dense(dense.attn), ParallelFFN.from_dense(dense.mlp)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dist.all_reduce(dy)
        return dy


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


class WithItsOwnPair(OfParts):
    """With torch's own collectives, which the ledger does not see."""

    def forward(self, x):
        a = Sum.apply(self.attention(Identity.apply(self.norm_1(x))))
        x = (x + self.attention.bias) + a
        m = Sum.apply(self.ffn(Identity.apply(self.norm_2(x))))
        return m + x + self.ffn.bias


class BiasOnRankZero(OfParts):
    """x/t and bias/t go into the sum: unusual, and their gradients are wrong."""

    def forward(self, x):
        for norm, part in ((self.norm_1, self.attention), (self.norm_2, self.ffn)):
            x = x + reduce_from_tp(part(copy_to_tp(norm(x))) + part.bias / group_size())
        return x


@pytest.mark.parametrize("MyLayer", [OfParts, OfThePackage, WithItsOwnPair])
def test_layers_pass(MyLayer, capsys):
    passes(capsys, "8.2", MyLayer)


def written(fault):
    class MyLayer(OfParts):
        def forward(self, x):
            return ch08.WRONG_LAYERS[fault](x, self.norm_1, self.attention, self.norm_2, self.ffn)

    return MyLayer


@pytest.mark.parametrize("fault", ch08.WRONG_LAYERS)
def test_each_wrong_layer_hears_its_own_text(fault):
    """Each of them is told from all the others, by the first value that is wrong."""
    refused(fault, "8.2", written(fault))


class MeanAfterEach(OfParts):
    """A collective for the layer: right, and one too many."""

    def forward(self, x):
        y = super().forward(x)
        return y + (all_reduce(y.detach()) / group_size() - y.detach())


class Gathers(OfParts):
    def forward(self, x):
        y = super().forward(x)
        wide = gather_from_tp(y.chunk(group_size(), -1)[dist.get_rank()])
        return y + (wide - y).detach()


class Detached(OfParts):
    def forward(self, x):
        return super().forward(x).detach()


class FrozenPart(OfParts):
    def __init__(self, dense):
        super().__init__(dense)
        self.ffn.column.requires_grad_(False)


class NoNames(OfParts):
    def __init__(self, dense):
        super().__init__(dense)
        self.first, self.second = self.norm_1, self.norm_2
        del self.norm_1, self.norm_2


class ReturnsNothing(OfParts):
    def forward(self, x):
        super().forward(x)


@pytest.mark.parametrize(
    "MyLayer, said",
    [
        (MeanAfterEach, ch08.TOO_MANY),
        (Gathers, ch08.TOO_MANY),
        (BiasOnRankZero, ch08.NOT_TRAINED),
        (FrozenPart, ch08.NOT_TRAINED),
        (Detached, "the output has no gradient"),
        (NoNames, "call its norms norm_1 and norm_2"),
        (ReturnsNothing, "the output should be a tensor"),
    ],
)
def test_other_wrong_layers_hear_why(MyLayer, said):
    refused(said, "8.2", MyLayer)


def test_a_stub_is_named():
    class MyLayer(nn.Module):
        def __init__(self, dense):
            super().__init__()

        def forward(self, x): ...

    assert "is not filled in yet" in refused("replace ... in MyLayer", "8.2", MyLayer)


# ---- 8.3 ------------------------------------------------------------------------------------------------------------


def both(part, x):
    return reduce_from_tp(part(copy_to_tp(x))) + part.bias


def own_pair(part, x):
    return torch.add(part.bias, Sum.apply(part(Identity.apply(x))))


@pytest.mark.parametrize("mended", [both, own_pair])
def test_the_fault_named_and_mended_passes(mended, capsys):
    passes(capsys, "8.3", 1, "ffn", "f", mended)


@pytest.mark.parametrize(
    "answers, said",
    [
        ((0, "ffn", "f"), ch08.BELOW),
        ((2, "ffn", "f"), ch08.ABOVE),
        ((1, "attention", "f"), ch08.SPOILT),
        ((1, "ffn", "g"), ch08.WOULD_SHOW),
        ((3, "ffn", "f"), "it should be 0, 1 or 2"),
        ((1, "norm", "f"), "it should be 'attention' or 'ffn'"),
        ((1, "ffn", "h"), "it should be 'f' or 'g'"),
    ],
)
def test_another_place_hears_what_speaks_against_it(answers, said):
    refused(said, "8.3", *answers, both)


@pytest.mark.parametrize(
    "mended, said",
    [
        (ch08._without_f, ch08.NOT_MENDED),
        (ch08._without_g, ch08.SUM_LOST),
        (lambda part, x: reduce_from_tp(part(copy_to_tp(x)) + part.bias), ch08.BIAS_IN_SUM),
        (lambda part, x: reduce_from_tp(part(copy_to_tp(x))), ch08.NO_BIAS),
        (lambda part, x: both(part, copy_to_tp(x)), "It is 2 times the right value"),
        (lambda part, x: both(part, x) + 0 * all_reduce(x.detach()), ch08.TOO_MANY),
        (lambda part, x: None, "Is there a return?"),
    ],
)
def test_wrong_blocks_hear_why(mended, said):
    refused(said, "8.3", 1, "ffn", "f", mended)


def test_both_runs_begin_alike_fall_and_do_not_end_alike():
    """What the exercise says, and why the curve is no proof."""
    right, wrong = ch08.two_runs().values()
    assert right[0] == pytest.approx(wrong[0], abs=1e-12)
    assert max(abs(a - b) for a, b in zip(right, wrong, strict=True)) > 1e-3
    for losses in (right, wrong):
        assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_the_table_turns_wrong_just_below_the_fault(capsys):
    table = ch08.gradient_table()
    places = list(table)
    first = places.index("layer 1, norm_2")
    assert places[first - 1] == "layer 1, ffn"
    assert all(all(table[place]) for place in places[:first])
    assert not any(any(table[place]) for place in places[first:])
    ch08.show_gradients()
    assert "layer 1, norm_2    wrong on ranks 0, 1, 2, 3" in capsys.readouterr().out


def test_every_text_is_heard_by_somebody():
    """A sentence that no wrong answer can hear is of no use."""
    here = Path(__file__).read_text(encoding="utf-8")
    of_layers = {id(value) for value in ch08.WRONG_LAYERS}
    for name, value in vars(ch08).items():
        if name.isupper() and isinstance(value, str) and name not in ("STEP",):
            with_block = "{block}" in value or "{end}" in value
            assert f"ch08.{name}" in here or id(value) in of_layers or with_block, name
