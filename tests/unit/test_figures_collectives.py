"""Collectives and the ring: what ranks hold is computed here a second time, in plain Python."""

import re

import numpy as np
import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode import byhand
from tpcode.figures.collectives import after, before_after, kind_of, label, ring, ring_steps

HELD = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
SUM = [111, 222, 333]
OPS = {
    "all_reduce": [SUM, SUM, SUM],
    "all_gather": [[1, 2, 3, 10, 20, 30, 100, 200, 300]] * 3,
    "reduce_scatter": [[111], [222], [333]],
    "broadcast": [[1, 2, 3]] * 3,
}


def ring_of(t: int) -> list[list[int]]:
    """Distinct values: rank r's chunk c is (c + 1) · 10^r."""
    return [[(c + 1) * 10**r for c in range(t)] for r in range(t)]


PICTURES = {
    "all_reduce": lambda: before_after("all_reduce", HELD),
    "all_gather": lambda: before_after("all_gather", [[1, 2], [10, 20], [100, 200], [3, 4]]),
    "reduce_scatter": lambda: before_after("reduce_scatter", HELD),
    "broadcast": lambda: before_after("broadcast", HELD[:2]),
    "ring of 2": lambda: ring(ring_of(2)),
    "ring of 3": lambda: ring(ring_of(3)),
    "ring of 4": lambda: ring(ring_of(4)),
}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_nothing_of_this_machine(make):
    require_steady(make)


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_texts_lie_inside_and_apart(make):
    assert badly_placed(make()) == []


# ---- before and after -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_what_ranks_hold_after(op):
    assert [vector.tolist() for vector in after(op, HELD)] == OPS[op]


def test_the_two_that_byhand_has_agree_with_it():
    arrays = [np.array(vector) for vector in HELD]
    for op, other in (("all_reduce", byhand.all_reduce(arrays)), ("all_gather", byhand.all_gather(arrays, axis=0))):
        assert np.array_equal(after(op, HELD), other)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert np.array_equal(after("all_gather", after("reduce_scatter", HELD)), after("all_reduce", HELD))


def test_ranks_hold_arrays_of_their_own():
    got = after("broadcast", HELD)
    got[1][0] = -1
    assert got[0][0] == 1 and HELD[0][0] == 1


@pytest.mark.parametrize("op", [op for op in OPS if op != "all_gather"])
def test_every_value_is_in_a_tile(op):
    values = [int(text) for text in drawn(before_after(op, HELD)) if text.isdecimal()]
    assert values == [*sum(HELD, []), *sum(OPS[op], [])]


@pytest.mark.parametrize(
    ("op", "words", "plus"),
    [
        ("all_reduce", ["partial", "replicated"], 3),
        ("all_gather", ["sharded", "replicated"], 0),
        ("reduce_scatter", ["partial", "sharded"], 3),
        ("broadcast", ["replicated"], 0),
    ],
)
def test_placements_stand_in_words_and_sums_have_a_plus(op, words, plus):
    texts = drawn(before_after(op, [vector[:2] for vector in HELD[:2]] if op == "all_gather" else HELD))
    assert [text for text in texts if text in ("sharded", "replicated", "partial")] == words
    assert texts.count("+") == plus


def test_the_words_have_the_numbers():
    alt = before_after("reduce_scatter", HELD).alt
    assert "Before: rank 0 [1, 2, 3]; rank 1 [10, 20, 30]" in alt and "rank 2 [333]" in alt


# ---- the ring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [2, 3, 4])
def test_the_ring_sums_with_2_t_minus_1_messages_a_rank(t):
    steps = ring_steps(ring_of(t))
    assert steps[0].messages == () and len(steps) == 1 + 2 * (t - 1)
    sent = [message for step in steps for message in step.messages]
    for rank in range(t):
        assert sum(message.source == rank for message in sent) == 2 * (t - 1)
        assert sum(message.target == rank for message in sent) == 2 * (t - 1)
    assert sum(message.adds for message in sent) == t * (t - 1)
    sums = [sum(column) for column in zip(*ring_of(t))]
    assert all([held.value for held in chunks] == sums for chunks in steps[-1].held)


@pytest.mark.parametrize("t", [2, 3, 4])
def test_every_message_goes_to_the_next_rank_and_no_two_of_a_step_carry_one_chunk(t):
    for step in ring_steps(ring_of(t))[1:]:
        assert [message.source for message in step.messages] == list(range(t))
        assert all(message.target == (message.source + 1) % t for message in step.messages)
        assert len({message.chunk for message in step.messages}) == t


@pytest.mark.parametrize("t", [2, 3, 4])
def test_a_chunk_is_worth_the_summands_that_it_names(t):
    values = ring_of(t)
    for step in ring_steps(values):
        for chunks in step.held:
            for chunk, held in enumerate(chunks):
                assert len(set(held.ranks)) == len(held.ranks)  # nothing is added twice
                assert held.value == sum(values[rank][chunk] for rank in held.ranks)


@pytest.mark.parametrize("t", [2, 3, 4])
def test_half_way_every_rank_has_one_finished_chunk_and_at_the_end_all(t):
    steps = ring_steps(ring_of(t))
    for rank in range(t):
        kinds = [kind_of(chunk, rank, steps[t - 1]) for chunk in range(t)]
        assert kinds.count("sharded") == 1 and kinds.count("partial") == t - 1
        assert kinds.index("sharded") == (rank + 1) % t
        assert {kind_of(chunk, rank, steps[-1]) for chunk in range(t)} == {"replicated"}


def test_the_steps_are_drawn_with_parts_that_grow():
    texts = drawn(ring(HELD))
    tiles = [text for text in texts if re.fullmatch(r"\S+ = \d+", text)]
    expected = [label(c, held, 3) for step in ring_steps(HELD) for row in step.held for c, held in enumerate(row)]
    assert sorted(tiles) == sorted(expected) and len(tiles) == 5 * 9
    assert {"a0 = 1", "a0+a1 = 11", "b1+b2 = 220", "c0+c2 = 303", "Σa = 111"} <= set(tiles)
    assert "after step 2 of 4, reduce-scatter: arrivals are added" in texts
    assert "after step 3 of 4, all-gather: arrivals are kept" in texts


def test_the_ring_in_words():
    alt = ring(HELD).alt
    assert "every rank sends 4 messages" in alt and "every rank has the sums a 111, b 222, c 333" in alt
    assert "Step 1, rank 0 to 1 chunk a, 1 to 2 chunk b, 2 to 0 chunk c; what arrives is added" in alt


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: before_after("gather", HELD), "op must be one of all_reduce, .* and is 'gather'"),
        (lambda: before_after("all_reduce", [[1]] * 5), "2 to 4 ranks, and there are 5"),
        (lambda: before_after("all_reduce", [[1]]), "2 to 4 ranks, and there are 1"),
        (lambda: before_after("reduce_scatter", [[1, 2], [3, 4], [5, 6]]), "= 2 does not divide by t = 3"),
        (lambda: before_after("all_reduce", [[1, 2], [3]]), r"rank 0's shape is \[2\] and rank 1's is \[1\]"),
        (lambda: before_after("all_gather", HELD), "room for 8 values on a rank, and all_gather makes it 9"),
        (lambda: before_after("all_reduce", [[1.23456e-20], [1]]), "room for 9 characters, and '1.23456e−20' has 11"),
        (lambda: after("broadcast", []), "values has no ranks"),
        (lambda: ring([[1, 2, 3], [4, 5, 6]]), "a ring of 2 ranks has 2 chunks on each, and values has 3"),
        (lambda: ring([[10000] * 4] * 4), "room for 15 characters, and .* has 16"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_words_are_no_numbers():
    with pytest.raises(TypeError, match="rank 1 must hold numbers"):
        ring([[1, 2], ["a", "b"]])
