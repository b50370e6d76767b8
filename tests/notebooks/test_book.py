"""The book's own notebooks: chapters print what is stored, solutions pass, stubs fail, each for its own reason."""

import json
import subprocess
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tools.exercises import exercise_ids, fingerprint, generate, learners, solutions, state
from tools.notebooks import ROOT, differs_from_commit, every_notebook, from_text, problems, read, to_text
from tools.verdicts import selection

CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
SOLUTIONS = solutions()

pytestmark = pytest.mark.timeout(600)


def name(path):
    return path.name if path.parent.name == "chapters" else f"{path.parent.name}/{path.name}"


def test_there_are_notebooks():
    assert CHAPTERS and SOLUTIONS


@pytest.mark.parametrize("path", every_notebook(), ids=name)
def test_notebook_is_in_normal_form(path):
    assert problems(path.read_text(encoding="utf-8")) == [], "make notebooks runs and normalises it"


@pytest.mark.parametrize("path", every_notebook(), ids=name)
def test_notebook_prints_what_is_stored(path, nbval):
    run = nbval(path, "--nbval")
    assert run.returncode == 0, run.stdout[-8000:]


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_exercises_are_up_to_date(path):
    mine, fresh = learners(path), generate(read(path), path.name)
    how = state(mine, fresh)
    if how in ("edited", "run") and differs_from_commit(mine):
        pytest.skip(f"{name(mine)} is yours, not yet committed: `make exercises FORCE=1` would renew it")
    assert how == "up to date", "make exercises renews it"


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_no_line_of_a_solution_is_left(path):
    """Not by the generator's own reading of the markers: a line of code is secret if it only stands in solutions."""
    solved = read(path)
    secret, shown = set(), set()
    for cell in solved.cells:
        inside = "solution" in cell.metadata.get("tags", [])
        for line in map(str.strip, cell.source.splitlines()):
            if line == "# BEGIN SOLUTION":
                inside = True
            elif line in ("# STUB", "# END SOLUTION"):
                inside = False
            else:
                (secret if inside else shown).add(line.removeprefix("# "))
    text = json.dumps(generate(solved, path.name))
    assert secret, "a solved notebook has a solution"
    assert [line for line in secret - shown if line and json.dumps(line)[1:-1] in text] == []


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_each_exercise_uses_its_own_cells_and_the_setup_only(path, tmp_path):
    """So that `make check EX=NN.2` says the same as the whole notebook: no name comes from another exercise."""
    solved = read(path)
    for id in exercise_ids(solved):
        alone = tmp_path / f"{id}.ipynb"
        alone.write_text(to_text(selection(solved, [id])))
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", str(alone)]
        run = subprocess.run(ruff, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_every_stub_fails_and_says_that_it_is_not_filled_in(path, monkeypatch):
    """An unedited exercise that passes would be skipped by its reader; one that raises something else confuses them.
    In this process, where ranks are warm; `make check` itself is tested in test_check_and_learn.py."""
    monkeypatch.chdir(path.parent.parent)
    stubs = generate(read(path), path.name)
    ids = exercise_ids(stubs)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts its own in this place
    shell, said = InteractiveShell(config=Config(HistoryManager={"enabled": False})), {}
    for cell in selection(stubs, ids).cells:
        id = cell.metadata["exercise"]
        if id not in said:
            ran = shell.run_cell(cell.source)
            if error := ran.error_before_exec or ran.error_in_exec:
                said[id] = str(error)
    assert list(said) == ids
    assert [text for id, text in said.items() if not text.startswith(f"{id} is not filled in yet: ")] == []


# ---- these tests can fail -------------------------------------------------------------------------------------------


@pytest.fixture
def executed(notebook, tmp_path):
    """A small chapter in normal form, as a file."""
    nb = notebook("# Title", "print('all ranks agree')", "6 * 7")
    for n, cell in enumerate(nb.cells[1:], 1):
        cell.execution_count = n
    nb.cells[1].outputs = [{"output_type": "stream", "name": "stdout", "text": "all ranks agree\n"}]
    nb.cells[2].outputs = [
        {"output_type": "execute_result", "data": {"text/plain": "42"}, "metadata": {}, "execution_count": 2}
    ]
    path = tmp_path / "00_a.ipynb"
    path.write_text(to_text(from_text(json.dumps(nb))))
    return path


def test_a_changed_output_is_noticed(executed, nbval):
    assert nbval(executed, "--nbval").returncode == 0
    executed.write_text(executed.read_text().replace("all ranks agree\\n", "no ranks agree\\n"))
    run = nbval(executed, "--nbval")
    assert run.returncode == 1 and "Cell outputs differ" in run.stdout


def test_an_unrun_cell_passes_nbval_but_not_the_normal_form(executed, nbval):
    nb = read(executed)
    nb.cells[2].execution_count, nb.cells[2].outputs = None, []
    executed.write_text(to_text(nb))
    assert nbval(executed, "--nbval").returncode == 0, "nbval's trap: what was not run is not compared"
    assert problems(executed.read_text()) == ["code cell 2 (6 * 7): was not run"]


def test_a_stub_fails_under_plain_nbval_too(nbval, tmp_path):
    """The same cell judges without this project's tools; that the solution passes so is tested above."""
    solution = next(path for path in SOLUTIONS if path.name.startswith("00_"))
    stub = tmp_path / "stub.ipynb"
    stub.write_text(to_text(generate(read(solution), solution.name)))
    run = nbval(stub, "--nbval-lax", "-x")
    assert run.returncode == 1 and "0.1 is not filled in yet: replace None in add_up." in run.stdout


def test_a_fingerprint_ignores_outputs_and_sees_sources(executed):
    nb = read(executed)
    before = fingerprint(nb)
    nb.cells[2].outputs = []
    assert fingerprint(nb) == before
    nb.cells[2].source += " "
    assert fingerprint(nb) == before
    nb.cells[2].source = "6 * 8"
    assert fingerprint(nb) != before
