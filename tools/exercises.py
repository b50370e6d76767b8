"""Make the learner's notebooks from the solved ones.

    make exercises             exercises/solutions/NN_slug.ipynb -> exercises/NN_slug.ipynb
    make exercises FORCE=1     also where the learner has filled something in; that is kept in exercises/mine/

An author writes one notebook, solved. Every exercise is a run of cells that begins with a markdown heading that starts
with its id (`## 3.2 Cut a square weight`) and ends with the cell that calls `check("3.2", ...)`. What stands before the
first such heading is run for every exercise; a later cell with the tag `setup` is run for its own exercise and for
those after it. Inside a code cell,

    # BEGIN SOLUTION
    total = all_reduce(mine)
    # STUB
    # total = None  # replace None: the sum
    # END SOLUTION

becomes `total = None  # replace None: the sum`. Without `# STUB` it becomes `...`. A cell with the tag `solution` is
left out. Nothing else is changed, and outputs are dropped.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.notebooks import ROOT, from_text, normalise, read, to_text

BEGIN, STUB, END = (re.compile(rf"^(\s*)#+ *{word} *$") for word in ("BEGIN SOLUTION", "STUB", "END SOLUTION"))
HEADING = re.compile(r"#{1,6} +(?:Exercise +)?(\d+\.\d+)\b")
FINGERPRINT = "tpcode_exercise"  # notebook metadata: what the generated sources were

HOW_TO = """\
Each exercise has a cell to fill in and, as its last, a cell that checks it. Run them from the top: the check says
*right*, or what is wrong and what that usually means.

In a terminal, `make check EX={number}` checks the exercises of this notebook, `make check EX={first}` a single one, and
`make learn` checks the next open one whenever you save. The solved notebook is `{solution}`."""


# ---- the parts of an exercise notebook ------------------------------------------------------------------------------


def sections(nb: NotebookNode) -> list[tuple[str, NotebookNode]]:
    """Each cell with the id of the exercise it stands in, "" before the first; what a learner adds there included."""
    id, labelled = "", []
    for cell in nb.cells:
        if cell.cell_type == "markdown" and (heading := HEADING.match(cell.source.lstrip())):
            id = heading.group(1)
        labelled.append((id, cell))
    return labelled


def exercise_ids(nb: NotebookNode) -> list[str]:
    """The ids of a notebook's exercises, in its order."""
    return list(dict.fromkeys(id for id, _ in sections(nb) if id))


def is_setup(id: str, cell: NotebookNode) -> bool:
    """Whether a cell of section `id` is run for the exercises after it too."""
    return not id or "setup" in cell.metadata.get("tags", [])


def solutions(root: Path = ROOT) -> list[Path]:
    """The solved notebooks, in order."""
    return sorted((root / "exercises" / "solutions").glob("*.ipynb"))


def learners(solution: Path) -> Path:
    """Where the learner's notebook of a solved one lies."""
    return solution.parent.parent / solution.name


# ---- generating -----------------------------------------------------------------------------------------------------


def generate(solved: NotebookNode, name: str) -> NotebookNode:
    """The learner's notebook of a solved one.

    Args:
        name: the file's name, "03_column_split.ipynb".

    Raises:
        ValueError: the solved notebook breaks a rule of this module's docstring; the message says where.
    """
    nb = normalise(solved)
    require_sound(nb, name)
    nb.cells = [copy.deepcopy(cell) for cell in nb.cells if "solution" not in cell.metadata.get("tags", [])]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.source = with_stubs(cell.source, f"{name}, cell {cell['id']}")
            cell.outputs, cell.execution_count = [], None
    number = name.partition("_")[0]
    first = f"{number}.{exercise_ids(nb)[0].partition('.')[2]}"
    how_to = nbformat.v4.new_markdown_cell(
        HOW_TO.format(number=number, first=first, solution=f"solutions/{name}"), id="how-to"
    )
    nb.cells.insert(1, how_to)
    nb.metadata[FINGERPRINT] = fingerprint(nb)
    return nb


def require_sound(solved: NotebookNode, name: str) -> None:
    """ValueError unless each exercise has an id of this chapter, something to fill in, and its check as last cell."""
    number = name.partition("_")[0]
    ids = exercise_ids(solved)
    if not number.isdigit():
        raise ValueError(f"{name} should be named NN_slug.ipynb, with the chapter's number")
    if not ids:
        raise ValueError(f"{name} has no exercise: one begins with a heading such as '## {int(number)}.1 Title'")
    if sections(solved)[0][0]:
        raise ValueError(f"{name} begins with an exercise: its first cell should be the title")
    for id in ids:
        code = [cell for section, cell in sections(solved) if section == id and cell.cell_type == "code"]
        if int(id.partition(".")[0]) != int(number):
            raise ValueError(f"{name} holds exercise {id}, which belongs to another chapter")
        if not code or f'check("{id}"' not in code[-1].source:
            raise ValueError(f'{name}, exercise {id}: its last code cell should call check("{id}", ...)')
        if not any(BEGIN.match(line) for cell in code for line in cell.source.splitlines()):
            raise ValueError(f"{name}, exercise {id}: nothing is between # BEGIN SOLUTION and # END SOLUTION")


def with_stubs(source: str, where: str) -> str:
    """`source` with each solution replaced by its stub.

    Raises:
        ValueError: the markers do not pair, or a line of a stub is not a comment.
    """
    lines: list[str] = []
    state, indent, stub = "outside", "", []
    for line in source.splitlines():
        if BEGIN.match(line):
            _require(state == "outside", where, "# BEGIN SOLUTION stands inside a solution")
            state, indent, stub = "solution", BEGIN.match(line).group(1), []
        elif STUB.match(line):
            _require(state == "solution", where, "# STUB stands outside a solution, or twice in one")
            state = "stub"
        elif END.match(line):
            _require(state != "outside", where, "# END SOLUTION has no # BEGIN SOLUTION")
            lines += stub or [f"{indent}..."]
            state = "outside"
        elif state == "stub":
            stub.append(_uncommented(line, where))
        elif state == "outside":
            lines.append(line)
    _require(state == "outside", where, "# BEGIN SOLUTION has no # END SOLUTION")
    return "\n".join(lines)


def _uncommented(line: str, where: str) -> str:
    match = re.fullmatch(r"(\s*)#(?: (.*))?", line)
    _require(match is not None, where, f"a line between # STUB and # END SOLUTION is not a comment: {line!r}")
    return (match.group(1) + (match.group(2) or "")).rstrip()


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{where}: {what}")


# ---- a learner's work is kept ---------------------------------------------------------------------------------------


def fingerprint(nb: NotebookNode) -> str:
    """A digest of the cells' sources, the same whether they were run or not."""
    sources = "\0".join(f"{cell.cell_type}\n{cell.source.rstrip()}" for cell in nb.cells)
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def state(path: Path, fresh: NotebookNode) -> str:
    """How the file at `path` stands to the notebook generated now.

    "missing"; "up to date"; "run" (the same cells, with outputs); "stale" (generated earlier, from another solution);
    "edited" (not as it was generated: a learner's work).
    """
    if not path.exists():
        return "missing"
    text = path.read_text(encoding="utf-8")
    if text == to_text(fresh):
        return "up to date"
    try:
        there = from_text(text)
    except ValueError:
        return "edited"
    mark = fingerprint(there)
    if mark == fingerprint(fresh):
        return "run"
    return "stale" if mark == there.metadata.get(FINGERPRINT) else "edited"


def write(solution: Path, force: bool = False) -> tuple[str, bool]:
    """Generate the learner's notebook of `solution`; what happened, as a sentence, and whether it is now up to date."""
    fresh = generate(read(solution), solution.name)
    target = learners(solution)
    name = f"{target.parent.name}/{target.name}"
    was = state(target, fresh)
    if was == "up to date":
        return f"{name}: up to date", True
    if was == "edited" and not force:
        return f"{name} has been filled in and is left as it is (FORCE=1 replaces it and keeps a copy)", False
    kept = f"; yours is kept as {_keep(target)}" if was == "edited" else ""
    target.write_text(to_text(fresh), encoding="utf-8")
    return f"{name}: written{kept}", True


def _keep(path: Path) -> str:
    """Move a learner's notebook out of the way, under a name that is free."""
    folder = path.parent / "mine"
    folder.mkdir(exist_ok=True)
    n = 1
    while (free := folder / f"{path.stem}.{n}.ipynb").exists():
        n += 1
    path.rename(free)
    return f"{path.parent.name}/mine/{free.name}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.exercises", description="Make the learner's notebooks.")
    parser.add_argument("--force", action="store_true", help="replace notebooks that were filled in, keeping a copy")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    good = True
    for solution in solutions(options.root):
        try:
            said, done = write(solution, options.force)
        except ValueError as error:
            said, done = str(error), False
        print(said)
        good = good and done
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
