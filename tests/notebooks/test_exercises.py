"""`make exercises`: stubs in place of solutions, nothing of a solution left, a learner's work kept."""

import nbformat
import pytest

from tools.exercises import exercise_ids, fingerprint, generate, main, sections, with_stubs
from tools.notebooks import read, to_text

SOLVED = """\
def add_up(mine):
    # BEGIN SOLUTION
    total = all_reduce(mine)
    print("solved")
    # STUB
    # if mine:
    #     total = None  # replace None
    #
    # END SOLUTION
    return total"""

STUBBED = """\
def add_up(mine):
    if mine:
        total = None  # replace None

    return total"""


@pytest.fixture
def solved(notebook):
    nb = notebook(
        "# Title",
        "import torch",
        "## 0.1 Add",
        SOLVED,
        "# Why all_reduce and not reduce",
        'check("0.1", add_up)',
        "## Exercise 0.2 More",
        "# BEGIN SOLUTION\nx = 7\n# END SOLUTION\nx",
        'check("0.2", x)',
        c4=["solution"],
    )
    for n, cell in enumerate(cell for cell in nb.cells if cell.cell_type == "code"):
        cell.execution_count = n + 1
        cell.outputs = [nbformat.v4.new_output("stream", text="0.1 right: 7")]
    return nb


def test_the_stub_stands_in_place_of_the_solution():
    assert with_stubs(SOLVED, "a cell") == STUBBED
    assert with_stubs("def f():\n    # BEGIN SOLUTION\n    return 7\n    # END SOLUTION", "") == "def f():\n    ..."
    assert with_stubs("a = 1\n\n\nb = 2", "") == "a = 1\n\n\nb = 2"


@pytest.mark.parametrize(
    "source, said",
    [
        ("# BEGIN SOLUTION\n7", "BEGIN SOLUTION has no # END"),
        ("7\n# END SOLUTION", "END SOLUTION has no # BEGIN"),
        ("# BEGIN SOLUTION\n# BEGIN SOLUTION", "stands inside a solution"),
        ("# STUB\n# 7", "STUB stands outside a solution"),
        ("# BEGIN SOLUTION\n7\n# STUB\n7\n# END SOLUTION", "is not a comment: '7'"),
    ],
)
def test_markers_that_do_not_pair_are_refused(source, said):
    with pytest.raises(ValueError, match=f"a cell: .*{said}"):
        with_stubs(source, "a cell")


def test_the_learners_notebook_holds_nothing_of_the_solution(solved):
    nb = generate(solved, "00_a.ipynb")
    text = to_text(nb)
    for secret in ("all_reduce", 'print("', "7", "SOLUTION", "STUB"):
        assert secret not in "".join(cell.source for cell in nb.cells)
    assert "right: 7" not in text and '"outputs": []' in text
    assert all(cell.execution_count is None and not cell.outputs for cell in nb.cells if cell.cell_type == "code")
    assert [cell["id"] for cell in nb.cells] == ["c0", "how-to", "c1", "c2", "c3", "c5", "c6", "c7", "c8"]
    how_to = nb.cells[1].source
    assert "`make check EX=00`" in how_to and "`make check EX=00.1`" in how_to and "solutions/00_a.ipynb" in how_to
    assert nb.cells[4].source == STUBBED
    assert solved.cells[3].source == SOLVED, "the solved notebook is not changed"


def test_sections_follow_the_headings(solved):
    solved.cells.insert(3, nbformat.v4.new_markdown_cell("## A heading without an id"))
    assert [id for id, _ in sections(solved)] == [*[""] * 2, *["0.1"] * 5, *["0.2"] * 3]
    assert exercise_ids(solved) == ["0.1", "0.2"]


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("a.ipynb", None, "should be named NN_slug.ipynb"),
        ("01_a.ipynb", None, "holds exercise 0.1, which belongs to another chapter"),
        ("00_a.ipynb", (5, "add_up"), r'exercise 0.1: its last code cell should call check\("0.1", ...\)'),
        ("00_a.ipynb", (7, "x = 7"), "exercise 0.2: nothing is between # BEGIN SOLUTION"),
        ("00_a.ipynb", (0, "## 0.1 Add"), "begins with an exercise"),
    ],
)
def test_an_unsound_solution_is_refused(solved, name, change, said):
    if change:
        solved.cells[change[0]].source = change[1]
    with pytest.raises(ValueError, match=said):
        generate(solved, name)


@pytest.fixture
def folder(solved, tmp_path):
    """A repository with one solved notebook, and the learner's notebook made from it."""
    (tmp_path / "exercises/solutions").mkdir(parents=True)
    (tmp_path / "exercises/solutions/00_a.ipynb").write_text(to_text(solved))
    assert make(tmp_path) == 0
    return tmp_path


def make(root, *options):
    return main(["--root", str(root), *options])


def change(path, n, source):
    nb = read(path)
    nb.cells[n].source = source
    path.write_text(to_text(nb))


def test_a_learners_work_is_not_overwritten(folder, capsys):
    mine = folder / "exercises/00_a.ipynb"
    fresh = mine.read_text()
    change(mine, 4, "my own answer")
    filled_in = mine.read_text()

    assert make(folder) == 1
    assert mine.read_text() == filled_in
    assert "exercises/00_a.ipynb has been filled in and is left as it is" in capsys.readouterr().out

    assert make(folder, "--force") == 0
    assert mine.read_text() == fresh
    assert (folder / "exercises/mine/00_a.1.ipynb").read_text() == filled_in
    assert "yours is kept as exercises/mine/00_a.1.ipynb" in capsys.readouterr().out


def test_two_replaced_notebooks_are_both_kept(folder):
    for answer in ("first", "second"):
        change(folder / "exercises/00_a.ipynb", 4, answer)
        make(folder, "--force")
    assert [read(folder / f"exercises/mine/00_a.{n}.ipynb").cells[4].source for n in (1, 2)] == ["first", "second"]


def test_a_generated_notebook_is_renewed_even_if_it_was_run(folder, solved, capsys):
    mine = folder / "exercises/00_a.ipynb"
    assert make(folder) == 0 and "up to date" in capsys.readouterr().out
    nb = read(mine)
    nb.cells[2].execution_count = 3
    mine.write_text(to_text(nb))
    solved.cells[1].source = "import torch as t"
    (folder / "exercises/solutions/00_a.ipynb").write_text(to_text(solved))
    assert make(folder) == 0
    assert read(mine).cells[2].source == "import torch as t"
    assert fingerprint(read(mine)) == read(mine).metadata.tpcode_exercise


def test_a_file_that_cannot_be_read_is_kept(folder):
    mine = folder / "exercises/00_a.ipynb"
    mine.write_text("{")
    assert make(folder) == 1 and mine.read_text() == "{"
