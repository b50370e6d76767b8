"""Execute the notebooks and bring them into normal form, so that running twice leaves no difference.

    make notebooks             run what differs from the last commit, or is not in normal form
    make notebooks NB=00       run chapter 0 and the solutions of its exercises
    make notebooks NB=all      run every chapter and every solution
    python -m tools.notebooks --check [NB ...]    run nothing; say what is not in normal form

Normal form: every cell executed, top to bottom, in a fresh kernel whose working directory is the notebook's folder
(as Jupyter and nbval have it); counts 1, 2, 3, ...; ids kept; of the metadata only what a page or a test reads; no
widget state. Outputs are never rewritten beyond that, because nbval compares them with what the code prints: an output
that names a path or an address of this machine is refused, and the cell must print something else.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("chapters", "exercises/solutions")
CELL_TIMEOUT = 300  # seconds, as nbval is given

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_CELL_METADATA = ("mystnb", "tags")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# Under these a cell is not run, or may fail unseen, and the page would show what nobody checked.
FORBIDDEN_TAGS = {"raises-exception", "nbval-raises-exception", "nbval-skip", "skip-execution"}
FORBIDDEN_COMMENT = re.compile(r"^\s*#+\s*(NBVAL_SKIP|NBVAL_RAISES_EXCEPTION)\s*$", re.MULTILINE)
MACHINE_TRACES = re.compile(
    r"/(home|Users)/\w+|/(root|tmp)/|[A-Za-z]:\\Users|site-packages|ipykernel_\d+|\b0x[0-9a-f]{8,}"
)
CELL_ID = re.compile(r"[a-zA-Z0-9-_]{1,64}")


# ---- reading and writing --------------------------------------------------------------------------------------------


def read(path: Path) -> NotebookNode:
    """The notebook at `path`. ValueError if it is not one."""
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a notebook that can be read: {error}") from None


def from_text(text: str) -> NotebookNode:
    """The notebook that `text` holds, in nbformat 4."""
    try:
        return nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat has no common base for what it raises on broken files
        raise ValueError(str(error) or type(error).__name__) from None


def to_text(nb: NotebookNode) -> str:
    """The one text of a notebook: sorted keys, one space of indentation, a newline at the end."""
    return nbformat.writes(nb, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


# ---- normal form ----------------------------------------------------------------------------------------------------


def normalise(nb: NotebookNode) -> NotebookNode:
    """A copy of `nb` in normal form; what was not executed stays marked as not executed."""
    nb = copy.deepcopy(nb)
    nb.cells = [cell for cell in nb.cells if cell.source.strip()]
    nb.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    nb.nbformat, nb.nbformat_minor = 4, 5
    used: set[str] = set()
    count = 0
    for cell in nb.cells:
        cell.source = cell.source.rstrip()
        cell.metadata = nbformat.from_dict({k: cell.metadata[k] for k in KEPT_CELL_METADATA if cell.metadata.get(k)})
        cell["id"] = _stable_id(cell, used)
        used.add(cell["id"])
        if cell.cell_type == "code":
            executed = cell.execution_count is not None
            count += executed
            cell.execution_count = count if executed else None
            cell.outputs = _normal_outputs(cell.outputs, cell.execution_count)
    return nb


def _stable_id(cell: NotebookNode, used: set[str]) -> str:
    """The cell's own id if it is valid and new, else one derived from its source."""
    own = cell.get("id", "")
    if CELL_ID.fullmatch(own) and own not in used:
        return own
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
    derived, n = digest, 1
    while derived in used:
        n += 1
        derived = f"{digest}-{n}"
    return derived


def _normal_outputs(outputs: list[NotebookNode], count: int | None) -> list[NotebookNode]:
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            _append_stream(kept, output)
            continue
        if "data" in output:
            output.data.pop(WIDGET_VIEW, None)
            if not output.data:
                continue
        if output.output_type == "execute_result":
            output.execution_count = count
        kept.append(output)
    for output in kept:
        if output.output_type == "stream":  # a progress bar overwrites its line: keep what stands at the end
            output.text = re.sub(r"^.*\r(?=[^\n])", "", output.text, flags=re.MULTILINE)
    return kept


def _append_stream(kept: list[NotebookNode], output: NotebookNode) -> None:
    """Join what was printed in one go: how a stream is cut into pieces, and interleaved, differs from run to run."""
    for earlier in reversed(kept):
        if earlier.output_type != "stream":
            break
        if earlier.name == output.name:
            earlier.text += output.text
            return
    kept.append(output)


def problems(text: str) -> list[str]:
    """What keeps the notebook with this text from being in normal form, a sentence each; empty if it is."""
    nb = from_text(text)
    found: list[str] = []
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        found += [f"code cell {number} ({_first_line(cell)}): {what}" for what in _cell_problems(cell, number)]
    if not found and to_text(normalise(nb)) != text:
        found.append("ids, metadata or layout are not in normal form")
    return found


def _cell_problems(cell: NotebookNode, number: int):
    if cell.execution_count is None:
        yield "was not run"
    elif cell.execution_count != number:
        yield f"has count {cell.execution_count}: the cells were not run once each, top to bottom"
    for tag in sorted(FORBIDDEN_TAGS.intersection(cell.metadata.get("tags", []))):
        yield f"has the tag {tag}, under which it can fail unseen"
    for marker in FORBIDDEN_COMMENT.findall(cell.source):
        yield f"has the marker {marker}, under which it can fail unseen"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"ended in {output.ename}: {output.evalue}"
        elif trace := MACHINE_TRACES.search(_printed(output)):
            yield f"shows {trace.group()!r}, which is this machine's: print something that is the same everywhere"


def _printed(output: NotebookNode) -> str:
    """The text of an output that a reader sees; pictures in base64 can hold anything."""
    data = output.get("data", {})
    return output.get("text", "") + "".join(
        value for kind, value in data.items() if isinstance(value, str) and not kind.startswith("image/")
    )


def _first_line(cell: NotebookNode) -> str:
    return cell.source.strip().partition("\n")[0][:60]


# ---- executing ------------------------------------------------------------------------------------------------------


def execute(nb: NotebookNode, folder: Path) -> NotebookNode:
    """Run every cell of a copy of `nb` in a fresh kernel that stands in `folder`.

    Raises:
        RuntimeError: a cell failed, ran past CELL_TIMEOUT seconds, or the kernel died.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError

    nb = copy.deepcopy(nb)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        nb,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        skip_cells_with_tag="",
        extra_arguments=["--log-level=ERROR"],
    )
    try:
        client.execute()
    except (CellExecutionError, CellControlSignal, DeadKernelError, TimeoutError) as error:
        raise RuntimeError(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()) from None
    return nb


def refresh(path: Path) -> list[str]:
    """Run and normalise the notebook at `path`; the file changes only if it ran through. Its remaining problems."""
    text = path.read_text(encoding="utf-8")
    new = to_text(normalise(execute(normalise(read(path)), path.parent)))
    if new != text:
        path.write_text(new, encoding="utf-8")
    return problems(new)


# ---- which ----------------------------------------------------------------------------------------------------------


def every_notebook(root: Path = ROOT) -> list[Path]:
    """The chapters and the solutions, in reading order."""
    return sorted((p for folder in FOLDERS for p in (root / folder).glob("*.ipynb")), key=lambda p: (p.name, str(p)))


def named(names: list[str], root: Path = ROOT) -> list[Path]:
    """The notebooks that `names` mean: a number ("00" or "0"), a slug, a path, or "all".

    Raises:
        ValueError: a name fits none; the message lists what there is.
    """
    every = every_notebook(root)
    chosen: list[Path] = []
    for name in names:
        fitting = [path for path in every if name == "all" or _means(name, path)]
        if not fitting:
            there = ", ".join(sorted({path.stem for path in every})) or "none yet"
            raise ValueError(f"no notebook is named {name!r}; there are: {there}")
        chosen += [path for path in fitting if path not in chosen]
    return chosen


def _means(name: str, path: Path) -> bool:
    number, _, slug = path.stem.partition("_")
    if name.isdigit():
        return number.isdigit() and int(name) == int(number)
    return name in (path.stem, slug) or Path(name).resolve() == path.resolve()


def changed(root: Path = ROOT) -> list[Path]:
    """Those that differ from the last commit or are not in normal form; without git, all."""
    return [
        path
        for path in every_notebook(root)
        if differs_from_commit(path, root) or problems(path.read_text(encoding="utf-8"))
    ]


def differs_from_commit(path: Path, root: Path = ROOT) -> bool:
    """Whether `path` is changed or new against the last commit; True where git cannot say."""
    git = ["git", "-C", str(root), "status", "--porcelain", "--", str(path)]
    try:
        said = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        return True
    return said.returncode != 0 or bool(said.stdout.strip())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.notebooks", description="Execute and normalise the notebooks.")
    parser.add_argument("names", nargs="*", metavar="NB", help="a number, a slug, a path, or all; default: the changed")
    parser.add_argument("--check", action="store_true", help="run nothing, say what is not in normal form")
    options = parser.parse_args(arguments)
    try:
        if options.names:
            paths = named(options.names)
        else:
            paths = every_notebook() if options.check else changed()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not paths:
        print(
            "nothing to do: every chapter and every solution is as committed and in normal form (NB=all runs them all)"
        )
    return max([_report(path, options.check) for path in paths], default=0)


def _report(path: Path, only_check: bool) -> int:
    """Run or check one notebook and print the outcome; 1 if something is wrong."""
    name = path.relative_to(ROOT)
    if not only_check:
        print(f"running {name}", flush=True)
    try:
        found = problems(path.read_text(encoding="utf-8")) if only_check else refresh(path)
    except (RuntimeError, ValueError) as error:
        print(f"{name} is left as it was. {error}")
        return 1
    for problem in found:
        print(f"{name}: {problem}")
    if not found and only_check:
        print(f"{name}: in normal form")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
