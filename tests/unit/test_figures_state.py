"""The bars of a parameter's bytes: each segment as long as its term, the words say what the picture shows."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tpcode.figures import state_bars
from tpcode.figures.style import INK, KINDS

FP32 = {"weights": 4, "gradients": 4, "exp_avg": 4, "exp_avg_sq": 4}
MIXED = {"weights": 2, "gradients": 2, "master weights": 4, "exp_avg": 4, "exp_avg_sq": 4}
RECIPES = {"fp32 Adam": FP32, "mixed precision": MIXED}
SVG = "{http://www.w3.org/2000/svg}"


def segments(svg: str) -> list[tuple[float, float]]:
    """Left and right edge of every outlined rectangle, in points, in drawing order."""
    drawn = [path for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.get("clip-path")]
    edges = [[float(x) for x in re.findall(r"[ML] (-?[\d.]+)", path.get("d"))] for path in drawn]
    return [(min(xs), max(xs)) for xs in edges]


def test_segments_are_as_long_as_their_bytes_and_touch():
    found = segments(state_bars(RECIPES).svg)
    sizes = [*FP32.values(), *MIXED.values()]
    assert len(found) == len(sizes)
    bytes_long = [(right - left) / (found[0][1] - found[0][0]) * 4 for left, right in found]
    assert bytes_long == pytest.approx(sizes)
    for bar in (found[:4], found[4:]):
        for (_, right), (left, _) in zip(bar, bar[1:], strict=False):
            assert left == pytest.approx(right)
    assert found[3][1] == pytest.approx(found[-1][1]), "both bars end at 16"


def test_every_term_is_labelled_with_name_and_bytes():
    texts = [element.text for element in ElementTree.fromstring(state_bars(RECIPES).svg).iter(f"{SVG}text")]
    assert "fp32 Adam: 16 bytes" in texts and "mixed precision: 16 bytes" in texts
    for terms in RECIPES.values():
        assert set(terms) <= set(texts)
    assert texts.count("2") == 2 and texts.count("4") == 7


def test_the_words_say_the_same():
    assert state_bars(RECIPES).alt == (
        "Bytes per parameter. fp32 Adam: weights 4, gradients 4, exp_avg 4, exp_avg_sq 4; 16 in all. "
        "mixed precision: weights 2, gradients 2, master weights 4, exp_avg 4, exp_avg_sq 4; 16 in all."
    )


def test_it_is_the_same_on_every_run_and_uses_no_colour_of_a_placement():
    svg = state_bars(RECIPES).svg
    assert svg == state_bars(RECIPES).svg
    assert INK in svg and not any(kind.ground in svg for kind in KINDS.values())


@pytest.mark.parametrize(
    "recipes, said",
    [
        ({}, "at least one recipe"),
        ({"a": {}}, "'a' has no terms"),
        ({"a": {"w": 0.5}}, "'w' has 0.5 bytes"),
        ({"a": {"w": float("nan")}}, "'w' has nan bytes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(recipes, said):
    with pytest.raises(ValueError, match=said):
        state_bars(recipes)
