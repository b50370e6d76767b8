"""Exercises 14.1 to 14.4: right answers in several styles pass, each wrong one hears what is wrong with it."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from checking import passes, refused

from tpcode.cost.communication import bubble_fraction, pp_microbatch, tp_layer
from tpcode.cost.layout import layout_of
from tpcode.cost.workload import Workload
from tpcode.grading import ch14

# ---- 14.1 -----------------------------------------------------------------------------------------------------------

COORDS = {"tp": 5, "dp": 0, "pp": 2}
LINKS = {"tp": "nvlink", "dp": "network", "pp": "network"}
RIGHT = (COORDS, [*range(32, 40)], [37, 45], 21, 53, LINKS)


def but(place: int, value) -> tuple:
    return (*RIGHT[:place], value, *RIGHT[place + 1 :])


@pytest.mark.parametrize(
    "answers",
    [
        RIGHT,
        (dict(reversed(COORDS.items())), range(32, 40), {45, 37}, 21.0, torch.tensor(53), LINKS),
        (COORDS, torch.arange(32, 40), (37, 45), 21, 53, {axis: name.upper() for axis, name in LINKS.items()}),
    ],
    ids=["lists", "sets", "tensors"],
)
def test_rank_37_passes(answers, capsys):
    passes(capsys, "14.1", *answers)


WRONG_GRIDS = [
    (but(0, {"tp": 5, "dp": 1, "pp": 0}), ch14.PP_BEFORE_DP),
    (but(0, {"tp": 4, "dp": 1, "pp": 1}), ch14.TP_LAST),
    (but(0, {"tp": 4, "dp": 1, "pp": 2}), ch14.TP_LAST),
    (but(0, {"tp": 6, "dp": 1, "pp": 3}), ch14.FROM_ONE),
    (but(0, {"tp": 5, "dp": 1, "pp": 2}), ch14.WRONG_SUM.format(rank=45)),
    (but(1, [5, 13, 21, 29, 37, 45, 53, 61]), ch14.SAME_SHARD),
    (but(1, [37, 45]), ch14.SAME_SHARD),
    (but(1, [32, 33, 34, 35, 36, 38, 39]), ch14.WITHOUT_ITSELF),
    (but(2, [36, 37]), ch14.DP_INSIDE),
    (but(2, [33, 37]), ch14.DP_INSIDE),
    (but(2, [*range(32, 40)]), ch14.DP_INSIDE),
    (but(2, [5, 13, 21, 29, 37, 45, 53, 61]), ch14.OTHER_STAGES),
    (but(2, [45]), ch14.WITHOUT_ITSELF),
    (but(3, 29), ch14.OTHER_PIPELINE.format(rank=29)),
    (but(3, 36), ch14.SAME_NODE.format(rank=36)),
    (but(3, 53), ch14.EXCHANGED),
    (but(4, 45), ch14.SAME_STAGE.format(rank=45)),
    (but(4, 38), ch14.SAME_NODE.format(rank=38)),
    (but(4, 21), ch14.EXCHANGED),
    (but(5, LINKS | {"dp": "nvlink"}), ch14.DP_OVER_NVLINK),
    (but(5, LINKS | {"tp": "network"}), ch14.TP_OVER_NETWORK),
    (but(5, LINKS | {"pp": "nvlink"}), ch14.PP_OVER_NVLINK),
    (but(5, LINKS | {"pp": "pcie"}), 'should be "nvlink" or "network"'),
    (but(5, LINKS | {"pp": None}), "replace None"),
    (but(0, [5, 0, 2]), 'a dict with the names "tp", "dp" and "pp"'),
    (but(0, COORDS | {"tp": "five"}), "a whole number"),
    (but(0, COORDS | {"tp": 4.5}), "a whole number"),
    (but(1, 37), "a list of ranks"),
]


@pytest.mark.parametrize("answers, said", WRONG_GRIDS)
def test_each_wrong_place_hears_why(answers, said):
    text = refused(said, "14.1", *answers)
    assert "[37, 45]" not in text.splitlines()[0] or answers[1] == [37, 45]  # what is right is not given away


# ---- 14.2 -----------------------------------------------------------------------------------------------------------


def bubble(p, m, v):
    return (p - 1) / (v * m)


def on(m_of=None, v_of=lambda v: v):
    m_of = m_of or (lambda gpus, tp, pp, batch, b: batch / (b * (gpus // (tp * pp))))
    return lambda gpus, tp, pp, batch, b, v: bubble(pp, m_of(gpus, tp, pp, batch, b), v_of(v))


def one_by_one(gpus, tp, pp, batch, b, v):
    replicas = layout_of(gpus, tp=tp, pp=pp).dp
    return torch.tensor(bubble_fraction(pp, batch // b // replicas, v), dtype=torch.float64)


@pytest.mark.parametrize(
    "answers",
    [
        (bubble, on()),
        (lambda p, m, v: Fraction(p - 1, m) / v, one_by_one),
        (lambda p, m, v: np.float64(p - 1) / m / v, on()),
    ],
    ids=["floats", "fractions", "numpy"],
)
def test_bubbles_pass(answers, capsys):
    passes(capsys, "14.2", *answers)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda p, m, v: (p - 1) / (v * m + p - 1), ch14.OF_THE_WHOLE),
        (lambda p, m, v: p / (v * m), ch14.P_WAITS),
        (lambda p, m, v: v * (p - 1) / m, ch14.INTERLEAVED_WRONG),
        (lambda p, m, v: (p - 1) / m, ch14.NO_CHUNKS),
        (lambda p, m, v: 0, "is not 0"),
        (lambda p, m, v: "little", "it should return one number"),
    ],
)
def test_each_wrong_bubble_hears_why(wrong, said):
    refused(said, "14.2", wrong, on())


@pytest.mark.parametrize(
    "wrong, said",
    [
        (on(lambda gpus, tp, pp, batch, b: batch / b), ch14.ALL_SEQUENCES),
        (on(lambda gpus, tp, pp, batch, b: batch), ch14.ALL_SEQUENCES),
        (on(lambda gpus, tp, pp, batch, b: batch / (gpus // (tp * pp))), ch14.B_IGNORED),
        (on(lambda gpus, tp, pp, batch, b: batch / (b * gpus)), ch14.WRONG_DP),
        (on(lambda gpus, tp, pp, batch, b: batch / (b * gpus / tp)), ch14.WRONG_DP),
        (on(v_of=lambda v: 1), ch14.NO_CHUNKS),
    ],
)
def test_each_wrong_count_of_microbatches_hears_why(wrong, said):
    refused(said, "14.2", bubble, wrong)


# ---- 14.3 -----------------------------------------------------------------------------------------------------------


def tp_units(layers, t):
    return layers * 8 * (t - 1) / t


def pp_units(layers, t, v, cut):
    return 2 * v / (t if cut else 1)


def by_the_books_cost(layers, t):
    config = ch14.gpt3()
    volume = layers * tp_layer(config, layout_of(t, tp=t), microbatch=1, sequence=2048)
    return Fraction(volume.wire_elements(), 2048 * config.hidden)


def pp_by_the_books_cost(layers, t, v, cut):
    config = ch14.gpt3()
    layout = layout_of(t * 8, tp=t, pp=8, sequence_parallel=cut)
    work = Workload(batch=8, sequence=2048, interleave=v, scatter_gather=False)
    return pp_microbatch(config, layout, work, stage=3).wire_elements() / (2048 * config.hidden)


@pytest.mark.parametrize(
    "answers",
    [
        (tp_units, pp_units, 42),
        (by_the_books_cost, pp_by_the_books_cost, torch.tensor(42.0)),
        (tp_units, pp_units, Fraction(84, 2)),
    ],
    ids=["formulas", "tpcode.cost", "a fraction"],
)
def test_volumes_pass(answers, capsys):
    passes(capsys, "14.3", *answers)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda layers, t: 4 * layers, ch14.PAYLOADS),
        (lambda layers, t: 4 * layers * (t - 1) / t, ch14.ONE_WAY),
        (lambda layers, t: 8 * layers, ch14.NO_RING),
        (lambda layers, t: 8 * (t - 1) / t, ch14.ONE_LAYER),
        (lambda layers, t: 2 * layers, ch14.TWO_A_LAYER),
    ],
)
def test_each_wrong_volume_of_tp_hears_why(wrong, said):
    refused(said, "14.3", wrong, pp_units, 42)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda layers, t, v, cut: 2 * layers, ch14.EVERY_LAYER),
        (lambda layers, t, v, cut: layers, ch14.EVERY_LAYER),
        (lambda layers, t, v, cut: 1, ch14.FORWARD_ONLY),
        (lambda layers, t, v, cut: 2 * (t - 1) / t, ch14.RING_IN_PP),
        (lambda layers, t, v, cut: 2, ch14.CHUNKS),
        (lambda layers, t, v, cut: 2 * v, ch14.NOT_CUT),
        (lambda layers, t, v, cut: 2 * v / t, ch14.CUT_ANYWAY),
    ],
)
def test_each_wrong_volume_of_pp_hears_why(wrong, said):
    refused(said, "14.3", tp_units, wrong, 42)


@pytest.mark.parametrize(
    "wrong, said", [(1 / 42, ch14.RATIO), (84, ch14.RATIO), (3.5, ch14.EVERY_LAYER), (41, "is not 41")]
)
def test_each_wrong_ratio_hears_why(wrong, said):
    refused(said, "14.3", tp_units, pp_units, wrong)


# ---- 14.4 -----------------------------------------------------------------------------------------------------------


def sizes(tp, pp, dp):
    return {"tp": tp, "pp": pp, "dp": dp}


BOARD = {64: sizes(8, 8, 1), 512: sizes(8, 8, 8), 1024: sizes(8, 8, 16)}


@pytest.mark.parametrize(
    "layouts",
    [BOARD, {64: sizes(4, 16, 1), 512: sizes(4, 8, 16), 1024: sizes(4, 16, 16)}, BOARD | {64: sizes(8.0, 4, 2)}],
    ids=["tp 8", "tp 4", "two replicas"],
)
def test_whiteboards_pass(layouts, capsys):
    passes(capsys, "14.4", layouts)


@pytest.mark.parametrize(
    "gpus, layout, said",
    [
        (64, sizes(8, 8, 8), "tp·pp·dp = 8·8·8 = 512, and there are 64 GPUs."),
        (64, sizes(64, 1, 1), "64"),
        (64, sizes(32, 2, 1), "Keep tp inside the node"),
        (64, sizes(8, 2, 4), "GiB at least"),
        (64, sizes(1, 64, 1), "pp = 64 stages do not hold 96 layers evenly"),
        (512, sizes(16, 4, 8), "Keep tp inside the node"),
        (512, sizes(8, 2, 32), "Cut the model in more parts"),
        (512, sizes(2, 32, 8), "A pipeline of 32 stages has 192 microbatches"),
        (512, sizes(1, 32, 16), "A pipeline of 32 stages has 96 microbatches"),
        (512, sizes(8, 32, 2), "Where the step's time goes: gemm"),
        (1024, sizes(8, 128, 1), "pp = 128 stages"),
        (1024, sizes(0, 8, 16), "at least one rank"),
    ],
)
def test_each_wrong_layout_hears_why(gpus, layout, said):
    text = refused(said, "14.4", BOARD | {gpus: layout})
    assert f"{gpus} GPUs" in text


def test_layouts_and_stubs():
    refused("a dict with the keys 64, 512 and 1024", "14.4", {64: sizes(8, 8, 1)})
    refused('a dict with the names "tp", "dp" and "pp"', "14.4", BOARD | {64: (8, 8, 1)})
    refused("14.4 is not filled in yet: replace None in layouts.", "14.4", BOARD | {64: sizes(8, 8, None)})


def test_a_hole_that_is_still_there_is_named():
    def bubble_on(gpus, tp, pp, batch, b, v):
        m = None
        return bubble(pp, m, v)

    refused("14.2 is not filled in yet: replace None in bubble_on.", "14.2", bubble, bubble_on)
    refused("14.2 is not filled in yet: replace ... in bubble.", "14.2", stub, bubble_on)


def stub(p, m, v): ...
