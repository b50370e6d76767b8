"""Curves stand where the losses are, each in its own look, and say in words how far apart they are."""

import math
import re

import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode.figures import loss_curves

FALLING = [4.0 / (1 + step / 9) + 1 for step in range(41)]
PICTURES = {
    "three alike": lambda: loss_curves({f"t = {t}": FALLING for t in (1, 2, 4)}),
    "two": lambda: loss_curves({"right": FALLING, "wrong": [loss + 0.3 for loss in FALLING]}),
    "three long names": lambda: loss_curves({f"{t} ranks, replicas left unsummed": FALLING for t in (1, 2, 4)}),
    "flat and short": lambda: loss_curves({"one run with a long name": [2.0, 2.0]}),
    "high": lambda: loss_curves({"run": [120.5, 3.0, 0.25]}, unit="bits"),
}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_texts_apart(make):
    require_steady(make)
    assert badly_placed(make()) == []


def paths(picture) -> list[list[tuple[float, float]]]:
    """The polylines with more than two points, in the order of drawing."""
    found = re.findall(r'<path d="(M [^"]*)"', picture.svg)
    points = [[tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", path)] for path in found]
    return [polyline for polyline in points if len(polyline) > 3]


def test_a_curve_goes_through_its_losses():
    """Equal steps to the right; twice as far up for twice the loss. A curve drawn from other numbers fails."""
    polyline = paths(loss_curves({"run": [5.0, 3.0, 2.0, 1.0]}))[-1]
    xs, ys = zip(*polyline)
    assert [b - a for a, b in zip(xs, xs[1:])] == pytest.approx([xs[1] - xs[0]] * 3, abs=1e-4)
    assert [(b - a) / (ys[1] - ys[0]) for a, b in zip(ys, ys[1:])] == pytest.approx([1, 0.5, 0.5], abs=1e-4)
    assert ys[0] < ys[-1]  # a smaller loss is further down


def test_two_runs_are_told_apart_without_colour():
    svg = PICTURES["two"]().svg
    widths = re.findall(r"stroke-width: (\S+?);? ", svg)
    assert "7" in widths and "1.2" in widths
    assert len(set(re.findall(r"#[0-9a-f]{6}", svg))) == 1


def test_words_say_where_the_runs_end_and_how_far_apart_they_are():
    assert "t = 4: 5.00 in step 0, 1.73 in step 40" in PICTURES["three alike"]().alt
    assert "largest distance from the first curve is 0.00" in PICTURES["three alike"]().alt
    assert "largest distance from the first curve is 0.30" in PICTURES["two"]().alt
    assert drawn(PICTURES["two"]())[-2:] == ["right", "wrong"]


def test_the_last_digits_of_a_machine_do_not_move_it():
    shaken = [loss + 1e-9 * (-1) ** step for step, loss in enumerate(FALLING)]
    assert loss_curves({"run": FALLING}).svg == loss_curves({"run": shaken}).svg


@pytest.mark.parametrize(
    "curves, said",
    [
        ({}, "1 to 3 runs, and there are 0"),
        ({str(n): [1, 2] for n in range(4)}, "1 to 3 runs, and there are 4"),
        ({"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]}, "'b': 3"),
        ({"a": [1.0]}, "at least 2: {'a': 1}"),
        ({"a": [1.0, math.nan]}, "a: the loss of step 1 is nan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(curves, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        loss_curves(curves)


def test_the_distance_in_words_is_that_of_the_losses_and_not_of_what_is_drawn():
    """1.004 and 1.446 are drawn as 1.00 and 1.45, and are 0.44 apart."""
    picture = loss_curves({"right": [2.0, 1.004], "wrong": [2.0, 1.446]})
    assert "The largest distance from the first curve is 0.44." in picture.alt
