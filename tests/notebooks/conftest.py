"""Puts the repository's root on the path, so that these tests can import `tools`, and makes small notebooks."""

import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


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
def notebook():
    return _notebook
