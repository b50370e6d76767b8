"""The stored cells of a chapter, which the tests of chapters read."""

import contextlib
import io
import json
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"


def cells_of(number: int) -> dict[str, dict]:
    """The chapter's cells by id."""
    (notebook,) = CHAPTERS.glob(f"{number:02}_*.ipynb")
    return {cell["id"]: cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]}


def source(cell: dict) -> str:
    return "".join(cell["source"])


def printed(cell: dict) -> str:
    """What a code cell has printed."""
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def prose(cells: dict[str, dict]) -> str:
    """All markdown of the chapter."""
    return "\n".join(source(cell) for cell in cells.values() if cell["cell_type"] == "markdown")


def defined_by(cells: dict[str, dict], *ids: str, **given) -> dict:
    """The names that these cells define, run one after the other in this process; `given` are there before."""
    names = dict(given)
    with contextlib.redirect_stdout(io.StringIO()):
        for id in ids:
            exec(source(cells[id]), names)
    return names
