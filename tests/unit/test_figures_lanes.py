"""Lanes say what the ledgers say; the FFN's placements are those of its arrays, computed by hand."""

import re

import numpy as np
import pytest
import torch
from svg_reading import badly_placed, drawn, require_steady

from tpcode import byhand
from tpcode.comm.ledger import Event, Ledger
from tpcode.figures.lanes import FFN_BACKWARD, FFN_FORWARD, FFN_PASSAGES, ffn_placements, in_words, ranks_as_lanes


def event(op="all_reduce", phase="forward", shape=(2, 3, 4), t=2, dtype=torch.float64) -> Event:
    return Event(op, phase, tuple(range(t)), dtype, shape)


BOTH = [event(), event(phase="backward", shape=(2, 3, 5), dtype=torch.float32)]
MANY = [event("all_gather", shape=(4096, 4096), t=4), *[event("reduce_scatter", "backward", t=4)] * 4]

PICTURES = {
    "both ways": lambda: ranks_as_lanes([Ledger(BOTH)] * 2, ("Z_{r}, Y_{r}", "dY, dZ_{r}", "")),
    "no words": lambda: ranks_as_lanes([BOTH] * 2),
    "several staves": lambda: ranks_as_lanes([MANY] * 4, ["work with words"] * 6),
    "silent": lambda: ranks_as_lanes([Ledger()] * 2, ["Y_{r}"]),
    "eight ranks": lambda: ranks_as_lanes([[event(t=8)]] * 8),
    "FFN": ffn_placements,
}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_nothing_of_this_machine(make):
    require_steady(make)


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_texts_lie_inside_and_apart(make):
    assert badly_placed(make()) == []


# ---- lanes ----------------------------------------------------------------------------------------------------------


def bars(picture) -> list[float]:
    """The left edges of the red bars, in the order of drawing."""
    return [float(x) for x in re.findall(r'<path d="M (\S+) [^"]*"[^>]*fill: #d1242f', picture.svg)]


def test_every_event_is_a_bar_and_a_line_of_words_in_order():
    picture = ranks_as_lanes([Ledger(BOTH)] * 2)
    texts = drawn(picture)
    assert len(bars(picture)) == 2 and bars(picture) == sorted(bars(picture))
    assert texts[-4:] == [
        "1",
        "all-reduce, forward, [2, 3, 4], 192 bytes of payload",
        "2",
        "all-reduce, backward, [2, 3, 5], 120 bytes of payload",
    ]
    assert picture.alt.index("[2, 3, 4], 192 bytes") < picture.alt.index("[2, 3, 5], 120 bytes")


def test_words_of_an_event_are_those_of_the_ledger():
    assert in_words(MANY[0]) == f"all-gather, forward, [4096, 4096], {4096 * 4096 * 8:,} bytes of payload"


def test_each_rank_has_a_lane_and_its_own_words():
    texts = drawn(ranks_as_lanes([Ledger(BOTH)] * 2, ("Y_{r}", "", "dX_{r}")))
    assert [text for text in texts if text[-1] in "₀₁"] == ["Y₀", "Y₁", "dX₀", "dX₁"]
    assert [text for text in texts if text.startswith("rank")] == ["rank 0", "rank 1"]


def test_what_does_not_fit_goes_on_below():
    picture = PICTURES["several staves"]()
    texts = drawn(picture)
    assert texts.count("work with words") == 6 * 4  # nothing is lost
    assert len(bars(picture)) == 5
    assert texts.count("rank 0") == 3


def test_a_silent_pass_says_so():
    picture = PICTURES["silent"]()
    assert drawn(picture)[-1] == "no collectives" and "#d1242f" not in picture.svg


@pytest.mark.parametrize(
    ("ledgers", "work", "message"),
    [
        ([BOTH], (), "2 to 8 ranks, and there are 1"),
        ([BOTH, BOTH[:1]], (), "rank 0 called 2 collectives and rank 1 called 1"),
        ([BOTH, [BOTH[0], event()]], (), r"collective 2 differs: .*backward, \[2, 3, 5\].* rank 1 .*\[2, 3, 4\]"),
        ([BOTH] * 3, (), r"collective 1 is of the ranks \(0, 1\), and there are 3 lanes"),
        ([BOTH] * 2, ("one", "two"), "2 collectives leave 3 gaps for work, and there are 2"),
        ([BOTH] * 2, ("x" * 49, "", ""), "room for 48 characters, and .* has 49"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_numbers(ledgers, work, message):
    with pytest.raises(ValueError, match=message):
        ranks_as_lanes(ledgers, work)


# ---- the FFN --------------------------------------------------------------------------------------------------------

T, SIZES = 2, {"b": 2, "s": 3, "h": 4, "F": 6, "F/t": 3}


def ffn_by_hand() -> tuple[list, list]:
    """(what ranks hold, the whole) for each state, forward and backward, in the order of the picture."""
    generator = np.random.default_rng(0)
    X, A, B, dY = (generator.normal(size=size) for size in ((6, 4), (4, 6), (6, 4), (6, 4)))
    Y, H, Z = byhand.ffn_forward(X, A, B, byhand.gelu)
    dX = byhand.ffn_backward(dY, X, A, B, H, Z, byhand.gelu)[0]
    As, Bs = byhand.split_columns(A, T), byhand.split_rows(B, T)
    Hs = byhand.column_forward([X] * T, As)
    Zs = list(map(byhand.gelu, Hs))
    Ys = [Z_r @ B_r for Z_r, B_r in zip(Zs, Bs)]
    dZs = byhand.row_backward([dY] * T, Zs, Bs)[0]
    dXs = [(dZ_r * byhand.d_gelu(H_r)) @ A_r.T for dZ_r, H_r, A_r in zip(dZs, Hs, As)]
    forward = [([X] * T, X), ([X] * T, X), (Zs, Z), (Ys, Y), (byhand.all_reduce(Ys), Y)]
    backward = [(byhand.all_reduce(dXs), dX), (dXs, dX), (dZs, dY @ B.T), ([dY] * T, dY), ([dY] * T, dY)]
    return forward, backward


def placement_of(held: list, whole) -> str:
    """Read off the arrays."""
    fits = {
        "replicated": all(part.shape == whole.shape and np.allclose(part, whole) for part in held),
        "sharded": held[0].shape != whole.shape and np.allclose(np.concatenate(held, axis=-1), whole),
        "partial": held[0].shape == whole.shape and np.allclose(sum(held), whole),
    }
    return " and ".join(name for name, fit in fits.items() if fit)


@pytest.mark.parametrize("way", [0, 1], ids=["forward", "backward"])
def test_placements_and_shapes_are_those_of_the_arrays(way):
    states = (FFN_FORWARD, FFN_BACKWARD)[way]
    arrays = ffn_by_hand()[way]
    assert len(states) == len(arrays) == len(FFN_PASSAGES) + 1
    for state, (held, whole) in zip(states, arrays):
        assert state.placement == placement_of(held, whole), state.name
        for sizes, array in ((state.whole, whole), (state.local, held[0])):
            b, s, last = (SIZES[letter] for letter in sizes)
            assert array.shape == (b * s, last), state.name


def test_a_collective_stands_where_parts_become_a_whole():
    for row, passage in enumerate(FFN_PASSAGES):
        forward = FFN_FORWARD[row].placement == "partial" and FFN_FORWARD[row + 1].placement == "replicated"
        backward = FFN_BACKWARD[row + 1].placement == "partial" and FFN_BACKWARD[row].placement == "replicated"
        assert passage.collective == ("forward" if forward else "backward" if backward else "")
        assert ("all-reduce" in passage.forward, "all-reduce" in passage.backward) == (forward, backward)
    assert [passage.forward[:10] for passage in FFN_PASSAGES if "(" in passage.forward[:8]] == [
        "copy (f): ",
        "reduce (g)",
    ]


def test_the_ffn_is_drawn_with_labels_words_and_two_red_arrows():
    picture = ffn_placements()
    texts = drawn(picture)
    for state in (*FFN_FORWARD, *FFN_BACKWARD):
        assert f"{state.name}  [{', '.join(state.local)}]" in texts
    assert sum(text.startswith("partial: ") for text in texts) == 2
    assert sum(text.startswith("sharded: a piece of [b, s, F]") for text in texts) == 2
    assert len(re.findall("stroke: #d1242f", picture.svg)) == 2 * 2  # a shaft and a head each
    assert "Forward: X [b, s, h] replicated; copy (f): identity, so X [b, s, h] replicated; " in picture.alt
    assert picture.alt.endswith("copy (f): all-reduce, so dX [b, s, h] replicated.")
