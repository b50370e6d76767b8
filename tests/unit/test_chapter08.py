"""Chapter 8's worked integers tell right from wrong, and its own model and formula are the package's."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from notebook_reading import cells_of, defined_by, source

from tpcode import byhand

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(8)


@pytest.fixture(scope="module")
def fork(cells) -> dict:
    return defined_by(cells, "fork")


def test_each_wrong_way_past_the_fork_is_another(fork):
    for stream, parts in ((fork["x"], fork["y_of"]), (fork["d_new"], fork["dx_of"])):
        right, wrong = stream + sum(parts), sum(stream + part for part in parts)
        values = [right, wrong, sum(parts), stream, *(stream + part for part in parts), *parts, 2 * right]
        assert len({tuple(value) for value in values}) == len(values)
        assert np.array_equal(wrong - right, stream)  # the text: t times, here once too often


def test_the_numbers_in_the_text_are_those_of_the_cell(fork, cells):
    text = source(cells["fork-text"])
    for vector in (fork["x"], *fork["y_of"], fork["d_new"], *fork["dx_of"]):
        assert str(vector) in text


@pytest.fixture(scope="module")
def formula(cells):
    names: dict = {}
    exec(source(cells["volume"]).split("\n\n\nequal")[0], names)
    return names["wire_elements"]


def test_the_formula_of_the_volume_tells_each_slip(formula):
    """By hand for b·s·h = 48, b·s = 6: what is left out, or taken twice, gives another number."""
    right = formula(2, 3, 8, 2, 4)
    assert right == (10 * 48 + 3 * 6) * 1.5
    slips = {
        "4L only": 8 * 48 * 1.5,
        "no loss": 10 * 48 * 1.5,
        "one end": (9 * 48 + 18) * 1.5,
        "the 2 for many ranks": (10 * 48 + 18) * 2,
        "one pass": (10 * 48 + 18) * 0.75,
        "two a layer": (6 * 48 + 18) * 1.5,
        "recomputed": formula(2, 3, 8, 2, 4, recompute=True),
        "three microbatches": formula(2, 3, 8, 2, 4, microbatches=3),
        "4 · 2bsh · L": 4 * 2 * 48 * 2,
    }
    assert right not in slips.values() and len(set(slips.values())) == len(slips)
    assert slips["recomputed"] == (14 * 48 + 18) * 1.5 and slips["three microbatches"] == 3 * right


def test_the_bound_is_a_third_too_much_for_a_layer_at_t_4(formula):
    """The text says so; what one more layer sends is the difference of two steps."""
    layer = formula(2, 3, 8, 3, 4) - formula(2, 3, 8, 2, 4)
    assert layer * 4 / 3 == 4 * 2 * 48


def test_the_operations_of_a_norm_are_counted_from_its_formula(cells):
    """Mean, difference, square, add, scale, weight, bias: a norm of h numbers written out, and every operation on an
    entry counted."""
    names: dict = {}
    exec(source(cells["by-hand"]).split("\n\n\n")[0], names)

    class Counted(np.ndarray):
        count = 0

        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            inputs = [value.view(np.ndarray) if isinstance(value, Counted) else np.asarray(value) for value in inputs]
            Counted.count += max(value.size for value in inputs)
            return np.asarray(getattr(ufunc, method)(*inputs, **options)).view(Counted)

    h = 1000
    x = np.random.default_rng(8).normal(size=h).view(Counted)
    difference = x - np.add.reduce(x) / h
    variance = np.add.reduce(difference * difference) / h
    y = difference * (1 / np.sqrt(variance + 1e-5)) * np.full(h, 2.0) + np.full(h, 3.0)
    assert round(Counted.count / h) == names["NORM"]
    plain = y.view(np.ndarray)
    assert plain.std() == pytest.approx(2, abs=1e-3) and plain.mean() == pytest.approx(3)


def test_the_stored_run_learns_and_says_that_three_runs_are_one_curve(cells):
    """Not vacuous: a verdict of "more" would fail, and so would a curve that stays where chance is."""
    said = "".join(cells["train"]["outputs"][0]["text"])
    assert said.count("< 1e-10") == 2 and "more" not in said
    first, last = (float(said.split(words)[1].split()[0]) for words in ("first step ", "last step "))
    assert last < first - 3 and last < float(np.log(256)) - 2


def test_statement_5_of_chapter_0_is_settled_here(cells):
    pretest = yaml.safe_load((ROOT / "chapters/00_pretest.yaml").read_text(encoding="utf-8"))
    assert pretest[4]["chapter"] == 8 and pretest[4]["verdict"] == "wrong"
    assert "Statement 5 of chapter 0 was false." in source(cells["layer-answer"])


def test_parallel_blocks_are_another_function():
    """In the wild: x + a(x) + m(x) is not x + a(x) + m(x + a(x)), unless m is linear."""
    x, a, m = 1.0, lambda x: 2 * x, byhand.gelu
    assert x + a(x) + m(x) != x + a(x) + m(x + a(x))
