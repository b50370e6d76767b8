"""The grading's parts that need no ranks: `check` itself, stubs, a learner's traceback, comparisons and symptoms."""

import subprocess
import sys
import traceback
from fractions import Fraction

import numpy as np
import pytest
import torch

from tpcode.grading import Wrong, check, exercise, require_checked
from tpcode.grading.answers import blanks, calls_in, stub_in
from tpcode.grading.compare import compare, compare_one, looks_like, part_only
from tpcode.grading.failures import learners_part
from tpcode.grading.numbers import number


@exercise("80.1")
def is_two(answer, other=2):
    if callable(answer):
        answer = answer()
    compare_one("answer", answer, 2)
    compare_one("other", other, 2)
    return "2 it is."


def refusal(function, *args, **kwargs) -> str:
    """The message with which a call is refused."""
    with pytest.raises(Wrong) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# ---- a function that returns a number -------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [3, 3.0, Fraction(6, 2), np.float32(3), np.array([3]), torch.tensor(3)], ids=repr)
def test_any_kind_of_number_is_one(three):
    assert number("f", lambda: three, ()) == 3


@pytest.mark.parametrize("other", ["3", True, [3, 3], torch.ones(2), {}], ids=repr)
def test_what_is_no_number_is_refused(other):
    assert "should return one number" in refusal(number, "f", lambda: other, ())


# ---- check ----------------------------------------------------------------------------------------------------------


def test_right_prints_one_line(capsys):
    check("80.1", 2)
    assert capsys.readouterr().out == "80.1 right: 2 it is.\n"


def test_wrong_is_an_assertion_with_a_short_rendering():
    with pytest.raises(AssertionError) as caught:
        check("80.1", 3)
    assert str(caught.value) == "80.1 not yet right: answer: largest difference 1 (yours 3, right 2)."
    assert caught.value._render_traceback_() == [str(caught.value)], "Jupyter shows the message alone"
    assert caught.value.__suppress_context__


def test_jupyter_shows_the_message_and_no_traceback(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from tpcode.grading import Wrong\nraise Wrong('0.1 not yet right: it is 2.')")
    assert capsys.readouterr().out == "0.1 not yet right: it is 2.\n"


@pytest.mark.parametrize("stub, shown", [(None, "None"), (..., "..."), ([1, [None]], "None"), ({"a": ...}, "...")])
def test_a_stub_is_not_filled_in_rather_than_wrong(stub, shown):
    assert refusal(check, "80.1", stub) == f"80.1 is not filled in yet: replace {shown} in answer."


def test_all_that_is_still_a_stub_is_listed():
    assert refusal(check, "80.1", None, None) == "80.1 is not filled in yet: replace None in answer and other."


def test_not_implemented_is_a_stub():
    def answer():
        raise NotImplementedError

    assert refusal(check, "80.1", answer) == (
        "80.1 is not filled in yet: replace the line that raises NotImplementedError."
    )


def test_the_learners_error_shows_the_learners_lines():
    def answer():
        return 1 / 0

    said = refusal(check, "80.1", answer)
    assert said.startswith("80.1 not yet right: your code raised.\n  test_grading.py, line ")
    assert "return 1 / 0" in said and said.endswith("ZeroDivisionError: division by zero")
    assert "registry.py" not in said, "the frames of the grading are left out"


def test_unknown_exercises_and_answers_are_named():
    with pytest.raises(ValueError, match="there is no exercise 80.9; chapter 80 has 80.1"):
        check("80.9", 1)
    with pytest.raises(ValueError, match="there is no exercise 81.1; chapter 81 has none"):
        check("81.1", 1)
    with pytest.raises(ValueError, match='such as "3.2"; this is 3.2'):
        check(3.2, 1)
    with pytest.raises(TypeError, match=r'the call is check\("80.1", answer, other\)'):
        check("80.1", 1, 2, 3)


def test_two_checks_of_one_exercise_are_refused():
    with pytest.raises(ValueError, match="exercise 80.1 has two checks: is_two and .*second"):

        @exercise("80.1")
        def second(answer): ...


def test_require_checked_asks_for_a_check_that_passed(capsys):
    check("80.1", 2)
    require_checked("80.1")
    refusal(check, "80.1", 3)
    assert refusal(require_checked, "80.1").startswith("80.1 was not checked: the cell that calls check")


def test_grading_loads_no_torch_until_a_check_needs_it():
    program = "import sys, tpcode.grading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ---- stubs and sources ----------------------------------------------------------------------------------------------


def test_stub_in_reads_the_source():
    def unfilled():
        total = None  # replace None
        return total

    def dots(): ...

    def raises():
        raise NotImplementedError("write me")

    def set_to_dots():
        total = ...  # noqa: F841

    def filled(x=None):
        return x[..., 0]

    found = [stub_in(f) for f in (unfilled, dots, set_to_dots, raises, filled, len)]
    assert found == ["None", "...", "...", "NotImplementedError", "", ""]


def test_calls_in_reads_the_source():
    def answer(dist, x):
        dist.all_reduce(x)
        return list(x)

    assert calls_in(answer) == {"dist.all_reduce", "list"}


def test_blanks_accepts_what_is_filled_in():
    assert [blanks(x) for x in (0, "", [], torch.zeros(2), {"a": [1]})] == [""] * 5


# ---- tracebacks -----------------------------------------------------------------------------------------------------


def test_learners_part_keeps_cells_and_the_error():
    text = f"""Traceback (most recent call last):
  File "{torch.__file__}", line 3, in call
    fn()
  File "/tmp/ipykernel_7/12345.py", line 4, in add_up
    return mine.no_such_thing
           ^^^^^^^^^^^^^^^^^^
  File "{is_two.__globals__["check"].__code__.co_filename}", line 3, in check
    fn()
AttributeError: 'Tensor' object has no attribute 'no_such_thing'
"""
    assert learners_part(text) == (
        "  your cell, line 4, in add_up\n"
        "    return mine.no_such_thing\n"
        "           ^^^^^^^^^^^^^^^^^^\n"
        "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"
    )


def test_learners_part_of_a_syntax_error_keeps_the_place():
    try:
        compile("x = (", "/tmp/ipykernel_7/1.py", "exec")
    except SyntaxError:
        assert "your cell, line 1" in learners_part(traceback.format_exc())


# ---- comparing ------------------------------------------------------------------------------------------------------

WANT = torch.tensor([[8.0, 6.0], [1.0, 2.0]], dtype=torch.float64)
PARTS = [WANT - 1.0, torch.ones_like(WANT)]


def told(got_of_rank_1, **options) -> str:
    return refusal(compare, [{"dX": WANT}, {"dX": got_of_rank_1}], {"dX": WANT}, **options)


def test_equal_within_the_tolerance_passes():
    compare([{"dX": WANT, "extra": 1}, {"dX": WANT + 1e-13}], {"dX": WANT})
    compare([{"Y": [1, 3]}, {"Y": [5, 2]}], [{"Y": [1, 3]}, {"Y": [5, 2]}])


def test_the_difference_is_told_with_property_rank_size_and_place():
    wrong = WANT.clone()
    wrong[1, 0] = 4
    assert told(wrong) == "dX on rank 1 at t = 2: largest difference 3 at [1, 0] (yours 4, right 1)."


@pytest.mark.parametrize(
    "wrong, symptom",
    [
        (2 * WANT, "It is 2 times the right value: what every rank already held whole was summed over the 2 ranks."),
        (WANT / 2, "It is 1/2 of the right value: averaged where a sum is needed."),
        (-WANT, "It has the wrong sign."),
        (0 * WANT, "It is all zeros."),
        (WANT.T, "It is transposed."),
        (
            (WANT + 1e-6).float(),
            "It is torch.float32, the right value is torch.float64: precision was lost on the way.",
        ),
        (PARTS[1], "It is rank 1's own part only: the parts of all ranks were not added."),
        (WANT + 5, "Five too many."),
    ],
)
def test_symptoms_are_recognised(wrong, symptom):
    mine = [part_only({"dX": PARTS}), looks_like({"dX": WANT + 5}, "Five too many.")]
    assert told(wrong, symptoms=mine).splitlines()[1:] == [symptom]


def test_a_wrong_value_of_each_rank_is_recognised_by_rank():
    known = looks_like({"dX": [WANT, WANT + 5]}, "Each rank its own.", per_rank=True)
    assert told(WANT + 5, symptoms=[known]).endswith("Each rank its own.")
    assert "Each" not in told(WANT + 6, symptoms=[known])


def test_another_ranks_shard_is_recognised():
    want = [{"Y": [1, 3]}, {"Y": [5, 2]}]
    said = refusal(compare, [{"Y": [1, 3]}, {"Y": [1, 3]}], want)
    assert said.endswith("It is what belongs to rank 0.")


@pytest.mark.parametrize(
    "wrong, said",
    [
        (torch.zeros(2, 3), "dX on rank 1 at t = 2 has shape [2, 3], not [2, 2]."),
        (torch.full((2, 2), float("nan")), "dX on rank 1 at t = 2 holds nan."),
        (None, "dX is missing on rank 1 at t = 2: it is None there."),
        ("8 6", "dX on rank 1 at t = 2 should be a tensor or numbers; it is '8 6'."),
    ],
)
def test_what_cannot_be_compared_is_told(wrong, said):
    assert told(wrong) == said


def test_a_transposed_shape_is_told():
    said = refusal(compare, [{"dA": torch.zeros(4, 2)}], {"dA": torch.zeros(2, 4)})
    assert said == "dA on rank 0 at t = 1 has shape [4, 2], not [2, 4]. It may be transposed."


def test_typed_answers_are_compared_without_ranks():
    compare_one("dX", [[8, 6]], torch.tensor([[8.0, 6.0]]))
    known = looks_like({"dX": [9, 8]}, "A was not transposed.")
    assert refusal(compare_one, "dX", [9, 8], [8, 6], symptoms=[known]).endswith("A was not transposed.")
    assert refusal(compare_one, "dX", [None, 6], [8, 6]) == "replace None in dX."
    assert refusal(compare_one, "dX", [9, 6], [8, 6], reveal=False) == "dX is not right at [0], where yours is 9."
    assert refusal(compare_one, "bytes", 3, 4, where="at h = 6").startswith("bytes at h = 6: largest difference 1")
