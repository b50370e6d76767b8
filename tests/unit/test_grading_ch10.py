"""Exercises 10.1 to 10.4: right answers in several styles pass, each wrong one hears what is wrong with it."""

import pytest
import torch
from checking import passes, refused
from torch.autograd.graph import saved_tensors_hooks

from tpcode.config import Layout
from tpcode.cost.memory import fits, kept_tensors, layer_bytes
from tpcode.dense import GPT2
from tpcode.grading import ch10, check
from tpcode.grading.ch10 import CASES, GB, SCORES, SEQUENCE, STREAM, model_22b, on_one_device
from tpcode.meter import saved_for_backward

# ---- 10.1 -----------------------------------------------------------------------------------------------------------


def test_thirty_four_is_what_a_layer_keeps():
    """The answers against the meter, not against the formula that the check knows."""
    config, b, s = ch10._block(), ch10.BLOCK["b"], ch10.BLOCK["s"]
    layer = GPT2(config, core="explicit", dtype=torch.bfloat16).part("blocks")[0]
    with saved_for_backward(layer) as meter:
        layer(torch.ones(b, s, config.hidden, dtype=torch.bfloat16, requires_grad=True))
    sbh, as2b = s * b * config.hidden, config.heads * s * s * b
    large = [tensor.nbytes for tensor in meter.saved if tensor.nbytes >= sbh]
    typed = [size * sbh for size in STREAM.values() if size] + [size * as2b for size in SCORES.values() if size]
    assert sorted(large) == sorted(typed)
    assert sum(STREAM.values()) == 34


@pytest.mark.parametrize("number", [int, float, torch.tensor], ids=["int", "float", "tensor"])
def test_thirty_four_passes(number, capsys):
    sbh, scores = ({name: number(size) for name, size in typed.items()} for typed in (STREAM, SCORES))
    passes(capsys, "10.1", dict(reversed(sbh.items())), scores)


WRONG_KEPT = [
    ({"O": 2}, ch10.OUTPUT.format(name="O")),
    ({"Y": 2}, ch10.OUTPUT.format(name="Y")),
    ({"X": 0}, ch10.STREAM_IS_KEPT.format(name="X")),
    ({"X2": 0}, ch10.STREAM_IS_KEPT.format(name="X2")),
    ({"N": 0}, ch10.PRODUCTS_INPUT.format(name="N")),
    ({"N2": 0}, ch10.PRODUCTS_INPUT.format(name="N2")),
    ({"M": 0}, ch10.PRODUCTS_INPUT.format(name="M")),
    ({"Z": 0}, ch10.PRODUCTS_INPUT.format(name="Z")),
    ({"Q": 0}, ch10.TWO_ACTIVATIONS),
    ({"K": 0}, ch10.TWO_ACTIVATIONS),
    ({"V": 0}, ch10.TWO_ACTIVATIONS),
    ({"H": 0}, ch10.GELU),
    ({"H": 2}, ch10.NARROW.format(name="H")),
    ({"Z": 2}, ch10.NARROW.format(name="Z")),
    ({"mask of O": 0}, ch10.NO_MASK),
    ({"mask of Y": 2}, ch10.MASK_IS_A_BYTE),
    ({"mask of P": 2}, ch10.MASK_IS_A_BYTE),
    ({"S": 2}, ch10.SCORES_ARE_NOT),
    ({"P": 0}, ch10.SOFTMAX),
    ({"P2": 0}, ch10.LEFT),
    ({"X": 8}, ch10.ONE_ENTRY.format(name="X")),
]


@pytest.mark.parametrize("slip, said", WRONG_KEPT, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_each_wrong_tensor_hears_why(slip, said):
    typed = {**STREAM, **SCORES, **slip}
    text = refused(said, "10.1", {name: typed[name] for name in STREAM}, {name: typed[name] for name in SCORES})
    assert "right" in text.splitlines()[0] and f"is {({**STREAM, **SCORES})[next(iter(slip))]}" not in text


def test_only_the_outputs_saved():
    """Results in place of inputs hear of the first of them, and so do results beside inputs."""
    outputs = {"O": 2, "Y": 2}
    refused(ch10.STREAM_IS_KEPT.format(name="X"), "10.1", STREAM | outputs | {"X": 0, "X2": 0}, SCORES)
    refused(ch10.OUTPUT.format(name="O"), "10.1", STREAM | outputs, SCORES)


def test_elements_and_four_bytes():
    def all_times(factor):
        masks = ch10.MASKS
        return [
            {name: size if name in masks else factor * size for name, size in typed.items()}
            for typed in (STREAM, SCORES)
        ]

    refused(ch10.ELEMENTS, "10.1", *all_times(0.5))
    refused(ch10.IN_FP32, "10.1", *all_times(2))


def test_names_and_stubs():
    refused("sbh should be a dict with the names X, N, Q", "10.1", {"X": 2}, SCORES)
    refused("scores should be a dict", "10.1", STREAM, [0, 2, 1, 2])
    refused("10.1 is not filled in yet: replace None in sbh.", "10.1", STREAM | {"H": None}, SCORES)


# ---- 10.2 -----------------------------------------------------------------------------------------------------------

RIGHT = 3 * 8 * (16 + 2 * 64) * 2


def metering(count=None, key=None, own=True, returns=True, sum_up=sum):
    """A `bytes_kept`, with one slip or none."""
    count = count or (lambda tensor: tensor.untyped_storage().nbytes())
    key = key or (lambda tensor, kept: tensor.untyped_storage().data_ptr())

    def bytes_kept(module, x):
        weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        kept = {}

        def pack(tensor):
            if not own or tensor.untyped_storage().data_ptr() not in weights:
                kept[key(tensor, kept)] = count(tensor)
            return tensor if returns else None

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        return sum_up(kept.values())

    return bytes_kept


def in_a_list(module, x):
    """Storages in a list, and each looked for."""
    own, kept = [weight.data_ptr() for weight in module.parameters()], []

    def pack(tensor):
        if tensor.data_ptr() not in own and all(tensor.data_ptr() != other.data_ptr() for other in kept):
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def by_the_books_meter(module, x):
    with saved_for_backward(module) as meter:
        module(x)
    return torch.tensor(meter.nbytes)


@pytest.mark.parametrize("bytes_kept", [metering(), in_a_list, by_the_books_meter])
@pytest.mark.parametrize("predicted", [RIGHT, float(RIGHT)])
def test_measured_to_the_byte_passes(predicted, bytes_kept, capsys):
    passes(capsys, "10.2", predicted, bytes_kept)


@pytest.mark.parametrize(
    "predicted, said",
    [
        (RIGHT + 2 * (16 * 64 + 64 * 10), ch10.WEIGHTS),
        (RIGHT + 2 * (16 * 64 + 64 * 10 + 64 + 10), ch10.WEIGHTS),
        (24 * (16 + 64) * 2, ch10.H_OR_Z),
        (24 * (16 + 64 + 10) * 2, ch10.H_OR_Z),
        (24 * 2 * 64 * 2, ch10.NO_X),
        (24 * (16 + 128 + 10) * 2, ch10.WITH_Y),
        (24 * (128 + 10) * 2, ch10.OUTPUTS),
        (RIGHT // 2, ch10.IN_ELEMENTS),
        (2 * RIGHT, ch10.IN_FOUR_BYTES),
        (RIGHT // 3, ch10.ONE_SEQUENCE.format(b=3)),
        (RIGHT // 24, ch10.ONE_TOKEN),
        (1, "predicted is not right"),
    ],
)
def test_wrong_predictions_hear_why(predicted, said):
    assert f"{RIGHT}" not in refused(said, "10.2", predicted, metering())


def test_no_two_wrong_predictions_are_alike():
    wrong = ch10._wrong_predictions()
    assert len(wrong) == 11 and RIGHT not in wrong


@pytest.mark.parametrize(
    "bytes_kept, said",
    [
        (metering(own=False), ch10.COUNTS_WEIGHTS),
        (metering(key=lambda tensor, kept: len(kept)), ch10.TWICE),
        (metering(count=lambda tensor: tensor.numel()), ch10.COUNTS_ELEMENTS),
        (metering(count=lambda tensor: 1), ch10.COUNTS_TENSORS),
        (metering(key=lambda tensor, kept: 0), ch10.LAST_ONLY),
        (metering(returns=False), ch10.PACK_RETURNS),
        (lambda module, x: 7, "bytes_kept of the FFN in torch.bfloat16 is 6,912, yours is 7."),
        (lambda module, x: None, "Is there a return?"),
        (lambda module, x: [1, 2], "it should return one number"),
    ],
)
def test_wrong_meters_hear_why(bytes_kept, said):
    refused(said, "10.2", RIGHT, bytes_kept)


# ---- 10.3 -----------------------------------------------------------------------------------------------------------

WHOLE = ("X", "N", "mask of O", "X2", "N2", "mask of Y")


def by_whole(kept, t):
    return {name: size if name in WHOLE else size // t for name, size in kept.items()}


def by_divided(kept, t):
    shares = dict(kept)
    for name in ("Q", "K", "V", "P", "mask of P", "P2", "M", "H", "Z"):
        shares[name] = kept[name] / t
    return shares


def by_factor(kept, t):
    factors = dict.fromkeys(WHOLE, 1.0)
    return {name: torch.tensor(size * factors.get(name, 1 / t)) for name, size in kept.items()}


@pytest.mark.parametrize("on_a_rank", [by_whole, by_divided, by_factor])
def test_ten_whole_passes(on_a_rank, capsys):
    check("10.3", on_a_rank)
    assert capsys.readouterr().out == (
        "10.3 right: 10 stay whole, 24 and the scores are divided; the meter says the same on 1, 2 and 4 ranks.\n"
    )


def dividing(*also):
    return lambda kept, t: by_whole(kept, t) | {name: kept[name] // t for name in also}


def leaving(*also):
    return lambda kept, t: by_whole(kept, t) | {name: kept[name] for name in also}


@pytest.mark.parametrize(
    "on_a_rank, said",
    [
        (lambda kept, t: {name: size // t for name, size in kept.items()}, f"at t = 2: {ch10.EVERYTHING}"),
        (lambda kept, t: dict(kept), f"at t = 2: {ch10.NOTHING}"),
        (dividing("X", "X2"), ch10.NORMS.format(name="X")),
        (dividing("X2"), ch10.NORMS.format(name="X2")),
        (dividing("N", "N2"), ch10.COLUMNS.format(name="N")),
        (dividing("N2"), ch10.COLUMNS.format(name="N2")),
        (dividing("mask of O", "mask of Y"), ch10.ROW_MASKS.format(name="mask of O")),
        (dividing("mask of Y"), ch10.ROW_MASKS.format(name="mask of Y")),
        (leaving("P", "mask of P", "P2"), ch10.HEADS.format(name="P")),
        (leaving("mask of P"), ch10.HEADS.format(name="mask of P")),
        (leaving("K", "V"), ch10.HEADS.format(name="K")),
        (leaving("M"), ch10.HEADS.format(name="M")),
        (leaving("H"), ch10.WIDTH.format(name="H")),
        (leaving("Z"), ch10.WIDTH.format(name="Z")),
        (lambda kept, t: by_whole(kept, t) | {"X": kept["X"] * t}, ch10.TIMES_T.format(name="X")),
        (lambda kept, t: by_whole(kept, t) | {"X": 3}, "X at t = 1: largest difference"),
        (lambda kept, t: {"X": 3}, "should return a dict with the names of kept"),
        (lambda kept, t: 10 + 24 / t, "should return a dict with the names of kept"),
        (lambda kept, t: None, "Is there a return?"),
    ],
)
def test_wrong_shares_hear_why(on_a_rank, said):
    refused(said, "10.3", on_a_rank)


def test_the_layer_of_the_exercise_is_thirty_four():
    kept, sizes = on_one_device(), ch10.BLOCK
    sbh = sizes["s"] * sizes["b"] * sizes["h"]
    assert sum(size for name, size in kept.items() if name in STREAM) == 34 * sbh
    assert sum(kept[name] for name in WHOLE) == 10 * sbh
    assert sum(kept.values()) == layer_bytes(ch10._block(), sizes["b"], sizes["s"])
    names = [tensor.name for tensor in kept_tensors(ch10._block(), sizes["b"], sizes["s"])]
    assert len(names) == len(ch10.KEPT_NAMES)


# ---- 10.4 -----------------------------------------------------------------------------------------------------------


def as_the_chapter(card_bytes, b):
    return ch10.chosen(card_bytes, b)


def by_the_planner(card_bytes, b):
    found = fits(model_22b(), card_bytes, b, SEQUENCE)
    return [found[0].layout.tp, found[0].recompute] if found else "nothing"


def without_the_layer_that_runs_again(card_bytes, b):
    return ch10.chosen(card_bytes, b, rebuilt=False)


@pytest.mark.parametrize("cheapest", [as_the_chapter, by_the_planner, without_the_layer_that_runs_again])
def test_the_cheapest_passes(cheapest, capsys):
    passes(capsys, "10.4", cheapest)


def test_no_case_hangs_on_what_the_estimate_leaves_out():
    """Three percent of a card between each plan and the limit, and the estimate on the same side."""
    for card, b in CASES:
        for t in ch10.SIZES_TO_TRY:
            for recompute in ("none", "selective", "full"):
                total = ch10._plan(t, recompute, b).total
                assert abs(total / (card * GB) - 1) > 0.03, (card, b, t, recompute)
                assert (total <= card * GB) == (ch10.estimate(t, recompute, b) <= card * GB)


@pytest.mark.parametrize("options, text", ch10.SLIPS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_each_slip_is_told(options, text):
    answers = dict(zip(CASES, ch10.slipped(**options)))
    full, selective = (ch10._plan(8, recompute, 4).extra_flops for recompute in ("full", "selective"))
    said = text.format(L=48, selective=selective, full=full)
    refused(said, "10.4", lambda card_bytes, b: answers[card_bytes // GB, b])


def test_no_two_slips_give_the_same_answers_and_none_the_right_ones():
    found = [tuple(map(str, ch10.slipped(**options))) for options, _ in ch10.SLIPS]
    right = tuple(map(str, ch10.slipped()))
    assert len({*found, right}) == len(ch10.SLIPS) + 1
    assert [text for _, text in ch10.SLIPS].count(ch10.FULL_FIRST) == 2


@pytest.mark.parametrize(
    "case, answer, said",
    [
        ((80, 4), (8, "none"), "It needs 108.4 GB: 44.3 of state and 64.1 of activations."),
        ((80, 4), (8, "full"), 'It fits, but t = 8 with recomputation "selective" fits as well'),
        ((80, 4), "nothing", ch10.SOMETHING),
        ((141, 1), (8, "none"), 'It fits, but t = 4 with recomputation "none" runs no more FLOPs again, and takes 4'),
        ((40, 1), (8, "full"), "Nothing fits here: at t = 8 the state alone takes 44.3 GB"),
        ((80, 4), (3, "none"), "with t among 1, 2, 4, 8"),
        ((80, 4), (8, "Full"), 'and "none", "selective" or "full"'),
        ((80, 4), "t = 8", "it should return a pair such as"),
        ((80, 4), None, "Is there a return?"),
    ],
)
def test_a_single_wrong_choice_hears_why(case, answer, said):
    right = {**dict(zip(CASES, ch10.slipped())), case: answer}
    refused(said, "10.4", lambda card_bytes, b: right[card_bytes // GB, b])


def test_a_rank_holds_what_the_formula_of_exercise_4_says():
    config = model_22b()
    for t in ch10.SIZES_TO_TRY:
        layer = layer_bytes(config, 4, SEQUENCE, Layout(tp=t))
        one = ch10.estimate(t, "none", 4, layers=1, each=0)
        assert layer == one
