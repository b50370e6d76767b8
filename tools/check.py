"""Check what a learner filled in.

    make check             all exercises
    make check EX=03       those of chapter 3
    make check EX=03.2     one

Prints a verdict for each; the exit status is 0 only if all are right.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tools.exercises import exercise_ids, learners, solutions
from tools.notebooks import ROOT, read
from tools.verdicts import judge


def chosen(wanted: str, root: Path = ROOT) -> list[tuple[Path, list[str]]]:
    """The notebooks and exercises that `wanted` ("", "03", "03.2") means.

    Raises:
        ValueError: there are none such, or the notebook is gone; the message says which there are.
    """
    there = {solution: exercise_ids(read(solution)) for solution in solutions(root)}
    match = re.fullmatch(r"(?:(\d+)(?:\.(\d+))?)?", wanted.strip())
    if match is None:
        raise ValueError(f"EX={wanted} is not an exercise. {_what_there_is(there)}")
    chapter, number = match.groups()
    found = []
    for solution, ids in there.items():
        fitting = [id for id in ids if _fits(id, chapter, number)]
        if fitting:
            found.append((_learners_notebook(solution, fitting), fitting))
    if not found:
        raise ValueError(f"there is no exercise {wanted or 'yet'}. {_what_there_is(there)}")
    return found


def _fits(id: str, chapter: str | None, number: str | None) -> bool:
    of, _, n = id.partition(".")
    return (chapter is None or int(chapter) == int(of)) and (number is None or int(number) == int(n))


def _learners_notebook(solution: Path, ids: list[str]) -> Path:
    path = learners(solution)
    if not path.exists():
        raise ValueError(f"exercises/{path.name} is not there: `make exercises` makes it")
    missing = [id for id in ids if id not in exercise_ids(read(path))]
    if missing:
        raise ValueError(
            f"exercises/{path.name} has no heading that begins with {missing[0]}, so that exercise cannot be found in "
            "it. `make exercises FORCE=1` makes the notebook anew and keeps yours in exercises/mine/"
        )
    return path


def _what_there_is(there: dict[Path, list[str]]) -> str:
    each = [f"EX={path.name.partition('_')[0]} ({', '.join(ids)})" for path, ids in there.items()]
    return f"There are: {'; '.join(each) or 'none'}."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.check", description="Check what a learner filled in.")
    parser.add_argument("exercise", nargs="?", default="", metavar="EX", help="03 or 03.2; default: all")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    right = total = 0
    try:
        for path, ids in chosen(options.exercise, options.root):
            print(f"exercises/{path.name}", flush=True)
            for verdict in judge(read(path), ids, path.parent):
                print(verdict.text, flush=True)
                right += verdict.right
                total += 1
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    print(f"{right} of {total} right")
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main())
