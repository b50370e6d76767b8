"""Chapter 12, what communication costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isclose

from tpcode.config import Layout, ModelConfig
from tpcode.cost.communication import tp_layer
from tpcode.cost.hardware import Card, card
from tpcode.grading.failures import Wrong
from tpcode.grading.numbers import called, number, require_number
from tpcode.grading.registry import exercise
from tpcode.shapes import head_groups

# ---- 12.1 -----------------------------------------------------------------------------------------------------------

B, S, H, T = 4, 2048, 12_288, 8
BSH = B * S * H
NEAR = 1e-3  # 201.3 MB will do

IN_MB = "{name} looks like a number of MB or GB. Type bytes: 1 MB is 10⁶."
IN_MIB = "{name} looks like MiB, 2²⁰ bytes each, taken for MB. Type bytes."
IN_ELEMENTS = "{name} is a number of elements. A 16-bit float has two bytes."
TWICE = (
    "payload is twice too large. A payload is the tensor, once, with two bytes a number: how many all-reduces there "
    "are, and what a ring makes of one, comes later."
)
ONE_SEQUENCE = "{name} is of one sequence. There are 4 of them in this microbatch."
ALREADY_WIRE = "{name} is what a rank sends. The payload is the tensor itself, whatever a ring makes of it."
EITHER = (
    "payloads is a single payload. In 2·4·2048·12288 the 2 is bytes, or it is a count, and cannot be both: with the "
    "bytes in it, it is one all-reduce."
)
HALF_OF_IT = (
    "payloads is half of it. Either the bytes are missing, or one direction is: a layer makes two all-reduces forward "
    "and two backward, and each number has two bytes."
)
RECOMPUTED = "payloads counts six all-reduces. That is with recomputation, and here there is none."
ONE_TRIP = (
    "wire is half of it. Either the bytes are missing, or the ring goes around once: an all-reduce is a reduce-scatter "
    "and an all-gather, each of (t-1)/t of the payload."
)
WHOLE_ROUNDS = "wire has two whole payloads for each all-reduce. A rank never sends its own finished piece: (t-1)/t."
ONE_ALL_REDUCE = "wire is of one all-reduce. The layer makes four."
AS_PAYLOAD = "wire is the payloads once more. On a ring of 8 a rank sends 2·7/8 times the payload."
ALL_RANKS = "wire is what all 8 ranks send together. Asked for is one of them."
STILL_FOUR = "payload_of_one_sequence is still of four sequences."

_ANSWERS = {
    "payload": 2 * BSH,
    "payloads": 8 * BSH,
    "wire": 14 * BSH,
    "payload_of_one_sequence": BSH // 2,
}
_SLIPS = {
    "payload": {
        BSH: IN_ELEMENTS,
        4 * BSH: TWICE,
        BSH // 2: ONE_SEQUENCE,
        14 * BSH // 4: ALREADY_WIRE,
    },
    "payloads": {2 * BSH: EITHER, 4 * BSH: HALF_OF_IT, 12 * BSH: RECOMPUTED, 14 * BSH: ALREADY_WIRE},
    "wire": {
        7 * BSH: ONE_TRIP,
        16 * BSH: WHOLE_ROUNDS,
        14 * BSH // 4: ONE_ALL_REDUCE,
        8 * BSH: AS_PAYLOAD,
        8 * 14 * BSH: ALL_RANKS,
    },
    "payload_of_one_sequence": {BSH // 4: IN_ELEMENTS, 2 * BSH: STILL_FOUR},
}


@exercise("12.1")
def bytes_of_a_layer(payload, payloads, wire, payload_of_one_sequence) -> str:
    """Four numbers of bytes, to a thousandth."""
    typed = {
        "payload": payload,
        "payloads": payloads,
        "wire": wire,
        "payload_of_one_sequence": payload_of_one_sequence,
    }
    for name, value in typed.items():
        _require_bytes(name, value)
    layer = tp_layer(ModelConfig.preset("gpt3-175b"), Layout(tp=T), microbatch=B, sequence=S)
    return f"a payload is 201.3 MB, four are 805 MB, and {float(layer.wire_bytes()) / 1e9:.3f} GB are on a rank's wire."


def _require_bytes(name: str, value) -> None:
    got, right = _plain_number(name, value), _ANSWERS[name]
    if _near(got, right):
        return
    for wrong, text in _SLIPS[name].items():
        if _near(got, wrong):
            raise Wrong(text.format(name=name))
    for factor in (1e6, 1e9):
        if _near(got * factor, right):
            raise Wrong(IN_MB.format(name=name))
    if any(_near(got * unit, right) for unit in (2**20, 2**30, 2**20 / 1e6, 2**30 / 1e9)):
        raise Wrong(IN_MIB.format(name=name))
    raise Wrong(f"{name} is not right.")


def _plain_number(name: str, value) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Wrong(f"{name} should be one number; it is {value!r:.60}.") from None


def _near(got: float, right: float) -> bool:
    return isclose(got, right, rel_tol=NEAR)


# ---- 12.2 -----------------------------------------------------------------------------------------------------------

# Microseconds of an all-reduce over 2 ranks, by bytes, 30 turns each: gloo on loopback, torch 2.13.0, two cores that
# had other work.
_RECORDED = {
    16_384: (
        "405 616 624 788 1030 1080 1463 1859 2639 3444 3506 3923 4028 4106 4772 5400 5563 6435 "
        "7008 7186 7528 10092 10828 11160 12664 13571 14397 16363 17041 22510"
    ),
    1_048_576: (
        "1706 1988 2045 2409 3092 3867 4213 4463 5191 5366 5373 5510 5829 5836 6205 6659 6747 6896 "
        "7139 7764 9528 9543 11239 11512 12007 12590 14674 19365 22585 23488"
    ),
    4_194_304: (
        "14312 15443 16650 16902 17099 17369 17375 17419 17950 19429 19755 19905 20046 20129 20373 20389 20633 21907 "
        "21928 21935 22937 23948 24899 27222 27648 30051 30991 36524 41389 49002"
    ),
}
# alpha in seconds, bytes a second, bytes of a short message and of a long one
LINKS = ((50e-6, 2e9, 100_000, 10_000_000), (8e-6, 150e9, 1_000_000, 64_000_000), (0.003, 1e6, 500, 4000))

TWO_NUMBERS = "alpha_and_speed should return two numbers, α and the speed; it returned {got!r:.60}."
SWAPPED = "These are the speed and α. Return α first."
SECONDS_A_BYTE = "The second number is seconds a byte. The speed is bytes a second: turn it over."
BANDWIDTH_IS_ALL = (
    "The speed is the long message's bytes over its seconds. But α is in those seconds: with two messages, what the "
    "extra bytes take tells you the speed."
)
SHORT_IS_ALL = (
    "The speed is the short message's bytes over its seconds. Most of those seconds are α; only the extra bytes of the "
    "long one tell you the speed."
)
BYTES_OF_THE_LONG = (
    "The speed is all of the long message's bytes over the extra seconds. In the extra seconds only the extra bytes "
    "went."
)
NO_ALPHA = "α is 0. Bandwidth is not all: the short message takes longer than its bytes explain."
ALL_OF_SHORT = "α is all of the short message's time. A part of it is its bytes'; take that off."
MICROSECONDS = "α is in microseconds, or milliseconds. Return seconds."
SUBTRACTED = "α has the wrong sign, it seems: it is what is left of the time when the bytes' time is taken off."
PREDICTED_WITHOUT = "α is missing: every message has it, this one too."
MULTIPLIED = "The payload is multiplied by the speed. Bytes over bytes a second are seconds."
ALPHA_TIMES = "That is the time of the bytes less α. Both take time: add them."


def recorded() -> dict[int, list[float]]:
    """By a message's bytes, the seconds of each turn, shortest first."""
    return {size: [float(one) / 1e6 for one in turns.split()] for size, turns in _RECORDED.items()}


@exercise("12.2")
def two_messages_and_a_third(alpha_and_speed: Callable, predicted_seconds: Callable) -> str:
    """Both on links that are known, then the record."""
    for alpha, speed, short, long in LINKS:
        times = {size: alpha + size / speed for size in (short, long)}
        _require_link(alpha_and_speed, short, times[short], long, times[long], alpha, speed)
        payload = (short + long) // 3
        bytes_take = payload / speed
        wrong = {
            bytes_take: PREDICTED_WITHOUT,
            alpha + payload * speed: MULTIPLIED,
            payload * speed: MULTIPLIED,
            bytes_take - alpha: ALPHA_TIMES,
        }
        require_number("predicted_seconds", predicted_seconds, (payload, alpha, speed), alpha + bytes_take, "", wrong)
    record = recorded()
    short, third, long = record
    found = alpha_and_speed(short, min(record[short]), long, min(record[long]))
    predicted = number("predicted_seconds", predicted_seconds, (third, *found))
    least, most = min(record[third]), max(record[third])
    if not least <= predicted <= most:
        raise Wrong(
            f"{third:,} bytes took {least:.4f} to {most:.4f} s in the record, and you predict {predicted:.4f} s."
        )
    return (
        f"on links that are known; and of the record's third message you predict {1e3 * predicted:.1f} ms, "
        f"which took {1e3 * least:.1f} to {1e3 * most:.1f} ms."
    )


def _require_link(
    function: Callable, short: int, short_s: float, long: int, long_s: float, alpha: float, speed: float
) -> None:
    got_alpha, got_speed = _pair("alpha_and_speed", function, (short, short_s, long, long_s), TWO_NUMBERS)
    if not isclose(got_speed, speed, rel_tol=1e-6):
        if isclose(got_speed, alpha, rel_tol=1e-6) and isclose(got_alpha, speed, rel_tol=1e-6):
            raise Wrong(SWAPPED)
        slips = {
            1 / speed: SECONDS_A_BYTE,
            long / long_s: BANDWIDTH_IS_ALL,
            short / short_s: SHORT_IS_ALL,
            long / (long_s - short_s): BYTES_OF_THE_LONG,
        }
        _tell(got_speed, slips)
        raise Wrong(f"The speed is {got_speed:.6g} bytes a second; this link has {speed:.6g} and α {alpha:g} s.")
    if not isclose(got_alpha, alpha, rel_tol=1e-6):
        if got_alpha == 0:
            raise Wrong(NO_ALPHA)
        milli = {1e3 * alpha: MICROSECONDS, 1e6 * alpha: MICROSECONDS}
        _tell(got_alpha, {short_s: ALL_OF_SHORT, -alpha: SUBTRACTED, **milli})
        raise Wrong(f"α is {got_alpha:.6g} s; this link has {alpha:g} s and {speed:.6g} bytes a second.")


def _pair(name: str, function: Callable, args: Sequence, text: str) -> tuple[float, float]:
    """function(*args) as two numbers; `text` says what it should return."""
    got = called(name, function, tuple(args))
    try:
        first, second = (float(one) for one in got)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(text.format(got=got)) from None
    return first, second


def _tell(got: float, slips: Mapping[float, str]) -> None:
    """Raise Wrong with the text of the slip that gives this number, if one does."""
    for wrong, text in slips.items():
        if isclose(got, wrong, rel_tol=1e-6):
            raise Wrong(text)


# ---- 12.3 -----------------------------------------------------------------------------------------------------------

CASES = (
    ("gpt3-175b", "a100"),
    ("gpt3-175b", "h100"),
    ("gpt3-175b", "v100"),
    ("llama-3-8b", "v100"),
    ("llama-3-8b", "h100"),
    ("llama-3-405b", "h100"),
    ("smollm2-135m", "h100"),
)

AT_THE_NODE = (
    "Your t never goes beyond a node. The rule knows no node; W gets smaller there, and a wide model is still "
    "compute-bound. And W does not fall to one GPU's adapter: all GPUs of the node take part, so the ring has all of "
    "their adapters."
)
FILL_THE_NODE = "You fill the node. Whether that is still compute-bound depends on F: for a narrow model it is not."
BOTH_DIRECTIONS = "Your W is twice too large: it counts both directions, and the numbers of a card are for one."
NVLINK_OUTSIDE = (
    "You have NVLink's speed for groups that are larger than a node. There the ring goes through the node's adapters."
)
ADAPTERS_INSIDE = "You have the network's speed inside the node too. As long as t fits the node, W is NVLink's."
HIDDEN = "That is with h, the features that go in. They cancel; what stays is the FFN's width F."
NO_BOUND = "These are the largest sizes there are, with no look at F W / C."
TOO_EXACT = (
    "That is by `t - 1 < F W / C`, which has the ring's (t-1)/t in it and is right too. The rule is a little stricter: "
    "`t < F W / C`."
)
THE_BOUND = "{got:g} is not among sizes_of_t. Asked for is the largest of those that is below F W / C, not the limit."


def sizes_of_t(config: ModelConfig, here: Card) -> list[int]:
    """The t over which this model's heads split and that fill nodes of this card evenly."""
    return [t for t in range(1, config.heads + 1) if _splits(config, t) and _fills_nodes(here, t)]


def _splits(config: ModelConfig, t: int) -> bool:
    try:
        head_groups(config.heads, config.kv_heads, t)
    except ValueError:
        return False
    return config.ffn % t == 0


def _fills_nodes(here: Card, t: int) -> bool:
    return t <= here.gpus_per_node or t % here.gpus_per_node == 0


def _nvlink(here: Card) -> float:
    return here.nvlink_bytes_per_second


def _all_adapters(here: Card) -> float:
    return min(here.nvlink_bytes_per_second, here.gpus_per_node * here.network_bytes_per_second)


def largest(
    config: ModelConfig,
    here: Card,
    *,
    inside: Callable[[Card], float] = _nvlink,
    outside: Callable[[Card], float] = _all_adapters,
    width: str = "ffn",
    beyond_a_node: bool = True,
    exact: bool = False,
) -> int:
    """The answer of 12.3, or, by its options, with a slip."""

    def allowed(t: int) -> bool:
        fits = t <= here.gpus_per_node
        limit = getattr(config, width) * (inside if fits else outside)(here) / here.flops_per_second
        return t == 1 or (t - exact < limit and (fits or beyond_a_node))

    return max(t for t in sizes_of_t(config, here) if allowed(t))


def _largest_in_a_node(config: ModelConfig, here: Card) -> int:
    return max(t for t in sizes_of_t(config, here) if t <= here.gpus_per_node)


def _largest_of_all(config: ModelConfig, here: Card) -> int:
    return max(sizes_of_t(config, here))


def _twice(speed: Callable[[Card], float]) -> Callable[[Card], float]:
    return lambda here: 2 * speed(here)


# A slip: its answer, and what to say.
SLIPS: tuple[tuple[Callable[[ModelConfig, Card], int], str], ...] = (
    (partial(largest, beyond_a_node=False), AT_THE_NODE),
    (_largest_in_a_node, FILL_THE_NODE),
    (partial(largest, inside=_twice(_nvlink)), BOTH_DIRECTIONS),
    (partial(largest, inside=_twice(_nvlink), outside=_twice(_all_adapters)), BOTH_DIRECTIONS),
    (partial(largest, outside=_nvlink), NVLINK_OUTSIDE),
    (partial(largest, outside=lambda here: here.network_bytes_per_second), AT_THE_NODE),
    (partial(largest, inside=_all_adapters), ADAPTERS_INSIDE),
    (partial(largest, width="hidden"), HIDDEN),
    (partial(largest, exact=True), TOO_EXACT),
    (_largest_of_all, NO_BOUND),
)


@exercise("12.3")
def largest_compute_bound_t(largest_t: Callable) -> str:
    """A function of a model and a card."""
    pairs = [(ModelConfig.preset(model), card(gpu)) for model, gpu in CASES]
    got = [_answer(largest_t, config, here) for config, here in pairs]
    right = [largest(config, here) for config, here in pairs]
    if got != right:
        for slip, text in SLIPS:
            if got == [slip(config, here) for config, here in pairs]:
                raise Wrong(text)
        wrong = next(i for i, (mine, theirs) in enumerate(zip(got, right)) if mine != theirs)
        (model, gpu), (config, here), t = CASES[wrong], pairs[wrong], got[wrong]
        if t not in sizes_of_t(config, here):
            raise Wrong(THE_BOUND.format(got=t))
        raise Wrong(f"{model} on {gpu} is {right[wrong]}, yours is {t:g}.")
    return "; ".join(f"{model} on {gpu} {t}" for (model, gpu), t in zip(CASES, right)) + "."


def _answer(largest_t: Callable, config: ModelConfig, here: Card) -> float:
    return number("largest_t", largest_t, (config, here))


# ---- 12.4 -----------------------------------------------------------------------------------------------------------

PAYLOAD = 201_326_592
# NVLink's GB/s in both directions, adapters of a node, Gb/s of each, GPUs of a node: DGX-2H, DGX A100, DGX H100
SHEETS = ((300, 8, 100, 16), (600, 8, 200, 8), (900, 8, 400, 8))

TWO_TIMES = "seconds_over should return two times, over NVLink and over the network; it returned {got!r:.60}."
OTHER_ORDER = "These are the network's time and NVLink's. Return NVLink's first."
BOTH_WAYS = (
    "NVLink's time is half of what it is. The sheet counts both directions together, and the payload goes in one."
)
BITS = "The network's time is as if an adapter had gigabytes where it has gigabits: 8 bits are a byte."
A_WHOLE_NODE = (
    "The network's time is that of a GPU with all adapters of its node to itself. It shares them with the others."
)
BITS_AND_NODE = "The network's time has two faults: gigabits taken for gigabytes, and a node's adapters for one GPU."
AN_ADAPTER_EACH = (
    "The network's time gives each GPU an adapter of its own. On the first sheet there are 8 adapters for 16 GPUs."
)
HALVED_TOO = (
    "The network's speed is halved. An adapter's Gb/s are for each direction already; only NVLink's are for both."
)
GIGA = "That is off by 10⁹, or by 10³: GB are 10⁹ bytes, and the answer is in seconds."

# A slip: its times over the right ones, sheet by sheet, and what to say. The first sheet has more GPUs than adapters,
# so that a bit taken for a byte and a node taken for a GPU differ.
NVLINK_SLIPS = (([0.5] * 3, BOTH_WAYS), *(([power] * 3, GIGA) for power in (1e3, 1e6, 1e9)))
NETWORK_SLIPS = (
    ([1 / 8] * 3, BITS),
    ([1 / gpus for *_, gpus in SHEETS], A_WHOLE_NODE),
    ([1 / gpus / 8 for *_, gpus in SHEETS], BITS_AND_NODE),
    ([adapters / gpus for _, adapters, _, gpus in SHEETS], AN_ADAPTER_EACH),
    ([2] * 3, HALVED_TOO),
    *(([power] * 3, GIGA) for power in (1e3, 1e6, 1e9)),
)


@exercise("12.4")
def two_data_sheets(seconds_over: Callable) -> str:
    """A function of a payload and four numbers of a data sheet."""
    got = [_pair("seconds_over", seconds_over, (PAYLOAD, *sheet), TWO_TIMES) for sheet in SHEETS]
    nvlink, network = zip(*got)
    right_nvlink = [PAYLOAD / (both * 1e9 / 2) for both, *_ in SHEETS]
    right_network = [_network_seconds(*sheet) for sheet in SHEETS]
    if _all_close(nvlink, right_network) and _all_close(network, right_nvlink):
        raise Wrong(OTHER_ORDER)
    _require_times("NVLink", nvlink, right_nvlink, NVLINK_SLIPS)
    _require_times("the network", network, right_network, NETWORK_SLIPS)
    times = [slow / fast for fast, slow in zip(right_nvlink, right_network)]
    return f"the network takes {times[0]:g}, {times[1]:g} and {times[2]:g} times as long: DGX-2H, A100, H100."


def _network_seconds(both: float, adapters: int, gigabits: float, gpus: int) -> float:
    return PAYLOAD / (adapters * gigabits * 1e9 / 8 / gpus)


def _require_times(
    link: str, got: Sequence[float], right: Sequence[float], slips: Sequence[tuple[Sequence[float], str]]
) -> None:
    """Raise Wrong unless all are right, with the text of the slip that has these ratios to what is right."""
    ratios = [mine / theirs for mine, theirs in zip(got, right)]
    for wrong, text in slips:
        if _all_close(ratios, wrong):
            raise Wrong(text)
    for sheet, mine, theirs in zip(SHEETS, got, right):
        if not isclose(mine, theirs, rel_tol=1e-6):
            raise Wrong(f"Over {link}, by the sheet {sheet}, it is {theirs:.6g} s, yours is {mine:.6g} s.")


def _all_close(got: Sequence[float], want: Sequence[float]) -> bool:
    return all(isclose(mine, right, rel_tol=1e-6) for mine, right in zip(got, want, strict=True))
