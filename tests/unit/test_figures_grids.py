"""Ranks on nodes and a pipeline's lanes: the schedule obeys its dependencies, the bubble is the formula's."""

from fractions import Fraction

import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode.config import Layout
from tpcode.cost.communication import bubble_fraction
from tpcode.figures.grids import (
    bubble,
    most_under_way,
    pipeline_lanes,
    pipeline_schedule,
    rank_grid,
)

PICTURES = {
    "64 ranks": lambda: rank_grid(Layout(tp=8, dp=2, pp=4), "h100", 37),
    "replicas in a node": lambda: rank_grid(Layout(tp=2, dp=4, pp=4), "a100", 9),
    "128 ranks": lambda: rank_grid(Layout(tp=8, dp=1, pp=16), "a100"),
    "one microbatch": lambda: pipeline_lanes(4, 1),
    "eight": lambda: pipeline_lanes(4, 8),
    "chunks": lambda: pipeline_lanes(4, 4, 2),
}
SIZES = [(1, 3, 1), (2, 1, 1), (4, 2, 1), (4, 8, 1), (8, 5, 1), (2, 4, 2), (4, 4, 2), (4, 8, 3), (3, 6, 4)]


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_texts_apart(make):
    require_steady(make)
    assert badly_placed(make()) == []


@pytest.mark.parametrize("p, m, v", SIZES)
def test_the_bubble_is_the_formulas(p, m, v):
    assert bubble(pipeline_schedule(p, m, v)) == Fraction(p - 1, v * m)
    assert float(bubble(pipeline_schedule(p, m, v))) == pytest.approx(bubble_fraction(p, m, v))


@pytest.mark.parametrize("p, m, v", SIZES)
def test_every_part_of_the_model_waits_for_the_one_before(p, m, v):
    stages = pipeline_schedule(p, m, v)
    ends = {}
    for stage, slots in enumerate(stages):
        assert all(one.end <= other.start for one, other in zip(slots, slots[1:]))
        for slot in slots:
            ends[slot.way, slot.microbatch, slot.chunk * p + stage] = (slot.start, slot.end)
    assert len(ends) == 2 * p * m * v
    for (way, microbatch, part), (start, _) in ends.items():
        before = part - 1 if way == "forward" else part + 1
        if (way, microbatch, before) in ends:
            assert ends[way, microbatch, before][1] <= start
        if way == "backward":
            assert ends["forward", microbatch, part][1] <= start


def test_stage_0_keeps_p_microbatches_however_many_there_are():
    for p, m in ((4, 8), (4, 32), (8, 64)):
        stages = pipeline_schedule(p, m)
        assert [most_under_way(slots) for slots in stages] == list(range(p, 0, -1))
    # Interleaved: (p-1)/(pv) more, in chunks of 1/v.
    assert Fraction(most_under_way(pipeline_schedule(4, 16, 2)[0]), 2) == 4 * (1 + Fraction(3, 8))


def test_grid_has_each_rank_once_on_its_node_and_says_the_links():
    picture = PICTURES["64 ranks"]()
    ranks = [text for text in drawn(picture) if text.isdigit()]
    assert ranks == [str(rank) for rank in range(64)]
    assert "node 4: stage 2, replica 0" in drawn(picture)
    assert "tp 32, 33, 34, 35, 36, 37, 38, 39 (NVLink, inside a node)" in picture.alt
    assert "dp 37, 45 (network, between nodes)" in picture.alt
    assert "pp 5, 21, 37, 53 (network, between nodes)" in picture.alt
    inside = PICTURES["replicas in a node"]()
    assert "dp 9, 11, 13, 15 (NVLink, inside a node)" in inside.alt
    assert "node 1: stage 1, replicas 0 to 3" in drawn(inside)


def test_lanes_draw_each_microbatch_twice_on_each_stage():
    numbers = [text for text in drawn(PICTURES["eight"]()) if text.isdigit()]
    assert numbers.count("7") == 2 * 4 and len(numbers) == 2 * 4 * 8
    assert "waiting / working = 3/8 on every stage" in drawn(PICTURES["eight"]())
    assert "waiting / working = 3 on every stage" in drawn(PICTURES["one microbatch"]())


@pytest.mark.parametrize(
    "p, m, said",
    [
        (4, 8, "Each stage waits 3/8 of the time that it works."),
        (4, 1, "Each stage waits 3 times as long as it works."),
        (2, 1, "Each stage waits as long as it works."),
        (1, 2, "No stage waits."),
    ],
)
def test_lanes_say_how_long_a_stage_waits(p, m, said):
    assert pipeline_lanes(p, m).alt.endswith(said)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: rank_grid(Layout(tp=8, dp=32), "h100"), "up to 128 ranks"),
        (lambda: rank_grid(Layout(tp=4), "h100"), "there are 4 on nodes of 8"),
        (lambda: rank_grid(Layout(tp=8, cp=2), "h100"), "with cp = 2"),
        (lambda: rank_grid(Layout(tp=8), "h100", 8), "rank"),
        (lambda: rank_grid(Layout(tp=8), "b999"), "no card 'b999'"),
        (lambda: pipeline_schedule(4, 6, 2), "m = 6 is no multiple"),
        (lambda: pipeline_schedule(0, 6), "p must be"),
        (lambda: pipeline_lanes(4, 40), "no room for 4 stages with 40 microbatches"),
        (lambda: pipeline_lanes(9, 2), "no room for 9 stages"),
    ],
)
def test_what_does_not_fit_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
