"""Exercise 0.1 on real ranks: right answers in several styles pass, each wrong one hears what is wrong with it."""

import pytest
import torch
import torch.distributed as dist

from tpcode.comm import all_gather, all_reduce
from tpcode.grading import Wrong, check, ranks


def stub(mine):
    total = None  # replace None: the sum of every rank's number
    return total


# ---- right ----------------------------------------------------------------------------------------------------------


def with_tpcode(mine):
    return all_reduce(mine)


def in_place(mine):
    dist.all_reduce(mine)
    return mine


def gathered_and_added(mine):
    return sum(all_gather(mine.reshape(1), dim=0).tolist())


def to_rank_0_and_back(mine):
    mine = mine.double().reshape(1)
    dist.reduce(mine, dst=0)
    dist.broadcast(mine, src=0)
    return mine


def as_a_float(mine):
    return float(all_reduce(mine))


def functional(mine):
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(mine, "sum", dist.group.WORLD)


def of_numpy(mine):
    return all_reduce(mine).numpy()


@pytest.mark.parametrize(
    "add_up", [with_tpcode, in_place, gathered_and_added, to_rank_0_and_back, as_a_float, functional, of_numpy]
)
def test_right_answers_pass(add_up, capsys):
    check("0.1", add_up)
    assert capsys.readouterr().out.startswith("0.1 right: 3 on both ranks")


# ---- wrong ----------------------------------------------------------------------------------------------------------


def own(mine):
    return mine


def result_dropped(mine):
    all_reduce(mine)
    return mine


def returned_none(mine):
    return dist.all_reduce(mine)


def no_return(mine):
    total = all_reduce(mine)  # noqa: F841


def returned_on_rank_0(mine):
    total = all_gather(mine.reshape(1), dim=0).sum()
    return total if dist.get_rank() == 0 else None


def hard_coded(mine):
    return 3


def doubled(mine):
    return 2 * mine


def times_t(mine):
    return mine * dist.get_world_size()


def reduced(mine):
    total = all_gather(mine.reshape(1), dim=0).sum()
    return total if dist.get_rank() == 0 else mine


def largest(mine):
    return all_reduce(mine, "max")


def product(mine):
    dist.all_reduce(mine, op=dist.ReduceOp.PRODUCT)
    return mine


def mean(mine):
    return all_reduce(mine) / dist.get_world_size()


def summed_twice(mine):
    return all_reduce(all_reduce(mine))


def twice(mine):
    return 2 * all_reduce(mine)


def others(mine):
    return all_reduce(mine) - mine


def gathered(mine):
    return all_gather(mine.reshape(1), dim=0)


def listed(mine):
    return all_gather(mine.reshape(1), dim=0).tolist()


def text(mine):
    return "three"


def only_small(mine):
    return all_reduce(mine.clamp(max=5))


def only_neighbours(mine):
    every = all_gather(mine.reshape(1), dim=0)
    return every[dist.get_rank()] + every[dist.get_rank() - 1]


def raises(mine):
    return mine.no_such_thing


def not_implemented(mine):
    raise NotImplementedError


def no_argument():
    return 3


def lonely(mine):
    return all_reduce(mine) if dist.get_rank() == 0 else 3


HELD = "not yet right: the ranks held 1 on rank 0 and 2 on rank 1, and add_up returned "


@pytest.mark.parametrize(
    "add_up, said",
    [
        (stub, ["0.1 is not filled in yet: replace None in stub."]),
        (not_implemented, ["0.1 is not filled in yet: replace the line that raises NotImplementedError."]),
        (
            own,
            [
                f"{HELD}1 on rank 0 and 2 on rank 1; every rank should have 3.",
                "Each rank still has its own number: nothing was sent.",
            ],
        ),
        (result_dropped, ["Each rank still has its own number: all_reduce returns a new tensor and leaves yours"]),
        (
            returned_none,
            ["returned None on every rank. torch's all_reduce changes its tensor in place and returns None"],
        ),
        (no_return, ["no_return returned None on every rank. It has no return: end it with `return total`."]),
        (returned_on_rank_0, ["returned_on_rank_0 returned None on rank 1. Is there a return?"]),
        (hard_coded, ["held 10 on rank 0 and 20 on rank 1", "3 is the answer for 1 and 2 only"]),
        (doubled, [f"{HELD}2 on rank 0 and 4 on rank 1", "It is a multiple of each rank's own number"]),
        (times_t, ["It is a multiple of each rank's own number"]),
        (reduced, [f"{HELD}3 on rank 0 and 2 on rank 1", "Only rank 0 has the sum: reduce brings it to one rank"]),
        (largest, [f"{HELD}2 on rank 0 and 2 on rank 1", "That is the largest or the smallest of the numbers"]),
        (product, ["That is the product of the numbers, not their sum"]),
        (mean, [f"{HELD}1.5 on rank 0", "That is the mean: the sum was divided by the number of ranks."]),
        (summed_twice, ["That is a multiple of the sum: what was already summed was summed again."]),
        (twice, ["That is a multiple of the sum"]),
        (others, ["That is the sum of the other ranks' numbers: each rank's own is missing."]),
        (gathered, ["returned 2 numbers on rank 0", "side by side: gathered, but not yet added."]),
        (listed, ["returned 2 numbers on rank 0", "side by side: gathered, but not yet added."]),
        (text, ["add_up returned 'three' on rank 0, a str; it should return one number."]),
        (only_small, ["held 10 on rank 0 and 20 on rank 1", "With 1 and 2 it was right"]),
        (only_neighbours, ["held 100 on rank 0, 20 on rank 1 and 3 on rank 2", "does it use every rank's number"]),
        (raises, ["your code raised on rank", "in raises\n    return mine.no_such_thing", "has no attribute"]),
        (no_argument, ["your code raised on rank", "TypeError: no_argument() takes 0 positional arguments but 1"]),
        (lonely, ["rank 0", "all_reduce"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_answers_hear_what_is_wrong(add_up, said):
    with pytest.raises(Wrong) as caught:
        check("0.1", add_up)
    text = str(caught.value)
    assert text.startswith("0.1 ")
    for part in said:
        assert part in text
    assert "tpcode/" not in text and "  ch00.py" not in text, "of the traceback, only the learner's lines"


def test_ranks_that_never_end_are_stopped(monkeypatch):
    def endless(mine):
        while True:
            pass

    monkeypatch.setattr(ranks, "_pools", {})
    monkeypatch.setattr(ranks, "LIMIT", 1.0)
    with pytest.raises(Wrong) as caught:
        check("0.1", endless)
    for pool in ranks._pools.values():
        pool.close()
    assert str(caught.value).startswith("0.1 not yet right: ") and "1 s" in str(caught.value)


def test_the_runs_tell_the_wrong_answers_apart():
    """No listed wrong rule gives the sum by accident, in any run."""
    from tpcode.grading.ch00 import RUNS

    for numbers in RUNS:
        t, total = len(numbers), sum(numbers)
        wrong = [max(numbers), min(numbers), total / t, 2 * total, t * total, torch.tensor(numbers).prod().item()]
        assert total not in [*wrong, *numbers, *(2 * n for n in numbers), *(t * n for n in numbers)]
    assert sum(RUNS[0]) not in map(sum, RUNS[1:])
