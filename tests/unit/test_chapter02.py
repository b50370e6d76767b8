"""Chapter 2's worked integers tell each collective from the others, and its ring is the one that the picture draws."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from notebook_reading import cells_of, defined_by

from tpcode.comm import Event
from tpcode.figures.collectives import after, ring_steps

CELLS = cells_of(2)


@pytest.fixture(scope="module")
def by_hand() -> dict:
    return defined_by(CELLS, "by-hand")


def test_what_is_typed_by_hand_is_what_the_pictures_compute(by_hand):
    held = by_hand["held"]
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        assert np.array_equal(by_hand["by_hand"][op], after(op, held)), op
    assert np.array_equal(by_hand["by_hand"]["broadcast"], [held[1]] * 3)


def test_each_wrong_answer_differs_from_the_right_one(by_hand):
    """Those that exercise 2.1 lists, on the page's numbers."""
    held, right = by_hand["held"], by_hand["by_hand"]
    t, total = len(held), sum(held)
    pieces = np.split(total, t)
    wrong = {
        "all_reduce": [held, [held[0]] * t, [total / t] * t, [np.max(held, axis=0)] * t, [t * total] * t],
        "reduce_scatter": [[total] * t, [pieces[0]] * t, pieces[::-1], [h[[r]] for r, h in enumerate(held)]],
        "all_gather": [[total] * t, held, [np.concatenate([*held[r:], *held[:r]]) for r in range(t)]],
        "broadcast": [held, [held[0]] * t, [total] * t],
    }
    for op, variants in wrong.items():
        assert all(differs(variant, right[op]) for variant in variants), op


def differs(one, other) -> bool:
    return [list(vector) for vector in one] != [list(vector) for vector in other]


def test_no_number_stands_twice(by_hand):
    """Neither among what the ranks hold, nor among the sums."""
    numbers = [*np.concatenate(by_hand["held"]), *sum(by_hand["held"])]
    assert len(set(numbers)) == len(numbers) == 12


def test_the_ring_by_hand_is_the_reduce_scatter_of_the_ring_that_is_drawn():
    names = defined_by(CELLS, "reduce-scatter-ring")
    t = names["t"]
    half_way = ring_steps([[1, 2, 3], [10, 20, 30], [100, 200, 300]])[t - 1]
    assert names["held"] == [[chunk.value for chunk in chunks] for chunks in half_way.held]


def test_e16_the_two_is_reduce_scatter_and_all_gather():
    for t in (2, 3, 4, 8):
        payload, *halves = (
            Event(op, "forward", tuple(range(t)), torch.float32, (t, 6)).wire_bytes
            for op in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert payload == sum(halves) and halves[0] == halves[1]


@pytest.mark.parametrize("t, payloads", [(2, Fraction(1)), (4, Fraction(3, 2)), (8, Fraction(7, 4))])
def test_e19_r8_wire_grows_with_t_and_the_payload_does_not(t, payloads):
    event = Event("all_reduce", "forward", tuple(range(t)), torch.float32, (1, 4, 16))
    assert event.payload_bytes == 256 and event.wire_bytes == 256 * payloads
    sent = [message for step in ring_steps(np.ones((t, t))) for message in step.messages if message.source == 0]
    assert Fraction(len(sent), t) == payloads  # the ring, message by message, says the same as the ledger


def test_no_stored_output_depends_on_the_machine():
    """Errors are shown without the lines that hold a path; no cell is excused from comparison."""
    for name, cell in CELLS.items():
        assert "nbval-ignore-output" not in cell["metadata"].get("tags", []), name
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
        assert " at line " not in printed and "e-1" not in printed.replace("< 1e-1", ""), name
