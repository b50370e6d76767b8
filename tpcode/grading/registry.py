"""`check` and where it finds the check of an exercise: one module per chapter, one function per exercise.

A chapter's module (`ch03.py`) registers its checks:

    @exercise("3.1")
    def column_split_by_hand(Y0, Y1):
        ...                     # raises Wrong, or returns what is right as a short text
        return "both halves of Y and dX."

A notebook asks for one, as its last act in an exercise: `check("3.1", Y0=..., Y1=...)`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from tpcode.grading.answers import blanks
from tpcode.grading.failures import Unfilled, Wrong, explain

_checks: dict[str, Callable[..., str]] = {}
_passed: set[str] = set()


def exercise(id: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register the decorated function as the check of exercise `id`, such as "3.2".

    The function takes the learner's answers by the names the notebook uses, raises Wrong, or returns what is right.
    """

    def register(function: Callable[..., str]) -> Callable[..., str]:
        earlier = _checks.get(id, function)
        if (earlier.__module__, earlier.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"exercise {id} has two checks: {earlier.__qualname__} and {function.__qualname__}")
        _checks[id] = function
        return function

    return register


def check(id: str, *answers, **named_answers) -> None:
    """Check an exercise: prints one line if the answers are right, raises Wrong if not.

    Raises:
        Wrong: an answer is not right, or not filled in yet.
        ValueError: there is no exercise `id`.
        TypeError: the exercise takes other answers than these; the message names them.
    """
    function = _find(id)
    _passed.discard(id)  # a check that fails now takes back an earlier success
    given = _bind(id, function, answers, named_answers)
    try:
        _require_filled_in(given)
        right = function(*answers, **named_answers)
    except Exception as error:
        wrong = explain(error)
        if wrong is None:
            raise
        # From here, without the frames of the grading, which say nothing about the answer.
        raise Wrong(f"{id} {wrong.verdict}: {wrong}") from None
    _passed.add(id)
    print(f"{id} right: {right}")


def _require_filled_in(given: dict) -> None:
    empty = [name for name, answer in given.items() if blanks(answer)]
    if empty:
        raise Unfilled(f"replace {blanks(given[empty[0]])} in {_listed(empty)}.")


def require_checked(id: str) -> None:
    """Raise Wrong unless `check(id, ...)` was called here and passed: what `make check` asks at the end."""
    if id not in _passed:
        raise Wrong(
            f'{id} was not checked: the cell that calls check("{id}", ...) is gone or its error was caught. '
            "Put it back as the last cell of the exercise."
        )


def _find(id: str) -> Callable[..., str]:
    if not (isinstance(id, str) and re.fullmatch(r"\d+\.\d+", id)):
        raise ValueError(f'an exercise is named by a text such as "3.2"; this is {id!r}')
    number = id.partition(".")[0]
    chapter = f"tpcode.grading.ch{int(number):02d}"
    if find_spec(chapter):
        import_module(chapter)
    if id not in _checks:
        same_chapter = [known for known in _checks if known.partition(".")[0] == number]
        raise ValueError(f"there is no exercise {id}; chapter {number} has {_listed(sorted(same_chapter)) or 'none'}")
    return _checks[id]


def _bind(id: str, function: Callable, answers: tuple, named_answers: dict) -> dict:
    signature = inspect.signature(function)
    try:
        return dict(signature.bind(*answers, **named_answers).arguments)
    except TypeError as error:
        wanted = ", ".join([f'"{id}"', *signature.parameters])
        raise TypeError(f"{error}: the call is check({wanted})") from None


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
