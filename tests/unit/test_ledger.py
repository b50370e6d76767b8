"""The ledger's arithmetic and its table, without ranks."""

import pickle
from fractions import Fraction

import pytest
import torch

from tpcode.comm import Event, Ledger, all_reduce, record

PAIR, FOUR = (0, 1), (0, 1, 2, 3)
FORWARD = Event("all_reduce", "forward", FOUR, torch.float32, (3, 7, 5))
BACKWARD = Event("all_reduce", "backward", FOUR, torch.bfloat16, (3, 7, 5))
GATHER = Event("all_gather", "recompute", PAIR, torch.float64, (2, 8, 4))


def ledger():
    return Ledger([FORWARD, FORWARD, BACKWARD, GATHER])


def test_bytes():
    assert (FORWARD.payload_bytes, FORWARD.wire_bytes) == (420, 630)  # 3·7·5·4, and 2·3/4 of it
    assert (BACKWARD.payload_bytes, BACKWARD.wire_bytes) == (210, 315)
    assert (GATHER.payload_bytes, GATHER.wire_bytes) == (512, 256)
    assert Event("broadcast", "forward", FOUR, torch.int64, (5,)).wire_bytes == 40
    assert Event("reduce_scatter", "forward", FOUR, torch.int64, (4,)).wire_bytes == 24


def test_bytes_that_are_not_whole_stay_exact():
    third = Event("all_reduce", "forward", (0, 1, 2), torch.float32, (7,))
    assert third.wire_bytes == Fraction(112, 3)
    assert Ledger([third] * 3).wire_bytes() == 112
    assert type(Ledger([third] * 3).wire_bytes()) is int


def test_counts_and_sums_by_op_and_phase():
    entries = ledger()
    assert entries.count() == 4
    assert (entries.count("all_reduce"), entries.count("broadcast"), entries.count(phase="forward")) == (3, 0, 2)
    assert entries.count("all_reduce", phase="backward") == 1
    assert entries.payload_bytes() == 2 * 420 + 210 + 512
    assert entries.payload_bytes("all_reduce", "forward") == 840
    assert entries.wire_bytes(phase="recompute") == 256
    assert Ledger().count() == Ledger().payload_bytes() == Ledger().wire_bytes() == 0


def test_a_misspelt_name_is_refused_rather_than_counted_as_none():
    with pytest.raises(ValueError, match="op must be one of all_reduce, .* and is 'allreduce'"):
        ledger().count("allreduce")
    with pytest.raises(ValueError, match="phase must be one of forward, backward, recompute and is 'back'"):
        ledger().wire_bytes(phase="back")


def test_table():
    assert ledger().table().splitlines() == [
        "phase      op          ranks    shape      dtype     calls  payload bytes  wire bytes per rank",
        "forward    all_reduce  0,1,2,3  [3, 7, 5]  float32       2            840                1,260",
        "backward   all_reduce  0,1,2,3  [3, 7, 5]  bfloat16      1            210                  315",
        "recompute  all_gather  0,1      [2, 8, 4]  float64       1            512                  256",
        "total                                                    4          1,562                1,831",
    ]
    assert repr(ledger()) == ledger().table()
    assert repr(Ledger()) == "no collectives"


def test_a_ledger_travels_between_processes():
    assert pickle.loads(pickle.dumps(ledger())).events == ledger().events


def test_without_torch_distributed_there_is_one_rank():
    with record() as entries:
        x = torch.ones(2)
        assert all_reduce(x) is x
    assert entries.count() == 0


def test_a_ledger_closes_when_its_block_fails():
    with pytest.raises(KeyError), record():
        raise KeyError
    from tpcode.comm import ledger as module

    assert module._open == []


def test_a_maximum_is_told_from_a_sum():
    total, largest = (Event("all_reduce", "forward", (0, 1), torch.float32, (4,), op) for op in ("sum", "max"))
    ledger = Ledger([total, largest])
    assert total != largest and ledger.count("all_reduce") == 2
    assert [line.split()[1:3] for line in ledger.table().splitlines()[1:3]] == [
        ["all_reduce", "0,1"],
        ["all_reduce", "max"],
    ]
