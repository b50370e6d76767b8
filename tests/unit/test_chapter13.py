"""Chapter 13's graph says what its text says; its two tracks are those of the package's model of a step; and the
remedies come out as the text ranks them."""

import re
from pathlib import Path

import pytest
import yaml
from notebook_reading import cells_of, defined_by, printed, source

from tpcode.config import Layout
from tpcode.cost import step_time
from tpcode.cost.step_time import Collective
from tpcode.cost.workload import Workload
from tpcode.grading import ch13

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(13)


@pytest.fixture(scope="module")
def names(cells) -> dict:
    """What the cells without ranks define."""
    return defined_by(cells, "graph", "hidden", "schedule", "merged", "forty", "remedies")


# ---- the graph ------------------------------------------------------------------------------------------------------


def test_nothing_is_free_forward_and_only_weight_gradients_backward(names):
    free, forward, backward = names["free_during"], names["forward"], names["backward"]
    assert free(forward, "sum 1") == free(forward, "sum 2") == []
    assert set(free(backward, "sum 3")) == {"dA", "dB"}
    assert set(free(backward, "sum 4")) == {"dA", "dB", "dW of out", "dW of QKV"}


def test_the_page_and_the_exercise_agree_on_what_is_free(names):
    """Exercise 13.1's graph, read by the page's function, gives the check's answers. Not vacuous: two are not empty."""
    for collective in ch13.COLLECTIVES:
        one_pass = {
            step: sorted(needs & set(ch13.NEEDS))
            for step, needs in ch13.NEEDS.items()
            if (step in ch13.FORWARD) == (collective in ch13.FORWARD)
        }
        free = set(names["free_during"](one_pass, collective)) & set(ch13.PRODUCTS)
        assert free == ch13.free_during(collective)
    assert [bool(ch13.free_during(one)) for one in ch13.COLLECTIVES] == [False, False, False, True, True]


def test_a_dependent_call_has_the_order_of_a_blocking_one(cells):
    lanes = re.split(r"^\w.*:\n", printed(cells["who-waits"]), flags=re.MULTILINE)[1:]
    kinds = [[line.split()[0] for line in lane.splitlines() if line.strip()] for lane in lanes]
    assert kinds[0] == kinds[2] == ["launch", "wait", "product"]
    assert kinds[1] == ["launch", "product", "wait"]


def test_one_node_hides_and_two_do_not(cells):
    text = printed(cells["column-backward"])
    one, two = text.split("two nodes")
    assert [line.split()[0] for line in one.splitlines()[1:]] == ["product", "launch", "product", "wait"]
    assert "launch 1, all_reduce\n    wait for 1" in two and "False" not in text


# ---- the two tracks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [300, 58])
def test_two_tracks_are_the_packages_model(names, speed):
    """Asynchronous, a step takes what `step_time` says; waiting for each sum, all operations one after another."""
    machine, config = names["with_link"](speed), names["llama"]
    work = names["work"]
    step = step_time.step_time(config, Layout(tp=4), work, machine.card, machine.efficiencies)
    assert names["a_step"](machine)[0] == pytest.approx(step.seconds, rel=1e-9)
    operations = step_time.layer_operations(config, Layout(tp=4), Workload(batch=1, sequence=4096))
    one_by_one = sum(
        one.whole_seconds(machine) if isinstance(one, Collective) else one.seconds(machine) for one in operations
    )
    waiting = names["schedule"](operations, machine, asynchronous=False)
    assert names["seconds_of"](waiting) == pytest.approx(one_by_one, rel=1e-9)


def test_on_the_wire_is_one_sum_at_a_time_and_after_its_product(names):
    machine = names["with_link"](60)
    operations = step_time.layer_operations(names["llama"], Layout(tp=4), Workload(batch=1, sequence=4096))
    for chunks in (1, 2, 4):
        spans = names["schedule"](operations, machine, chunks=chunks)
        wire = [span for span in spans if span.kind == "collective"]
        assert len(wire) == 4 * chunks
        assert all(later.start >= earlier.end for earlier, later in zip(wire, wire[1:]))
        products = [span for span in spans if span.kind == "product"]
        assert all(later.start >= earlier.end for earlier, later in zip(products, products[1:]))
        for span in wire:
            before = spans[spans.index(span) - 1]
            assert before.kind == "product" and before.end <= span.start


def test_hidden_is_the_smaller_of_the_two(names):
    for config, t, sequence, machine in names["cases"].values():
        sums = names["sums_of"](config, t, sequence, machine)
        hides = sum(min(one.whole_seconds(machine), one.behind.seconds(machine)) for one in sums if one.behind)
        alone = sum(one.whole_seconds(machine) for one in sums)
        assert sum(one.seconds(machine) for one in sums) == pytest.approx(alone - hides)
        assert hides / alone <= 1 / 2 + 1e-12
    no_weight_gradient = [one for one in sums if one.behind is None]
    assert len(no_weight_gradient) == 2  # the forward ones


def test_chunks_lose_with_the_fast_link_and_gain_a_little_with_the_slow_one(names):
    took = {}
    operations = step_time.layer_operations(names["llama"], Layout(tp=4), Workload(batch=1, sequence=4096))
    for speed in (300, 60):
        for chunks in (1, 2, 4):
            spans = names["schedule"](operations, names["with_link"](speed), chunks=chunks)
            took[speed, chunks] = names["seconds_of"](spans)
    assert took[300, 1] < took[300, 2] < took[300, 4]
    assert took[60, 2] < took[60, 1] < took[60, 4]


# ---- merging, and the 40% -------------------------------------------------------------------------------------------


def test_merging_saves_a_twentieth_and_for_one_token_half(cells):
    assert re.findall(r"saved:? (\d+)%", printed(cells["merged"])) == ["5", "49"]


def test_forty_percent_is_a_fifth_of_the_link(names, cells):
    assert names["a_step"](names["with_link"](58), asynchronous=False)[1] == pytest.approx(0.40, abs=0.005)
    assert names["a_step"](names["with_link"](300), asynchronous=False)[1] == pytest.approx(0.12, abs=0.005)


def test_remedies_rank_as_the_text_says(names):
    """Not vacuous: gains differ by factors, and the one that may be merged away gains less than 1%."""
    seconds = {name: took for name, (took, _) in names["remedies"].items()}
    best_first = sorted(seconds, key=seconds.get)
    assert best_first[:3] == ["tp 2, dp 2", "repaired link", "tp 2, pp 2"]
    assert best_first[-1] == "merged" and seconds["merged"] > 0.99 * names["before"]
    gain = {name: 1 - took / names["before"] for name, took in seconds.items()}
    assert gain["asynchronous"] == pytest.approx(0.11, abs=0.005)
    assert 0 < gain["and two chunks"] - gain["asynchronous"] < 0.03
    assert seconds["SP"] / seconds["asynchronous"] == pytest.approx(1.04, abs=0.005)


def test_a_larger_batch_makes_no_sum_cheaper(names):
    """Products and payloads grow alike: a sequence gains by larger products, and by half as many optimizer steps."""
    slow, config, work = names["slow"], names["llama"], names["work"]
    one, two = (
        step_time.step_time(config, Layout(tp=4), workload, slow.card, slow.efficiencies)
        for workload in (work, names["twice"])
    )
    gain = {part: getattr(one, part) - getattr(two, part) / 2 for part in ("gemm", "memory", "tp", "update", "seconds")}
    assert gain["gemm"] > gain["update"] > 0 and gain["gemm"] + gain["update"] > gain["seconds"] > 0
    assert gain["tp"] < 0 and gain["memory"] == pytest.approx(0, abs=1e-9)
    assert gain["seconds"] / one.seconds == pytest.approx(0.03, abs=0.005)


def test_what_fits(names):
    """The smaller t needs more memory, and still fits a card of 80 GB."""
    assert all(
        names["other_layout"](tp=4)[1] < names["remedies"][name][1] < 0.9 * 80 for name in ("tp 2, pp 2", "tp 2, dp 2")
    )


def test_statement_9_of_chapter_0_is_settled_here(cells):
    pretest = yaml.safe_load((ROOT / "chapters/00_pretest.yaml").read_text(encoding="utf-8"))
    assert pretest[8]["chapter"] == 13 and pretest[8]["verdict"] == "right"
    assert "Statement 9 of chapter 0 was true." in source(cells["text-ma-29"])
