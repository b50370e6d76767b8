"""`make check` and `make learn` as a learner meets them: what they print, and how they end."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tools import check
from tools.exercises import main as make_exercises
from tools.notebooks import ROOT, read, to_text

PROMPT = "-> open exercises/90_a.ipynb, exercise "


@pytest.fixture
def root(notebook, setup_cell, tmp_path):
    """A repository with two exercises to fill in."""
    solved = notebook(
        "# Title",
        setup_cell,
        "## 90.1 a",
        "# BEGIN SOLUTION\none = 2\n# STUB\n# one = None\n# END SOLUTION",
        'check("90.1", one)',
        "## 90.2 b",
        "# BEGIN SOLUTION\ntwo = 2\n# STUB\n# two = None\n# END SOLUTION",
        'check("90.2", two)',
    )
    (tmp_path / "exercises/solutions").mkdir(parents=True)
    (tmp_path / "exercises/solutions/90_a.ipynb").write_text(to_text(solved))
    assert make_exercises(["--root", str(tmp_path)]) == 0
    return tmp_path


def fill_in(root, old, new):
    """Save the learner's notebook as Jupyter does: beside it, then renamed over it."""
    path = root / "exercises/90_a.ipynb"
    assert old in path.read_text()
    beside = path.with_name(".~90_a.ipynb")
    beside.write_text(path.read_text().replace(old, new))
    os.replace(beside, path)


# ---- make check -----------------------------------------------------------------------------------------------------


def run_check(root, capsys, *arguments):
    status = check.main([*arguments, "--root", str(root)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_check_says_a_verdict_for_each_and_fails_unless_all_are_right(root, capsys):
    fill_in(root, "two = None", "two = 2")
    assert run_check(root, capsys) == (
        1,
        "exercises/90_a.ipynb\n"
        "90.1 is not filled in yet: replace None in answer.\n"
        "90.2 right: 2 it is.\n"
        "1 of 2 right\n",
    )
    before = (root / "exercises/90_a.ipynb").read_bytes()
    assert run_check(root, capsys, "90.02") == (0, "exercises/90_a.ipynb\n90.2 right: 2 it is.\n1 of 1 right\n")
    assert (root / "exercises/90_a.ipynb").read_bytes() == before, "the learner's file is not touched"


@pytest.mark.parametrize(
    "wanted, said",
    [
        ("91", "there is no exercise 91. There are: EX=90 (90.1, 90.2).\n"),
        ("90.3", "there is no exercise 90.3. There are: EX=90 (90.1, 90.2).\n"),
        ("start", "EX=start is not an exercise. There are: EX=90 (90.1, 90.2).\n"),
    ],
)
def test_an_unknown_exercise_is_answered_with_those_there_are(root, capsys, wanted, said):
    assert run_check(root, capsys, wanted) == (2, said)


def test_a_notebook_that_is_gone_or_broken_is_named(root, capsys):
    path = root / "exercises/90_a.ipynb"
    nb = read(path)
    nb.cells = [cell for cell in nb.cells if not cell.source.startswith("## 90.2")]
    path.write_text(to_text(nb))
    assert "90_a.ipynb has no heading that begins with 90.2" in run_check(root, capsys, "90")[1]
    path.write_text("{")
    assert "90_a.ipynb is not a notebook that can be read" in run_check(root, capsys, "90")[1]
    path.unlink()
    assert run_check(root, capsys, "90") == (2, "exercises/90_a.ipynb is not there: `make exercises` makes it\n")


# ---- make learn -----------------------------------------------------------------------------------------------------


@pytest.fixture
def learn(root):
    """`make learn` under way."""
    command = [sys.executable, "-u", "-m", "tools.learn", "--root", str(root)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    yield process
    watchdog.cancel()
    process.kill()
    process.wait()
    process.stdout.close()


def until(process, start: str) -> list[str]:
    """The lines that the process prints up to one that starts with `start`."""
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    raise AssertionError(f"no line starts with {start!r}: {lines}")


def test_learn_moves_on_at_each_save_and_ends_when_all_are_right(root, learn):
    assert until(learn, "->") == [
        "exercises/90_a.ipynb",
        "90.1 is not filled in yet: replace None in answer.",
        f"{PROMPT}90.1, and save it; Ctrl-C ends this",
    ]
    fill_in(root, "one = None", "one = 3")
    assert "90.1 not yet right: 3 is not 2." in until(learn, f"{PROMPT}90.1")
    fill_in(root, "one = 3", "one = 2")
    assert until(learn, f"{PROMPT}90.2")[1:3] == [
        "90.1 right: 2 it is.",
        "90.2 is not filled in yet: replace None in answer.",
    ]
    fill_in(root, "two = None", "two = 2")
    assert until(learn, "all exercises are right")[:2] == ["exercises/90_a.ipynb", "90.2 right: 2 it is."]
    assert learn.wait(timeout=20) == 0


def test_learn_survives_a_half_saved_notebook_and_ends_at_ctrl_c(root, learn):
    until(learn, "->")
    (root / "exercises/90_a.ipynb").write_text("{")
    assert any("90_a.ipynb is not a notebook that can be read" in line for line in until(learn, f"{PROMPT}90.1"))
    learn.send_signal(signal.SIGINT)
    assert learn.stdout.read() == "\nstopped; `make learn` goes on where you are\n"
    assert learn.wait(timeout=20) == 0


def test_ctrl_c_while_an_exercise_runs_leaves_no_process(root, learn):
    until(learn, "->")
    fill_in(root, "one = None", "open('runs', 'w').close()\\nimport time\\ntime.sleep(1000)")
    while not (root / "exercises/runs").exists():
        time.sleep(0.1)
    children = psutil.Process(learn.pid).children(recursive=True)
    assert len(children) >= 2, "pytest and its kernel"
    learn.send_signal(signal.SIGINT)
    assert learn.wait(timeout=30) == 0
    assert psutil.wait_procs(children, timeout=10)[1] == []
