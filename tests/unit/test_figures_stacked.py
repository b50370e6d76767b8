"""Stacked bars: each part as long as its value, the limit where it is, the words as the picture."""

import re

import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode.figures.stacked import stacked_bars
from tpcode.figures.style import KINDS

WAYS = {
    "t = 8, none": {"state": 44.3, "activations": 64.1},
    "t = 8, selective": {"state": 44.3, "activations": 31.9},
    "t = 1, none": {"state": 353.2, "activations": 341.8},
}
PARTS = {"t = 1": {"whole": 10, "divided": 24, "scores": 106.7}, "t = 8": {"whole": 10, "divided": 3, "scores": 13.3}}
PICTURES = {
    "with a limit": lambda: stacked_bars(WAYS, unit="GB", limit=80, limit_name="card"),
    "placements": lambda: stacked_bars(PARTS, unit="s·b·h bytes", kinds={"whole": "replicated", "divided": "sharded"}),
    "four patterns and nothing of one": lambda: stacked_bars({"only": {"a": 1, "b": 0, "c": 2, "d": 3}}, unit="GiB"),
    "a limit far off": lambda: stacked_bars({"small": {"a": 3.0}}, unit="GB", limit=141, limit_name="card"),
}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_texts_apart(make):
    require_steady(make)
    assert badly_placed(make()) == []


def boxes(picture) -> list[tuple[float, float]]:
    """Left and right edge of every rectangle, in the order of drawing."""
    found = []
    for path in re.findall(r'<path d="(M [^"]*)" clip-path', picture.svg):
        points = re.findall(r"[ML] (\S+) (\S+)", path)
        xs, ys = {x for x, _ in points}, {y for _, y in points}
        if len(xs) == len(ys) == 2:
            found.append((min(map(float, xs)), max(map(float, xs))))
    return found


def test_parts_are_as_long_as_their_values_and_touch():
    found = boxes(stacked_bars({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 4.0, "b": 2.0}}, unit="GB"))[:4]
    one = found[0][1] - found[0][0]
    assert [(right - left) / one for left, right in found] == pytest.approx([1, 2, 4, 2], abs=1e-4)
    assert found[0][1] == pytest.approx(found[1][0]) and found[2][1] == pytest.approx(found[3][0])
    assert found[0][0] == found[2][0]


def test_the_limit_stands_at_its_value_and_a_longer_bar_is_cut_off():
    picture = PICTURES["with a limit"]()
    state = boxes(picture)[0]
    scale = (state[1] - state[0]) / 44.3
    at = [float(x) for x in re.findall(r'<path d="M (\S+) \S+ ?\nL \1 [^z]*" clip-path', picture.svg)]
    assert any(x == pytest.approx(state[0] + 80 * scale, abs=0.01) for x in at)
    assert "695.0 →" in drawn(picture) and "76.2" in drawn(picture)
    assert max(right for _, right in boxes(picture)) < 340
    assert len(boxes(picture)) == 2 + 2 + 1 + 2  # of the last bar the second part is beyond the edge; and the legend


def test_placements_have_their_colours_and_the_others_none():
    placed, plain = PICTURES["placements"]().svg, PICTURES["with a limit"]().svg
    assert KINDS["replicated"].ground in placed and KINDS["sharded"].ground in placed
    assert not any(kind.ground in plain for kind in KINDS.values())
    assert drawn(PICTURES["placements"]())[-3:] == ["whole", "divided", "scores"]


def test_the_words_say_the_same():
    assert PICTURES["with a limit"]().alt == (
        "Bars in GB. card: 80 GB. t = 8, none: state 44.3, activations 64.1; 108.4 in all, over the limit. "
        "t = 8, selective: state 44.3, activations 31.9; 76.2 in all, within the limit. "
        "t = 1, none: state 353.2, activations 341.8; 695.0 in all, over the limit."
    )


@pytest.mark.parametrize(
    "bars, options, said",
    [
        ({}, {}, "at least one bar"),
        ({"a": {}}, {}, "the bar 'a' has the parts []"),
        ({"a": {"x": 1}, "b": {"y": 1}}, {}, "the bar 'b' has the parts ['y'], and the first bar has ['x']"),
        ({"a": {"x": -1}}, {}, "'a': 'x' is -1"),
        ({"a": {"x": float("nan")}}, {}, "'a': 'x' is nan"),
        ({"a": {"x": 0}}, {}, "the bar 'a' has no length"),
        ({"a": {"x": 1}}, {"limit": 0}, "the limit must be a positive number and is 0"),
        ({"a": {"x": 1}}, {"kinds": {"y": "sharded"}}, "kinds has 'y'"),
        ({"a": {"x": 1}}, {"kinds": {"x": "cut"}}, "kinds are sharded, replicated, partial"),
        ({"a": dict.fromkeys("vwxyz", 1)}, {}, "4 patterns"),
    ],
)
def test_what_cannot_be_drawn_is_refused(bars, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        stacked_bars(bars, unit="GB", **options)
