"""A learner's function of sizes that should return a number: call it, and say which mistake a wrong number is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import torch

from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.compare import as_tensor
from tpcode.grading.failures import Unfilled, Wrong


def require_number(
    name: str, function: Callable, args: tuple, right: float, where: str, wrong: Mapping[float, str]
) -> None:
    """Raise Wrong unless function(*args) is the number `right`; say what it looks like if it is one of `wrong`."""
    got = number(name, function, args)
    if not math.isclose(got, right, rel_tol=1e-6):
        hint = next((text for value, text in wrong.items() if math.isclose(got, value, rel_tol=1e-6)), "")
        call = f"{name}({', '.join(map(str, args))})"
        raise Wrong(f"{call} is {right:,.12g}, yours is {got:,.12g} ({where}).\n{hint}".rstrip())


def number(name: str, function: Callable, args: tuple) -> float:
    """function(*args) as a number: also a fraction, a tensor or array of one element. Wrong for everything else."""
    got = called(name, function, args)
    if isinstance(got, Fraction):  # what wire bytes are
        return float(got)
    try:
        tensor = as_tensor(got)
        if tensor.dtype != torch.bool:
            return got if isinstance(got, int | float) else tensor.item()  # torch would round to float32
    except (TypeError, ValueError, RuntimeError):
        pass  # not a number, or several
    raise Wrong(f"{name} returned {got!r:.60}; it should return one number.")


def called(name: str, function: Callable, args: tuple):
    """function(*args), which is neither None nor the stub's `...`."""
    got = function(*args)
    if blanks(got):
        if stub := stub_in(function):
            raise Unfilled(f"replace {stub} in {name}.")
        raise Wrong(f"{name} returned {got}. Is there a return?")
    return got
