"""What a learner needs of an exception that their code caused: their own lines, without the grading's."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parent.parent)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
FRAME = re.compile(r'  File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<where>.+))?')
CELL = re.compile(r"ipykernel_\d+|<ipython-input|^<stdin>$|^<string>$")


class Wrong(AssertionError):
    """An answer is not right; the message is for the learner.

    Jupyter shows the message alone, without a traceback, since the fault is not in the lines a traceback would show.
    """

    verdict = "not yet right"

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Unfilled(Wrong):
    """An answer is still the stub; the message says what to replace."""

    verdict = "is not filled in yet"


def explain(error: Exception) -> Wrong | None:
    """What to tell the learner whose code raised `error` in a check, here or on a rank; None if the fault is ours."""
    if isinstance(error, Wrong):
        return error
    runtime = sys.modules.get("tpcode.runtime")  # not imported here: without ranks it is not needed
    if runtime and isinstance(error, runtime.RankError):
        if isinstance(error.exception, Wrong):
            return error.exception
        says_all = isinstance(error, (runtime.RankTimeout, runtime.CollectiveMismatch)) or not error.traceback
        if says_all:  # its message is for the learner; of the traceback, their own lines
            return Wrong("\n".join([error.args[0], *_frames(learners_part(error.traceback))]))
        return _raised(f"your code raised on rank {error.rank}.", error.traceback)
    if any(is_learners(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        return _raised("your code raised.", "".join(traceback.format_exception(error)))
    return None


def _raised(what: str, text: str) -> Wrong:
    own = learners_part(text)
    if own.rsplit("\n", 1)[-1].startswith("NotImplementedError"):
        return Unfilled("replace the line that raises NotImplementedError.")
    return Wrong(f"{what}\n{own}")


def _frames(traceback: str) -> list[str]:
    return [line for line in traceback.splitlines() if line.startswith("  ")]


def is_learners(file: str) -> bool:
    """Whether a traceback's file is neither of this package nor an installed one."""
    return not file.startswith((PACKAGE, *LIBRARIES)) and not file.startswith("<frozen")


def learners_part(text: str) -> str:
    """A traceback's text without the frames of this package and of installed ones; the error itself remains."""
    kept: list[str] = []
    keep = True
    for line in text.rstrip().splitlines():
        if frame := FRAME.match(line):
            keep = is_learners(frame["file"])
            line = _in_words(frame)
        elif not line.startswith("    "):  # not a line of code below a frame: the error, or a chained one
            keep = not line.startswith("Traceback (most recent call last)")
        if keep:
            kept.append(line)
    return "\n".join(kept)


def _in_words(frame: re.Match) -> str:
    file = "your cell" if CELL.search(frame["file"]) else Path(frame["file"]).name
    where = f", in {frame['where']}" if frame["where"] and frame["where"] != "<module>" else ""
    return f"  {file}, line {frame['line']}{where}"
