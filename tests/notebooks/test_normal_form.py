"""`make notebooks`: what normal form is, that it is reached by running, and what is refused."""

import subprocess
import sys

import nbformat
import pytest

from tools.notebooks import changed, execute, from_text, named, normalise, problems, read, refresh, to_text


def output(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def run(nb, *counts):
    """Mark the notebook's code cells as executed with these counts."""
    for cell, count in zip([cell for cell in nb.cells if cell.cell_type == "code"], counts):
        cell.execution_count = count
    return nb


def test_running_normalises_and_running_again_changes_nothing(notebook, tmp_path):
    nb = notebook(
        "# Title",
        "import os, sys\n\nprint('one'); print('two', file=sys.stderr); print('three')",
        "os.path.basename(os.getcwd())",
        "",
    )
    nb.cells[1].metadata = {"tags": ["hide-input"], "mystnb": {"image": {"alt": "a"}}, "collapsed": True}
    nb.metadata = {"widgets": {"state": {}}, "kernelspec": {"name": "other", "display_name": "Other"}, "extra": 1}
    path = tmp_path / "00_a.ipynb"
    path.write_text(to_text(nb))
    assert refresh(path) == []
    text = path.read_text()
    assert text.endswith("}\n") and problems(text) == []

    there = from_text(text)
    assert list(there.metadata) == ["kernelspec", "language_info"]
    assert [cell["id"] for cell in there.cells] == ["c0", "c1", "c2"], "ids are kept, the empty cell is not"
    assert [cell.get("execution_count") for cell in there.cells] == [None, 1, 2]
    assert there.cells[1].metadata == {"tags": ["hide-input"], "mystnb": {"image": {"alt": "a"}}}
    assert [(out.name, out.text) for out in there.cells[1].outputs] == [("stdout", "one\nthree\n"), ("stderr", "two\n")]
    assert there.cells[2].outputs[0].data["text/plain"] == f"'{tmp_path.name}'", "it ran in its own folder"
    assert there.cells[2].outputs[0].execution_count == 2

    refresh(path)
    assert path.read_text() == text


def test_missing_and_doubled_ids_are_derived_from_the_source(notebook):
    nb = notebook("# Title", "1", "1", "1")
    nb.cells[2]["id"] = nb.cells[1]["id"] = "not an id!"
    nb.cells[3]["id"] = "c0"
    ids = [cell["id"] for cell in normalise(nb).cells]
    assert len(set(ids)) == 4 and ids == [cell["id"] for cell in normalise(nb).cells]
    nb.cells[1].source = "2"
    assert normalise(nb).cells[1]["id"] != ids[1] and normalise(nb).cells[0]["id"] == "c0"


def test_widget_views_and_overwritten_lines_go(notebook):
    nb = run(notebook("1"), 1)
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Figure()"}
    nb.cells[0].outputs = [
        nbformat.v4.new_output("display_data", data=view),
        nbformat.v4.new_output("display_data", data={k: v for k, v in view.items() if "widget" in k}),
        output(" 10%\r100%\n"),
    ]
    outputs = normalise(nb).cells[0].outputs
    assert [dict(out.get("data", {})) for out in outputs] == [{"text/plain": "Figure()"}, {}]
    assert outputs[1].text == "100%\n"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda cell: cell.update(execution_count=None), "was not run"),
        (lambda cell: cell.update(execution_count=7), "has count 7: the cells were not run once each"),
        (lambda cell: cell.metadata.update(tags=["raises-exception"]), "has the tag raises-exception"),
        (lambda cell: cell.metadata.update(tags=["nbval-skip"]), "has the tag nbval-skip"),
        (lambda cell: cell.metadata.update(tags=["skip-execution"]), "has the tag skip-execution"),
        (lambda cell: cell.update(source="# NBVAL_SKIP\n1"), "has the marker NBVAL_SKIP"),
        (lambda cell: cell.outputs.append(nbformat.v4.new_output("error", ename="E", evalue="x")), "ended in E: x"),
        (lambda cell: cell.outputs.append(output("in /home/someone/x")), "shows '/home/someone'"),
        (lambda cell: cell.outputs.append(output("<f at 0x7f00aa11bb22>")), "shows '0x7f00aa11bb22'"),
        (lambda cell: cell.metadata.update(collapsed=True), "not in normal form"),
    ],
)
def test_what_is_not_normal_is_named(notebook, change, said):
    nb = run(normalise(notebook("# Title", "x = 1", "2")), 1, 2)
    assert problems(to_text(nb)) == []
    change(nb.cells[1])
    found = problems(to_text(nb))
    assert found and said in found[0], found


def test_a_cell_that_fails_leaves_the_file_as_it_was(notebook, tmp_path):
    path = tmp_path / "00_a.ipynb"
    path.write_text(before := to_text(notebook("1 / 0")))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        refresh(path)
    assert path.read_text() == before


def test_a_cell_cannot_be_kept_from_running(notebook, tmp_path):
    done = execute(notebook("2", c0=["skip-execution"]), tmp_path)
    assert done.cells[0].execution_count == 1


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "00_a.ipynb").write_text("{")
    with pytest.raises(ValueError, match="00_a.ipynb is not a notebook that can be read"):
        read(tmp_path / "00_a.ipynb")


@pytest.fixture
def book(tmp_path, notebook):
    """A repository with two chapters and a solution, committed."""
    for name in ("chapters/00_start.ipynb", "chapters/11_late.ipynb", "exercises/solutions/00_start.ipynb"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_text(normalise(notebook("# Title"))))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path


def test_notebooks_are_found_by_number_slug_and_path(book):
    def found(*names):
        return [str(path.relative_to(book)) for path in named(list(names), book)]

    chapter_0 = ["chapters/00_start.ipynb", "exercises/solutions/00_start.ipynb"]
    assert found("00") == found("0") == found("start") == found("00_start") == chapter_0
    assert found("11") == ["chapters/11_late.ipynb"] == found(str(book / "chapters/11_late.ipynb"))
    assert len(found("all")) == 3 and found("00", "start") == chapter_0
    with pytest.raises(ValueError, match="no notebook is named '1'; there are: 00_start, 11_late"):
        found("1")


def test_only_what_changed_is_run(book, notebook):
    assert changed(book) == []
    late = book / "chapters/11_late.ipynb"
    late.write_text(to_text(normalise(notebook("# Another title"))))
    new = book / "chapters/12_new.ipynb"
    new.write_text(to_text(normalise(notebook("# New"))))
    assert changed(book) == [late, new]


def test_jupytext_keeps_ids_tags_outputs_and_normal_form(notebook, tmp_path):
    """The comfortable way to edit: to py:percent, edit, --update."""
    path = tmp_path / "00_a.ipynb"
    path.write_text(to_text(notebook("# Title", "x = 2", "x", c1=["hide-input"])))
    refresh(path)
    before = path.read_text()

    def jupytext(*options):
        subprocess.run([sys.executable, "-m", "jupytext", "--quiet", *options], cwd=tmp_path, check=True)

    jupytext("--to", "py:percent", path.name)
    jupytext("--to", "ipynb", "--update", "00_a.py")
    assert path.read_text() == before

    script = tmp_path / "00_a.py"
    script.write_text(script.read_text().replace("x = 2", "x = 3") + "\n# %%\nx + 1\n")
    jupytext("--to", "ipynb", "--update", "00_a.py")
    refresh(path)
    old, new = from_text(before), read(path)
    assert [cell["id"] for cell in new.cells[:3]] == [cell["id"] for cell in old.cells]
    assert new.cells[1].metadata.tags == ["hide-input"]
    assert [cell.outputs[0].data["text/plain"] for cell in new.cells[2:]] == ["3", "4"]
