"""What `make check` says about a learner's notebook, whatever happens in it: real runs under nbval, without ranks."""

import selectors

from tools.verdicts import judge, learners_lines, selection


def verdicts(nb, ids, folder, **options):
    return {verdict.id: verdict for verdict in judge(nb, ids, folder, **options)}


def test_each_exercise_has_its_own_verdict_and_a_failure_stops_no_other(notebook, setup_cell, tmp_path):
    nb = notebook(
        "# Title",
        setup_cell,
        "## 90.1 right",
        "two = 2",
        'check("90.1", two)',
        "## 90.2 wrong",
        "two = 3",
        'check("90.2", two)',
        "## 90.3 not filled in",
        "two = None",
        'check("90.3", two)',
        "## 90.4 raises",
        "def half(x):\n    return x / 0\n\n\ntwo = half(4)",
        'check("90.4", two)',
        "## 90.5 cannot be read",
        "two = (",
        'check("90.5", two)',
        "## 90.6 has lost its check",
        "two = 2",
        "## 90.7 catches the error",
        'try:\n    check("90.7", 3)\nexcept AssertionError:\n    pass',
    )
    said = verdicts(nb, [f"90.{n}" for n in range(1, 8)], tmp_path)
    assert {id: verdict.kind for id, verdict in said.items()} == {
        "90.1": "right",
        "90.2": "wrong",
        "90.3": "wrong",
        "90.4": "error",
        "90.5": "error",
        "90.6": "wrong",
        "90.7": "wrong",
    }
    assert said["90.1"].text == "90.1 right: 2 it is."
    assert said["90.2"].text == "90.2 not yet right: 3 is not 2."
    assert said["90.3"].text == "90.3 is not filled in yet: replace None in answer."
    assert said["90.4"].text.startswith("90.4: your code stopped with an error.")
    assert "return x / 0" in said["90.4"].text and "ZeroDivisionError: division by zero" in said["90.4"].text
    assert "SyntaxError" in said["90.5"].text
    for id in ("90.6", "90.7"):
        assert f'{id} was not checked: the cell that calls check("{id}", ...) is gone' in said[id].text
    assert not any("tpcode/" in verdict.text or "\x1b" in verdict.text for verdict in said.values())


def test_markers_tags_and_stored_outputs_let_nothing_pass(notebook, setup_cell, tmp_path):
    """nbval skips such cells, or expects them to raise; a learner's notebook may hold them by accident."""
    nb = notebook(
        "# Title",
        setup_cell,
        "## 90.1 by a tag",
        'check("90.1", 3)',
        "## 90.2 by a comment",
        '# NBVAL_SKIP\ncheck("90.2", 3)',
        "## 90.3 by another",
        '# NBVAL_RAISES_EXCEPTION\ncheck("90.3", 3)',
        c3=["raises-exception"],
    )
    nb.cells[3].outputs = [{"output_type": "stream", "name": "stdout", "text": "90.1 right: 2 it is.\n"}]
    said = verdicts(nb, ["90.1", "90.2", "90.3"], tmp_path)
    assert [verdict.text.partition(":")[2] for verdict in said.values()] == [" 3 is not 2."] * 3


def test_a_dead_kernel_is_named_at_once_and_the_rest_is_run(notebook, setup_cell, tmp_path):
    """With nbval alone each death is noticed at the cell's timeout, which here is past this test's own."""
    nb = notebook(
        "# Title",
        setup_cell,
        "## 90.1 exits",
        "import os\n\nos._exit(3)",
        'check("90.1", 2)',
        "## 90.2 crashes in native code",
        "import ctypes\n\nctypes.string_at(0)",
        'check("90.2", 2)',
        "## 90.3 is right",
        'check("90.3", 2)',
    )
    said = verdicts(nb, ["90.1", "90.2", "90.3"], tmp_path, timeout=1000)
    assert [verdict.kind for verdict in said.values()] == ["died", "died", "right"]
    assert said["90.1"].text == (
        "90.1: the kernel died (exit status 3) while it ran\n    import os\n    \n    os._exit(3)"
    )
    assert "SIGSEGV" in said["90.2"].text and "Segmentation fault" in said["90.2"].text


def test_a_hanging_cell_is_stopped_and_the_rest_is_run(notebook, setup_cell, tmp_path):
    nb = notebook(
        "# Title",
        setup_cell,
        "## 90.1 hangs",
        "def wait():\n    while True:\n        pass\n\n\nwait()",
        'check("90.1", 2)',
        "## 90.2 is right",
        'check("90.2", 2)',
    )
    said = verdicts(nb, ["90.1", "90.2"], tmp_path, timeout=10)
    assert [verdict.kind for verdict in said.values()] == ["hung", "right"]
    assert said["90.1"].text.startswith("90.1 did not end in time and was stopped.")
    assert "while True" in said["90.1"].text and "KeyboardInterrupt" in said["90.1"].text


def test_a_failing_setup_is_told_once_for_each_exercise(notebook, setup_cell, tmp_path):
    nb = notebook("# Title", "import no_such_module", setup_cell, "## 90.1 a", 'check("90.1", 2)', "## 90.2 b", "1")
    said = verdicts(nb, ["90.1", "90.2"], tmp_path)
    assert [verdict.kind for verdict in said.values()] == ["setup", "setup"]
    assert said["90.1"].text.startswith("90.1: a cell that it needs, before it, stopped with an error.")
    assert "No module named 'no_such_module'" in said["90.1"].text


def test_one_exercise_runs_its_own_cells_and_the_setup_before_it(notebook):
    nb = notebook(
        "# Title", "setup = 0", "## 90.1 a", "one = 1", "shared = 1", "## 90.2 b", "two = 2", "## 90.3 c", "3",
        c4=["setup"],
    )  # fmt: skip
    cells = [(cell.metadata["exercise"], cell.source) for cell in selection(nb, ["90.2"]).cells]
    assert cells[:3] == [("", "setup = 0"), ("", "shared = 1"), ("90.2", "two = 2")]
    assert len(cells) == 4 and 'require_checked("90.2")' in cells[3][1]


def test_the_kernel_stands_in_the_notebooks_folder(notebook, setup_cell, tmp_path):
    (tmp_path / "two.txt").write_text("2")
    nb = notebook("# Title", setup_cell, "## 90.1 a", 'check("90.1", int(open("two.txt").read()))')
    assert verdicts(nb, ["90.1"], tmp_path)["90.1"].right


def test_of_a_traceback_the_learners_frames_remain():
    traceback = [
        "\x1b[31m---------------------------------\x1b[39m",
        "\x1b[31mZeroDivisionError\x1b[39m            Traceback (most recent call last)",
        "\x1b[36mCell In[3], line 1\x1b[39m\n----> 1 half(4)",
        "File ~/book/tpcode/runtime/pool.py:10, in launch(fn)\n     10 fn()",
        "File ~/.venv/lib/python3.11/site-packages/torch/x.py:10, in y\n     10 fn()",
        f"File {selectors.__file__}:10, in select(self)\n     10 fn()",
        "ZeroDivisionError: division by zero",
    ]
    assert learners_lines(traceback) == ("your cell, line 1\n----> 1 half(4)\nZeroDivisionError: division by zero")


def test_an_error_on_a_rank_outside_of_the_check_shows_the_faulty_line(notebook, setup_cell, tmp_path):
    """A cell that tries the answer out comes before the check, and must say as much as the check does."""
    trial = "def answer():\n    return sum(3)\n\nfrom tpcode import launch\nlaunch(answer, 2)"
    nb = notebook("# Title", setup_cell, "## 90.1 a", trial, 'check("90.1", 2)')
    text = verdicts(nb, ["90.1"], tmp_path)["90.1"].text
    assert "rank 0 raised TypeError" in text
    assert "  your cell, line 2, in answer\n    return sum(3)" in text
    assert ".py" not in text
