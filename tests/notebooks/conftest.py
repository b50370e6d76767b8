"""Puts the repository's root on the path, so that these tests can import `tools`, and makes small notebooks."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


SETUP = """\
from tpcode.grading import Wrong, check, exercise


def registered(id):
    @exercise(id)
    def is_two(answer):
        if answer != 2:
            raise Wrong(f"{answer} is not 2.")
        return "2 it is."


for n in range(1, 8):
    registered(f"90.{n}")
"""


def _notebook(*cells: str, **tags: list[str]):
    """A notebook of these cells; a text that begins with # and a space, or ##, on one line is markdown.
    `c2=["setup"]` tags the third cell."""
    made = []
    for text in cells:
        markdown = text.startswith("#") and "\n" not in text
        make = nbformat.v4.new_markdown_cell if markdown else nbformat.v4.new_code_cell
        made.append(make(text, id=f"c{len(made)}"))
    for name, of_cell in tags.items():
        made[int(name[1:])].metadata["tags"] = of_cell
    return nbformat.v4.new_notebook(cells=made)


@pytest.fixture
def setup_cell():
    """The first cell of small exercise notebooks: exercises 90.1 to 90.7, whose right answer is 2."""
    return SETUP


@pytest.fixture
def notebook():
    return _notebook


@pytest.fixture
def nbval(tmp_path_factory):
    """Run nbval on a notebook where it lies, away from this project's pytest settings: the finished process."""
    scratch = tmp_path_factory.mktemp("nbval")
    (scratch / "pytest.ini").write_text("[pytest]\n")

    def run(path: Path, *options: str) -> subprocess.CompletedProcess:
        command = [
            *(sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider"),
            *("--color=no", "--nbval-current-env", "--nbval-cell-timeout=300", *options, str(path)),
        ]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "nbval.plugin"}
        return subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)

    return run
