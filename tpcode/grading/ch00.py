"""Chapter 0, start here."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tpcode.comm import group_rank
from tpcode.grading.answers import calls_in, returns_nothing
from tpcode.grading.failures import Wrong
from tpcode.grading.ranks import on_ranks, require_returned
from tpcode.grading.registry import exercise

# What the ranks hold in each run. No rank's number, multiple, maximum, mean or product is the sum, and the sum of the
# last run shows in its digits who took part.
RUNS = ([1, 2], [10, 20], [100, 20, 3])


@exercise("0.1")
def sum_on_every_rank(add_up: Callable) -> str:
    """`add_up(mine)` returns the sum of every rank's number on every rank, as a number or a tensor of one element."""
    runs = []
    for numbers in RUNS:
        results = on_ranks(_call, len(numbers), add_up, numbers)
        require_returned(add_up, results, _why_none(add_up))
        runs.append((numbers, [_number(result, rank, numbers) for rank, result in enumerate(results)]))
    for numbers, values in runs:
        if not _all_equal(values, [sum(numbers)] * len(numbers)):
            raise Wrong(_what_came_out(numbers, values) + _symptom(runs, add_up))
    return "3 on both ranks, and the right sum for other numbers and on 3 ranks."


def _call(add_up: Callable, numbers: list[int]):
    return add_up(torch.tensor(numbers[group_rank()]))


def _why_none(add_up: Callable) -> str:
    if returns_nothing(add_up):
        return "It has no return: end it with `return total`."
    if _calls_all_reduce(add_up):
        return "torch's all_reduce changes its tensor in place and returns None: call it first, then return the tensor."
    return ""


def _calls_all_reduce(add_up: Callable) -> bool:
    return any(name.rpartition(".")[2] == "all_reduce" for name in calls_in(add_up))


def _number(result, rank: int, numbers: list[int]) -> float:
    """The number in a result: a number, or a tensor or array of one element. Wrong for everything else."""
    try:
        tensor = torch.as_tensor(result, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        kind = type(result).__name__
        raise Wrong(f"add_up returned {result!r:.60} on rank {rank}, a {kind}; it should return one number.") from None
    if tensor.numel() == 1:
        return tensor.item()
    hint = ""
    if tensor.numel() == len(numbers) and tensor.sum() == sum(numbers):
        hint = " Every rank's number is there, side by side: gathered, but not yet added."
    raise Wrong(f"add_up returned {tensor.numel()} numbers on rank {rank}; it should return their sum.{hint}")


def _what_came_out(numbers: list[int], values: list[float]) -> str:
    held = _each(numbers)
    return f"the ranks held {held}, and add_up returned {_each(values)}; every rank should have {sum(numbers)}.\n"


def _each(values: list) -> str:
    texts = [f"{value:g} on rank {rank}" for rank, value in enumerate(values)]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _symptom(runs: list[tuple[list[int], list[float]]], add_up: Callable) -> str:
    """What the wrong values look like, in all runs alike."""

    def always(rule: Callable[[list[int]], list[float]]) -> bool:
        return all(_all_equal(values, rule(numbers)) for numbers, values in runs)

    def on_all(rule: Callable[[list[int]], float]) -> bool:
        return always(lambda numbers: [rule(numbers)] * len(numbers))

    if always(lambda numbers: numbers):
        if _calls_all_reduce(add_up):
            return "Each rank still has its own number: all_reduce returns a new tensor and leaves yours as it was."
        return "Each rank still has its own number: nothing was sent. all_reduce sends and adds."
    if on_all(lambda numbers: sum(RUNS[0])):
        return "3 is the answer for 1 and 2 only: the sum has to come from what the ranks hold."
    if always(lambda numbers: [2 * n for n in numbers]) or always(lambda numbers: [len(numbers) * n for n in numbers]):
        return "It is a multiple of each rank's own number: no rank has heard from another."
    if only := _only_rank_with_the_sum(runs):
        return f"Only {only} has the sum: reduce brings it to one rank, all-reduce to every rank."
    if on_all(max) or on_all(min):
        return "That is the largest or the smallest of the numbers, not their sum: look at the operation (op)."
    if on_all(math.prod):
        return "That is the product of the numbers, not their sum: look at the operation (op)."
    if on_all(lambda numbers: sum(numbers) / len(numbers)):
        return "That is the mean: the sum was divided by the number of ranks."
    if on_all(lambda numbers: len(numbers) * sum(numbers)) or on_all(lambda numbers: 2 * sum(numbers)):
        return "That is a multiple of the sum: what was already summed was summed again."
    if always(lambda numbers: [sum(numbers) - n for n in numbers]):
        return "That is the sum of the other ranks' numbers: each rank's own is missing."
    if _all_equal(runs[0][1], [sum(RUNS[0])] * 2):
        return "With 1 and 2 it was right: does it use every rank's number, whatever it is?"
    return "all_reduce(mine) is the sum of every rank's mine, on every rank."


def _only_rank_with_the_sum(runs: list[tuple[list[int], list[float]]]) -> str:
    """ "rank 0" if that one rank, and no other, has the sum in every run."""
    holders = {
        tuple(rank for rank, value in enumerate(values) if math.isclose(value, sum(numbers)))
        for numbers, values in runs
    }
    (who, *others) = holders
    return f"rank {who[0]}" if not others and len(who) == 1 else ""


def _all_equal(values: list[float], rule: list[float]) -> bool:
    return all(math.isclose(value, wanted) for value, wanted in zip(values, rule, strict=True))
