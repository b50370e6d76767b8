"""Watch the exercise notebooks: check the first open exercise now and whenever a notebook is saved.

    make learn             from the first exercise on
    make learn EX=03       from chapter 3 on, chapter 3 only

Moves on when an exercise is right, says what to open next, and ends when all are right or at Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from watchfiles import watch

from tools.check import chosen
from tools.notebooks import ROOT, read
from tools.verdicts import Verdict, judge


class Course:
    """The exercises in order, and which of them were right when last run."""

    def __init__(self, wanted: str, root: Path):
        self.notebooks = chosen(wanted, root)
        self.done: set[str] = set()

    def advance(self) -> Verdict | None:
        """Run exercises from the first open one on, up to one that is not right: its verdict, or None if all are."""
        for path, ids in self.notebooks:
            if not (open_ids := [id for id in ids if id not in self.done]):
                continue
            print(f"exercises/{path.name}", flush=True)
            for verdict in _verdicts(path, open_ids):
                print(verdict.text, flush=True)
                if not verdict.right:
                    return verdict
                self.done.add(verdict.id)
        return None

    def path_of(self, id: str) -> Path:
        return next(path for path, ids in self.notebooks if id in ids)


def _verdicts(path: Path, ids: list[str]) -> Iterator[Verdict]:
    try:
        yield from judge(read(path), ids, path.parent)
    except (ValueError, RuntimeError) as error:  # half saved, or broken by hand: the next save is another try
        yield Verdict(ids[0], "error", str(error))


def follow(course: Course) -> None:
    """Run until every exercise is right, each time that a notebook of the course is saved."""
    paths = {path for path, _ in course.notebooks}
    folder = next(iter(paths)).parent
    # With a timeout the first round comes at once, and what is saved while exercises run is seen in the next round.
    saves = watch(
        folder,
        watch_filter=lambda _, p: Path(p) in paths,
        recursive=False,
        yield_on_timeout=True,
        rust_timeout=500,
        debounce=400,
        raise_interrupt=True,
    )
    next(saves)
    failing = course.advance()
    while failing is not None:
        print(
            f"-> open exercises/{course.path_of(failing.id).name}, exercise {failing.id}, and save it; "
            "Ctrl-C ends this",
            flush=True,
        )
        while not next(saves):
            pass
        failing = course.advance()
    print("all exercises are right")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.learn", description="Check the first open exercise at each save.")
    parser.add_argument("exercise", nargs="?", default="", metavar="EX", help="03 or 03.2; default: all")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        follow(Course(options.exercise, options.root.resolve()))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; `make learn` goes on where you are")
    return 0


if __name__ == "__main__":
    sys.exit(main())
