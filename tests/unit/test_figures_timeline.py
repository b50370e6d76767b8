"""Timelines draw the spans that they are given, on one scale, and say them in words."""

import re

import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode.comm.timeline import Span
from tpcode.figures.style import INK, RED
from tpcode.figures.timeline import _step, timelines

PLAIN = [
    Span("product", "XA", 5.0, 5.002),
    Span("collective", "all_reduce", 5.002, 5.004, number=1),
    Span("wait", "all_reduce", 5.002, 5.004, number=1),
]
HIDDEN = [
    Span("product", "XA", 5.0, 5.002),
    Span("collective", "all_reduce", 5.001, 5.0025, number=1),
    Span("wait", "all_reduce", 5.002, 5.0025, number=1),
]
PICTURES = {
    "one": lambda: timelines({"plain": PLAIN}),
    "two": lambda: timelines({"plain": PLAIN, "hidden": HIDDEN}, ["dX"]),
    "short": lambda: timelines({"plain": [Span("product", "a long name", 0, 3e-7)]}),
    "long": lambda: timelines({"plain": [Span("product", "a long name", 0, 217.0)]}),
}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_and_texts_apart(make):
    require_steady(make)
    assert badly_placed(make()) == []


def boxes(picture, look: str) -> list[tuple[float, float]]:
    """Left and right edges of the rectangles of a look, in the order of drawing."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*{look}', picture.svg)
    edges = [[float(x) for x, _ in re.findall(r"[ML] (\S+) (\S+)", path)] for path in paths]
    return [(min(xs), max(xs)) for xs in edges]


def test_all_lanes_are_on_one_scale():
    """4 ms are 344 points: the all-reduce of the plain lane is the second half, the hidden one ends at 2.5 ms."""
    red = boxes(PICTURES["two"](), f"fill: {RED}")
    assert red[0] == pytest.approx((8 + 172, 8 + 344), abs=0.1)
    assert red[1] == pytest.approx((8 + 86, 8 + 215), abs=0.1)
    products = [box for box in boxes(PICTURES["two"](), f"stroke: {INK}") if box == pytest.approx((8, 180), abs=0.1)]
    assert len(products) == 2


def test_words_say_every_span():
    picture = PICTURES["two"]()
    assert "plain: dX from 0.00 to 2.00 ms; all_reduce on the wire from 2.00 to 4.00 ms; waits from 2.00" in picture.alt
    assert "hidden: dX from 0.00 to 2.00 ms; all_reduce on the wire from 1.00 to 2.50 ms" in picture.alt
    assert drawn(picture).count("dX") == 2


def test_a_narrow_box_has_no_name():
    picture = timelines({"plain": [Span("product", "dX", 0, 1.0), Span("product", "dA", 1.0, 1.001)]})
    assert "dX" in drawn(picture) and "dA" not in drawn(picture)


@pytest.mark.parametrize(("about", "step"), [(0.03, 0.02), (0.9, 0.5), (1.0, 1.0), (7.0, 5.0), (39.0, 20.0), (60, 50)])
def test_steps_are_round(about, step):
    assert _step(about) == pytest.approx(step)


@pytest.mark.parametrize(
    ("lanes", "names", "words"),
    [
        ({}, (), "at least one lane"),
        ({"a": []}, (), "'a' has no spans"),
        ({"a": [Span("collective", "all_reduce", 0.0, float("nan"))]}, (), "all_reduce goes from 0.0 to nan"),
        ({"a": [Span("product", "XA", 1.0, 0.0)]}, (), "product XA goes from 1.0 to 0.0"),
        ({"a": [Span("product", "XA", 1.0, 1.0)]}, (), "nothing here takes any time"),
        ({"a": PLAIN}, ("dX", "dA"), "'a' has 1 products, and there are 2 names"),
    ],
)
def test_bad_input_is_refused_by_name(lanes, names, words):
    with pytest.raises(ValueError, match=words):
        timelines(lanes, names)
