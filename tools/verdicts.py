"""What becomes of a learner's exercises: runs them through nbval and says a verdict for each, in the learner's words.

Used by `make check` and `make learn`. A temporary copy is run, so the learner's file is not touched and its stored
outputs do not matter. All exercises asked for share one kernel; one that fails does not stop the next. If the kernel
dies or hangs, the rest are run in a new one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.exercises import is_setup, sections
from tools.nbval_child import MARK
from tools.notebooks import CELL_TIMEOUT, ROOT, to_text
from tpcode.grading.failures import is_learners, learners_part

RANK_ERRORS = ("RankError", "RankTimeout", "CollectiveMismatch")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FAULT_HANDLER = re.compile(r"(Current thread|Thread) 0x|Extension modules:|  \.\.\.|  File (?!.*/ipykernel_\d+/)")


@dataclass(frozen=True)
class Verdict:
    """What became of exercise `id`. `kind` is right, wrong (by its check), error (its code raised), hung, died, or
    setup (the cells before the exercises failed). `text` is for the learner."""

    id: str
    kind: str
    text: str

    @property
    def right(self) -> bool:
        return self.kind == "right"


def judge(nb: NotebookNode, ids: list[str], folder: Path, timeout: float = CELL_TIMEOUT) -> Iterator[Verdict]:
    """The verdicts on the exercises `ids` of a notebook, each as soon as it is known.

    Args:
        folder: where the kernel stands, as in Jupyter: the notebook's folder.
        timeout: seconds that a cell may run.
    """
    left = list(ids)
    while left:
        known = len(left)
        for verdict in _in_one_kernel(nb, left, folder, timeout):
            left.remove(verdict.id)
            yield verdict
        if len(left) == known:
            raise RuntimeError(f"exercises {', '.join(left)} were run and nothing was said about them")


def _in_one_kernel(nb: NotebookNode, ids: list[str], folder: Path, timeout: float) -> Iterator[Verdict]:
    """Verdicts until all are known or the kernel is gone."""
    ids = list(ids)
    with tempfile.TemporaryDirectory(prefix="tpcode-check-") as scratch:
        copy = Path(scratch) / "exercise.ipynb"
        copy.write_text(to_text(selection(nb, ids)), encoding="utf-8")
        said = {}
        for report in _reports(copy, folder, timeout):
            id = report["exercise"]
            for line in report["printed"].splitlines():
                if line.startswith(f"{id} right: "):
                    said[id] = line
            if report["kind"] != "ran" and not id:
                yield from (Verdict(each, "setup", _words(each, report, in_setup=True)) for each in ids)
            elif report["kind"] != "ran":
                yield Verdict(id, _kind(report), _words(id, report))
                ids.remove(id)
            elif id and report["last"]:
                yield Verdict(id, "right", said.get(id, f"{id} right"))
                ids.remove(id)


def selection(nb: NotebookNode, ids: list[str]) -> NotebookNode:
    """The code cells that the exercises `ids` need, each labelled with its exercise; after the last of an exercise one
    more that asks whether its check was called."""
    needed = sections(nb)
    needed = needed[: max((n for n, (id, _) in enumerate(needed, 1) if id in ids), default=0)]
    cells = []
    for id in dict.fromkeys(id for id, _ in needed):
        code = [cell for section, cell in needed if section == id and cell.cell_type == "code"]
        if id in ids:
            cells += [_labelled(cell.source, id) for cell in code]
            ask = f'from tpcode.grading import require_checked\n\nrequire_checked("{id}")'
            cells.append(_labelled(ask, id, last=True))
        else:
            cells += [_labelled(cell.source, "") for cell in code if is_setup(id, cell)]
    return nbformat.v4.new_notebook(cells=cells)


def _labelled(source: str, id: str, last: bool = False) -> NotebookNode:
    return nbformat.v4.new_code_cell(source, metadata={"exercise": id, "last": last})


def _reports(copy: Path, folder: Path, timeout: float) -> Iterator[dict]:
    """What the process that runs nbval says of each cell, as it says it."""
    command = [sys.executable, "-m", "tools.nbval_child", str(copy), str(folder), str(timeout)]
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "nbval.plugin",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code says where it came from
    }
    environment.pop("PYTEST_ADDOPTS", None)
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    noise = []
    try:
        for line in child.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                noise.append(line)
        if child.wait() not in (0, 1, 2):  # passed, failed, stopped after a dead kernel
            raise RuntimeError(f"the notebook could not be run (status {child.returncode}):\n{''.join(noise)}")
    finally:
        child.stdout.close()
        _stop(child)


def _stop(child: subprocess.Popen) -> None:
    """End the child as Ctrl-C would, so that pytest ends its kernel, which ends the ranks."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- words ----------------------------------------------------------------------------------------------------------


def _kind(report: dict) -> str:
    return "wrong" if report["kind"] == "error" and report["ename"] == "Wrong" else report["kind"]


def _words(id: str, report: dict, in_setup: bool = False) -> str:
    """The learner's text for a cell that did not end well."""
    where = f"{id}: a cell that it needs, before it," if in_setup else f"{id}: your code"
    match _kind(report):
        case "wrong":
            return report["evalue"]
        case "hung":
            return (
                f"{id} did not end in time and was stopped. A loop without an end, or a rank that waits for others?\n"
                + (learners_lines(report["traceback"]) or _quoted(report["source"]))
            ).rstrip()
        case "died":
            native = _native_tail(report["native"])
            return (
                f"{id}: the kernel died ({report['evalue']}) while it ran\n{_quoted(report['source'])}{native}".rstrip()
            )
        case _ if report["ename"] in RANK_ERRORS:
            return f"{where} stopped with an error.\n{learners_part(report['evalue'])}"
        case _:
            return f"{where} stopped with an error.\n{learners_lines(report['traceback']) or report['evalue']}"


def learners_lines(traceback: list[str]) -> str:
    """A Jupyter traceback without its colours, its banner and the frames of this project and of installed packages."""
    frames = [COLOURS.sub("", entry).rstrip() for text in traceback for entry in text.split("\n\n")]
    kept = [frame for frame in frames if frame.strip() and not _is_banner(frame) and not _is_ours(frame)]
    return "\n".join(re.sub(r"Cell In\[\d+\]", "your cell", frame) for frame in kept)


def _is_banner(frame: str) -> bool:
    return frame.startswith("-----") or "Traceback (most recent call last)" in frame


def _is_ours(frame: str) -> bool:
    file = re.match(r"File (.+?):\d+", frame)
    if not file:
        return False
    path = file.group(1)
    return "site-packages" in path or "/tpcode/" in path or not is_learners(str(Path(path).expanduser()))


def _quoted(source: str, most: int = 12) -> str:
    lines = source.splitlines()
    return "".join(f"    {line}\n" for line in lines[:most] + ["..."] * (len(lines) > most))


def _native_tail(text: str, most: int = 8) -> str:
    """What native code wrote before it died; of what Python's fault handler adds, the error and the learner's lines."""
    lines = [line for line in text.splitlines() if line.strip() and not FAULT_HANDLER.match(line)]
    return "".join(f"{line}\n" for line in lines[-most:])
