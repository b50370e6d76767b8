"""Exercises 12.1 to 12.4: right answers in several styles pass, each wrong one hears what is wrong with it."""

import numpy as np
import pytest
import torch
from checking import passes, refused

from tpcode.config import Layout, ModelConfig
from tpcode.cost.communication import AlphaBeta, compute_bound_tp, fit_alpha_beta, tp_layer
from tpcode.cost.hardware import CARDS, card
from tpcode.grading import ch12, check
from tpcode.grading.ch12 import BSH, CASES, LINKS, SHEETS, largest, recorded, sizes_of_t

# ---- 12.1 -----------------------------------------------------------------------------------------------------------

RIGHT = {"payload": 2 * BSH, "payloads": 8 * BSH, "wire": 14 * BSH, "payload_of_one_sequence": BSH // 2}


def test_the_four_numbers_are_the_models():
    layer = tp_layer(ModelConfig.preset("gpt3-175b"), Layout(tp=8), microbatch=4, sequence=2048)
    assert layer.payload_bytes() == RIGHT["payloads"] == 4 * RIGHT["payload"]
    assert layer.wire_bytes() == RIGHT["wire"] == 1_409_286_144


@pytest.mark.parametrize(
    "answers",
    [
        list(RIGHT.values()),
        [201.3e6, 805e6, 1.409e9, 50.3e6],
        [torch.tensor(2.0 * BSH), np.int64(8 * BSH), float(14 * BSH), BSH / 2],
    ],
    ids=["exact", "rounded", "tensors and arrays"],
)
def test_bytes_of_a_layer_pass(answers, capsys):
    passes(capsys, "12.1", *answers)


@pytest.mark.parametrize(
    "name, wrong, said",
    [
        ("payload", BSH, ch12.IN_ELEMENTS.format(name="payload")),
        ("payload", 4 * BSH, ch12.TWICE),
        ("payload", BSH / 2, ch12.ONE_SEQUENCE.format(name="payload")),
        ("payload", 3.5 * BSH, ch12.ALREADY_WIRE.format(name="payload")),
        ("payload", 201.3, ch12.IN_MB.format(name="payload")),
        ("payload", 192, ch12.IN_MIB.format(name="payload")),
        ("payload", 192e6, ch12.IN_MIB.format(name="payload")),
        ("payloads", 201.3e6, ch12.EITHER),
        ("payloads", 4 * BSH, ch12.HALF_OF_IT),
        ("payloads", 12 * BSH, ch12.RECOMPUTED),
        ("payloads", 14 * BSH, ch12.ALREADY_WIRE.format(name="payloads")),
        ("wire", 7 * BSH, ch12.ONE_TRIP),
        ("wire", 16 * BSH, ch12.WHOLE_ROUNDS),
        ("wire", 3.5 * BSH, ch12.ONE_ALL_REDUCE),
        ("wire", 8 * BSH, ch12.AS_PAYLOAD),
        ("wire", 8 * 14 * BSH, ch12.ALL_RANKS),
        ("wire", 1.409, ch12.IN_MB.format(name="wire")),
        ("payload_of_one_sequence", BSH / 4, ch12.IN_ELEMENTS.format(name="payload_of_one_sequence")),
        ("payload_of_one_sequence", 2 * BSH, ch12.STILL_FOUR),
        ("wire", 7, "wire is not right."),
        ("wire", "all", "wire should be one number"),
        ("payloads", None, "is not filled in yet: replace None in payloads."),
    ],
)
def test_wrong_bytes_hear_why(name, wrong, said):
    message = refused(said, "12.1", *{**RIGHT, name: wrong}.values())
    assert str(RIGHT[name]) not in message


# ---- 12.2 -----------------------------------------------------------------------------------------------------------


def by_slope(short, short_s, long, long_s):
    speed = (long - short) / (long_s - short_s)
    return short_s - short / speed, speed


def by_a_matrix(*measured):
    (n1, s1), (n2, s2) = measured[:2], measured[2:]
    alpha, beta = np.linalg.solve([[1, n1], [1, n2]], [s1, s2])
    return np.array([alpha, 1 / beta])


def by_the_fit(short, short_s, long, long_s):
    found = fit_alpha_beta([(short, short_s), (long, long_s)])
    return [found.alpha_seconds, found.bytes_per_second]


def added(payload, alpha, speed):
    return alpha + payload / speed


def by_the_model(payload, alpha, speed):
    return torch.tensor(AlphaBeta(alpha, speed).seconds(payload), dtype=torch.float64)


@pytest.mark.parametrize("link", [by_slope, by_a_matrix, by_the_fit])
@pytest.mark.parametrize("predicted", [added, by_the_model])
def test_alpha_and_speed_pass(link, predicted, capsys):
    passes(capsys, "12.2", link, predicted)


def in_microseconds(*measured):
    alpha, speed = by_slope(*measured)
    return 1e6 * alpha, speed


@pytest.mark.parametrize(
    "link, said",
    [
        (lambda *m: by_slope(*m)[::-1], ch12.SWAPPED),
        (lambda *m: (by_slope(*m)[0], 1 / by_slope(*m)[1]), ch12.SECONDS_A_BYTE),
        (lambda n, s, m, u: (0, m / u), ch12.BANDWIDTH_IS_ALL),
        (lambda n, s, m, u: (s, m / u), ch12.BANDWIDTH_IS_ALL),
        (lambda n, s, m, u: (0, n / s), ch12.SHORT_IS_ALL),
        (lambda n, s, m, u: (s, m / (u - s)), ch12.BYTES_OF_THE_LONG),
        (lambda *m: (0, by_slope(*m)[1]), ch12.NO_ALPHA),
        (lambda *m: (m[1], by_slope(*m)[1]), ch12.ALL_OF_SHORT),
        (in_microseconds, ch12.MICROSECONDS),
        (lambda *m: (-by_slope(*m)[0], by_slope(*m)[1]), ch12.SUBTRACTED),
        (lambda *m: 3.0, "should return two numbers"),
        (lambda *m: (1, 2, 3), "should return two numbers"),
        (lambda *m: None, "Is there a return?"),
        (lambda *m: (7.0, by_slope(*m)[1]), "α is 7 s; this link has"),
        (lambda *m: (7.0, 5.0), "The speed is 5 bytes a second; this link has"),
    ],
)
def test_wrong_links_hear_why(link, said):
    refused(said, "12.2", link, added)


@pytest.mark.parametrize(
    "predicted, said",
    [
        (lambda payload, alpha, speed: payload / speed, ch12.PREDICTED_WITHOUT),
        (lambda payload, alpha, speed: alpha + payload * speed, ch12.MULTIPLIED),
        (lambda payload, alpha, speed: payload / speed - alpha, ch12.ALPHA_TIMES),
        (lambda payload, alpha, speed: 5.0, "yours is 5"),
        (lambda payload, alpha, speed: None, "Is there a return?"),
    ],
)
def test_wrong_predictions_hear_why(predicted, said):
    refused(said, "12.2", by_slope, predicted)


def test_the_record_is_what_the_text_says():
    """The best turns explain the third message; the short one alone is far out, so bandwidth is not all."""
    short, third, long = recorded()
    best = {size: min(turns) for size, turns in recorded().items()}
    predicted = added(third, *by_slope(short, best[short], long, best[long]))
    assert min(recorded()[third]) < predicted < max(recorded()[third])
    assert third / short * best[short] > max(recorded()[third])
    assert all(turns == sorted(turns) for turns in recorded().values())
    assert len({alpha for alpha, *_ in LINKS}) == len(LINKS)


# ---- 12.3 -----------------------------------------------------------------------------------------------------------

PAIRS = [(ModelConfig.preset(model), card(gpu)) for model, gpu in CASES]


def upwards(config, here):
    outside = min(here.nvlink_bytes_per_second, here.gpus_per_node * here.network_bytes_per_second)
    best = 1
    for t in sizes_of_t(config, here):
        speed = here.nvlink_bytes_per_second if t <= here.gpus_per_node else outside
        if t < config.ffn * speed / here.flops_per_second:
            best = t
    return best


def by_the_package(config, here):
    def limit(t):
        return compute_bound_tp(
            config.ffn, here, ranks_per_node=None if t <= here.gpus_per_node else here.gpus_per_node
        )

    return max([1, *filter(lambda t: t < limit(t), sizes_of_t(config, here))])


def downwards_by_times(config, here):
    for t in reversed(sizes_of_t(config, here)):
        sending = 4 * config.hidden / here.ring_bytes_per_second(t)
        if 4 * config.hidden * config.ffn / t / here.flops_per_second > sending:
            return torch.tensor(t)
    return 1.0


@pytest.mark.parametrize("largest_t", [upwards, by_the_package, downwards_by_times])
def test_the_largest_t_passes(largest_t, capsys):
    passes(capsys, "12.3", largest_t)


def test_the_answers_lie_on_both_sides_of_a_node():
    found = [largest(config, here) for config, here in PAIRS]
    assert found == [24, 16, 32, 16, 4, 16, 1]
    sides = {(t > here.gpus_per_node) - (t < here.gpus_per_node) for t, (_, here) in zip(found, PAIRS)}
    assert sides == {-1, 0, 1}


@pytest.mark.parametrize("slip, said", ch12.SLIPS)
def test_each_slip_is_told(slip, said):
    refused(said, "12.3", slip)


def test_no_two_slips_of_other_texts_give_the_same_answers_and_none_the_right_ones():
    by_answers = {}
    for slip, text in ch12.SLIPS:
        answers = tuple(slip(config, here) for config, here in PAIRS)
        assert by_answers.setdefault(answers, text) == text
    assert tuple(upwards(config, here) for config, here in PAIRS) not in by_answers
    assert set(by_answers.values()) == {text for _, text in ch12.SLIPS}


@pytest.mark.parametrize(
    "largest_t, said",
    [
        (lambda config, here: config.ffn * here.nvlink_bytes_per_second / here.flops_per_second, "not the limit"),
        (lambda config, here: 1, "gpt3-175b on a100 is 24, yours is 1."),
        (lambda config, here: None, "Is there a return?"),
        (lambda config, here: [1, 2], "it should return one number"),
    ],
)
def test_other_wrong_sizes_hear_why(largest_t, said):
    refused(said, "12.3", largest_t)


# ---- 12.4 -----------------------------------------------------------------------------------------------------------


def by_bytes(payload, nvlink, adapters, gigabits, gpus):
    return payload / (nvlink * 1e9 / 2), payload / (adapters * gigabits * 1e9 / 8 / gpus)


def by_bits(payload, nvlink, adapters, gigabits, gpus):
    share = adapters / gpus
    return [8 * payload / (nvlink * 4e9), torch.tensor(8 * payload / (gigabits * share * 1e9), dtype=torch.float64)]


def network_times(factor):
    """The right times, the network's multiplied."""

    def seconds_over(payload, *sheet):
        nvlink, network = by_bytes(payload, *sheet)
        return nvlink, network * (factor(*sheet) if callable(factor) else factor)

    return seconds_over


@pytest.mark.parametrize("seconds_over", [by_bytes, by_bits])
def test_data_sheets_pass(seconds_over, capsys):
    check("12.4", seconds_over)
    assert "24, 12 and 9 times as long" in capsys.readouterr().out


def test_the_sheets_are_the_cards():
    for sheet, gpu in zip(SHEETS, ("v100", "a100", "h100"), strict=True):
        nvlink, network = by_bytes(1e9, *sheet)
        assert nvlink == pytest.approx(1e9 / CARDS[gpu].nvlink_bytes_per_second)
        assert network == pytest.approx(1e9 / CARDS[gpu].network_bytes_per_second)


@pytest.mark.parametrize(
    "seconds_over, said",
    [
        (lambda *given: by_bytes(*given)[::-1], ch12.OTHER_ORDER),
        (lambda *given: (by_bytes(*given)[0] / 2, by_bytes(*given)[1]), ch12.BOTH_WAYS),
        (lambda *given: tuple(one / 2 for one in by_bytes(*given)), ch12.BOTH_WAYS),
        (network_times(1 / 8), ch12.BITS),
        (network_times(lambda nvlink, adapters, gigabits, gpus: 1 / gpus), ch12.A_WHOLE_NODE),
        (network_times(lambda nvlink, adapters, gigabits, gpus: 1 / gpus / 8), ch12.BITS_AND_NODE),
        (network_times(lambda nvlink, adapters, gigabits, gpus: adapters / gpus), ch12.AN_ADAPTER_EACH),
        (network_times(2), ch12.HALVED_TOO),
        (lambda *given: tuple(1e9 * one for one in by_bytes(*given)), ch12.GIGA),
        (network_times(1e3), ch12.GIGA),
        (network_times(3), "Over the network, by the sheet (300, 8, 100, 16), it is"),
        (lambda *given: 1.0, "should return two times"),
        (lambda *given: None, "Is there a return?"),
    ],
)
def test_misread_sheets_hear_why(seconds_over, said):
    refused(said, "12.4", seconds_over)
