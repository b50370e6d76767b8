"""Whatever ranks do wrong is reported in words, soon, and leaves nothing behind.

The pools here wait 60 s for a rank, so a fault that is reported within SOON was noticed, and not waited out.
"""

import ctypes
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tpcode import CollectiveMismatch, RankError, RankPool, RankTimeout
from tpcode.comm import all_reduce, broadcast

SOON = 20.0  # seconds; it takes well under 2 on a quiet machine, and this must not fail on a busy one


def one(rank: int) -> bool:
    return dist.get_rank() == rank


def expect_failure(pool, fn, error, *words):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fn)
    assert time.monotonic() - start < SOON
    assert type(caught.value) is error, caught.value
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in:\n{caught.value}"
    assert pool.run(dist.get_rank) == list(range(pool.n))  # and the next job works
    return caught.value


# ---- a rank fails ---------------------------------------------------------------------------------------------------


def raises():
    if one(1):
        raise KeyError("no such layer")
    dist.barrier()


def raises_while_others_compute():
    if one(1):
        raise KeyError("no such layer")
    time.sleep(600)


def exits():
    if one(1):
        sys.exit(3)
    dist.barrier()


def leaves():
    if one(1):
        os._exit(3)
    dist.barrier()


def is_killed():
    if one(1):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crashes():
    if one(1):
        ctypes.string_at(0)
    dist.barrier()


def gets_bad_input():
    x = torch.ones(3, 4 + dist.get_rank())
    torch.nn.functional.linear(x, torch.ones(2, 4))
    dist.barrier()


@pytest.mark.parametrize(
    "fn, words",
    [
        (raises, ["rank 1 raised KeyError: 'no such layer'", "in raises", 'raise KeyError("no such layer")']),
        (raises_while_others_compute, ["rank 1 raised KeyError"]),
        (exits, ["rank 1 raised SystemExit: it called sys.exit(3)"]),
        (leaves, ["rank 1 ended its process with exit code 3"]),
        (is_killed, ["rank 1 was killed by SIGKILL"]),
        (crashes, ["rank 1 was killed by SIGSEGV"]),
        (gets_bad_input, ["rank 1 raised RuntimeError: mat1 and mat2", "in gets_bad_input"]),
    ],
)
def test_a_rank_that_fails_is_named_and_the_others_are_stopped(pool2, fn, words):
    assert expect_failure(pool2, fn, RankError, *words).rank == 1


def test_the_error_carries_the_exception_and_the_traceback(pool2):
    error = expect_failure(pool2, raises, RankError)
    assert isinstance(error.exception, KeyError)
    assert error.traceback.startswith("Traceback") and "pool.py" not in error.traceback


def test_the_first_to_fail_is_named_when_its_failure_makes_others_fail(pool4):
    def chain():
        if one(3):
            time.sleep(0.3)
            os._exit(7)
        dist.barrier()  # "connection closed" on the others

    assert expect_failure(pool4, chain, RankError, "rank 3 ended its process with exit code 7").rank == 3


def test_all_ranks_refusing_the_same_input_are_all_named(pool4):
    def refuse():
        raise ValueError("F=10 does not divide by 4")

    error = expect_failure(pool4, refuse, RankError, "raised ValueError: F=10", "(so did ranks ")
    assert isinstance(error.exception, ValueError)


def test_a_result_that_cannot_be_sent_is_named(pool2):
    def returns_a_group():
        return dist.group.WORLD

    expect_failure(pool2, returns_a_group, RankError, "returned a ProcessGroup that cannot be sent")


# ---- ranks make different calls -------------------------------------------------------------------------------------


def differing_op(group, rank):
    x = torch.ones(3)
    dist.all_reduce(x, group=group) if rank else dist.broadcast(x, 0, group=group)


def differing_reduce_op(group, rank):
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group)


def differing_source(group, rank):
    dist.broadcast(torch.ones(3), rank, group=group)


def differing_count(group, rank):
    dist.all_reduce(torch.ones(3 + rank), group=group)


def differing_shape_of_equal_count(group, rank):
    dist.all_reduce(torch.ones((2, 3) if rank else (3, 2)), group=group)


def differing_dtype(group, rank):
    dist.all_reduce(torch.ones(3, dtype=torch.float16 if rank else torch.bfloat16), group=group)


def differing_gather(group, rank):
    dist.all_gather([torch.empty(3 + rank) for _ in range(2)], torch.ones(3 + rank), group=group)


def differing_reduce_scatter(group, rank):
    dist.reduce_scatter(
        torch.empty(2), [torch.ones(2), torch.ones(2)], [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank], group
    )


def differing_exchange(group, rank):
    sizes = [[1, 2], [1, 2]][rank]  # rank 0 sends 2 to rank 1, which expects 1
    expects = [[1, 1], [1, 2]][rank]
    dist.all_to_all_single(torch.empty(sum(expects)), torch.ones(3), expects, sizes, group=group)


def differing_number(group, rank):
    for _ in range(2 + rank):
        dist.all_reduce(torch.ones(3), group=group)


def skipped_call(group, rank):
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        dist.broadcast(torch.ones(2), 0, group=group)
    dist.barrier(group=group)


def differing_number_of_async_calls(group, rank):
    for _ in range(100 + rank):
        dist.all_reduce(torch.ones(3), group=group, async_op=True)


def through_functional(group, rank):
    functional.all_reduce(torch.ones(3 + rank), "sum", group).sum()


def through_functional_gather(group, rank):
    functional.all_gather_single(torch.ones(3, 1 + rank), 0, group).sum()


def through_functional_reduce_op(group, rank):
    functional.reduce_scatter_single(torch.ones(4), "max" if rank else "sum", 0, group).sum()


def through_functional_source(group, rank):
    functional.broadcast(torch.ones(3), rank, group).sum()


def through_functional_exchange(group, rank):
    functional.all_to_all_single(torch.ones(3), [1, 1 + rank], [1, 2], group).sum()


def through_tpcode(group, rank):
    all_reduce(torch.ones(3 + rank), group=group)


def through_tpcode_source(group, rank):
    broadcast(torch.ones(3), rank, group=group)


def in_backward(group, rank):
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad[: 2 + rank].contiguous(), group=group)
            return grad

    Reduce.apply(torch.ones(4, requires_grad=True)).sum().backward()


MISMATCHES = [
    (differing_op, ["rank 0: broadcast root 0 float32 [3]", "rank 1: all_reduce SUM float32 [3]"]),
    (differing_reduce_op, ["rank 0: all_reduce SUM float32 [3]", "rank 1: all_reduce MAX float32 [3]"]),
    (differing_source, ["rank 0: broadcast root 0", "rank 1: broadcast root 1"]),
    (differing_count, ["rank 0: all_reduce SUM float32 [3]", "rank 1: all_reduce SUM float32 [4]"]),
    (differing_shape_of_equal_count, ["float32 [3, 2]", "float32 [2, 3]"]),
    (differing_dtype, ["rank 0: all_reduce SUM bfloat16 [3]", "rank 1: all_reduce SUM float16 [3]"]),
    (differing_gather, ["rank 0: all_gather float32 [3]", "rank 1: all_gather float32 [4]"]),
    (differing_reduce_scatter, ["rank 0: reduce_scatter SUM", "rank 1: reduce_scatter MAX"]),
    (differing_exchange, ["rank 0: all_to_all float32 sends 1,2 receives 1,1", "rank 1: all_to_all float32 sends 1,2"]),
    (
        differing_number,
        ["different numbers of calls", "rank 0: returned after 2 calls", "rank 1: made call 3, all_reduce"],
    ),
    (skipped_call, ["call 2 of", "rank 0: broadcast root 0 float32 [2]", "rank 1: barrier"]),
    (differing_number_of_async_calls, ["rank 0: returned after 100 calls", "rank 1: made call 101"]),
    (through_functional, ["rank 0: all_reduce SUM float32 [3]", "rank 1: all_reduce SUM float32 [4]"]),
    (
        through_functional_gather,
        ["rank 0: all_gather_single float32 [3, 1]", "rank 1: all_gather_single float32 [3, 2]"],
    ),
    (through_functional_reduce_op, ["rank 0: reduce_scatter_single SUM", "rank 1: reduce_scatter_single MAX"]),
    (through_functional_source, ["rank 0: broadcast root 0", "rank 1: broadcast root 1"]),
    (through_functional_exchange, ["rank 0: all_to_all float32 sends 1,2 receives 1,1"]),
    (through_tpcode, ["rank 0: all_reduce SUM float32 [3]", "rank 1: all_reduce SUM float32 [4]"]),
    (through_tpcode_source, ["rank 0: broadcast root 0", "rank 1: broadcast root 1"]),
    (in_backward, ["rank 0: all_reduce SUM float32 [2]", "rank 1: all_reduce SUM float32 [3]"]),
]


@pytest.mark.parametrize("subgroup", [False, True], ids=["world", "subgroup"])
@pytest.mark.parametrize("call, words", MISMATCHES, ids=[call.__name__ for call, _ in MISMATCHES])
def test_ranks_that_differ_are_told_how(pool4, pool2, call, words, subgroup):
    def job():
        if subgroup:
            group = dist.new_group([1, 3])  # ranks 1 and 3 are 0 and 1 of the group
            if dist.get_rank() in (1, 3):
                call_in_subgroup(call, group)
        else:
            call(dist.group.WORLD, dist.get_rank())

    if subgroup:
        renamed = [renumber(word) for word in words]
        expect_failure(pool4, job, CollectiveMismatch, "group [1, 3]", *renamed)
    else:
        expect_failure(pool2, job, CollectiveMismatch, "the world group", *words)


def call_in_subgroup(call, group):
    """Calls whose source is a global rank get the group's, as the caller of a subgroup must give it."""
    if call is differing_source:
        dist.broadcast(torch.ones(3), group_src=dist.get_group_rank(group, dist.get_rank()), group=group)
    elif call is differing_op or call is skipped_call:
        rank, x = dist.get_group_rank(group, dist.get_rank()), torch.ones(3)
        if call is skipped_call:
            dist.all_reduce(x, group=group)
            if rank == 0:
                dist.broadcast(torch.ones(2), group_src=0, group=group)
            dist.barrier(group=group)
        else:
            dist.all_reduce(x, group=group) if rank else dist.broadcast(x, group_src=0, group=group)
    else:
        call(group, dist.get_group_rank(group, dist.get_rank()))


def renumber(word: str) -> str:
    return (
        word.replace("rank 1", "rank 3")
        .replace("root 1", "root 3")
        .replace("rank 0", "rank 1")
        .replace("root 0", "root 1")
    )


def test_a_mismatch_points_to_the_callers_line(pool2):
    def job():
        differing_reduce_op(dist.group.WORLD, dist.get_rank())

    error = expect_failure(pool2, job, CollectiveMismatch)
    assert "in differing_reduce_op" in error.traceback
    assert re.search(r"rank \d is at line \d+ of differing_reduce_op", error.traceback)  # the one that waits
    assert "distributed_c10d" not in error.traceback


def test_calls_that_differ_further_back_than_the_notes_reach(pool2):
    def job():
        rank = dist.get_rank()
        for i in range(100):  # the source of a broadcast runs ahead of its peers
            x = torch.ones(3, 1) if rank == 1 and i == 2 else torch.ones(3)
            if rank == 1 and i == 0:
                time.sleep(1)
            dist.broadcast(x, 0)

    expect_failure(pool2, job, CollectiveMismatch, "the world group")


def test_messages_between_two_ranks_are_paired(pool2):
    def other_size():
        dist.send(torch.ones(3), 1) if one(0) else dist.recv(torch.ones(4), 0)

    def one_too_many():
        if one(0):
            sent = [dist.isend(torch.ones(3), 1) for _ in range(2)]
            sent[0].wait()
            dist.recv(torch.ones(1), 1)  # so that the second is still under way when rank 1 returns
        else:
            dist.recv(torch.ones(3), 0)
            dist.send(torch.ones(1), 0)

    words = ["messages 0 -> 1", "rank 0: message of float32 [3]", "rank 1: message of float32 [4]"]
    expect_failure(pool2, other_size, CollectiveMismatch, *words)
    expect_failure(
        pool2, one_too_many, CollectiveMismatch, "rank 0: made call 2, message", "rank 1: returned after 1 call"
    )


def test_messages_that_are_right_pass(pool2):
    def job():
        received = torch.zeros(3)
        if one(0):
            dist.send(torch.ones(3), 1)
            dist.recv(received, 1)
        else:
            dist.recv(received)  # from any rank
            dist.send(received * 2, 0)
        return received.tolist()

    assert pool2.run(job) == [[2.0] * 3, [1.0] * 3]


def test_an_uneven_exchange_that_is_right_passes(pool2):
    def job():
        sends = [[1, 2], [3, 4]]
        rank = dist.get_rank()
        receives = [row[rank] for row in sends]
        out = torch.empty(sum(receives))
        dist.all_to_all_single(out, torch.full((sum(sends[rank]),), float(rank)), receives, sends[rank])
        return out.tolist()

    assert pool2.run(job) == [[0.0] + [1.0] * 3, [0.0] * 2 + [1.0] * 4]


def test_groups_made_by_their_members_only_are_refused(pool4):
    def job():
        if dist.get_rank() in (2, 3):
            dist.new_group([2, 3])

    expect_failure(
        pool4, job, CollectiveMismatch, "rank 0: returned after 0 calls", "rank 2: made call 1, new_group [2, 3]"
    )


def test_groups_made_in_different_orders_are_refused(pool4):
    def job():
        orders = [[0, 1], [2, 3]]
        for ranks in orders if one(0) else orders[::-1]:
            dist.new_group(ranks)

    expect_failure(pool4, job, CollectiveMismatch, "rank 0: new_group [0, 1]", "new_group [2, 3]")


def test_many_functional_calls_in_flight_whose_tensors_nobody_keeps(pool4):
    """Gloo's threads then free tensors, for which they need the GIL: a rank that keeps it while it makes the next call
    stands still. Before that was seen to, a few dozen of these calls were enough."""

    def job():
        for _ in range(30):
            for _ in range(4):
                sums = [functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD) for _ in range(4)]
                wholes = [functional.all_gather_single(part, 0, dist.group.WORLD) for part in sums]
            assert all(whole.sum() == 4 * 32 for whole in wholes)

    pool4.run(job)


def test_differing_shards_of_a_dtensor_are_refused(pool2):
    def job():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 2 + dist.get_rank())
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False).redistribute(mesh, [Replicate()])

    expect_failure(pool2, job, CollectiveMismatch, "float32 [2, 2]", "float32 [2, 3]")


@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=["the world", "groups of its own"])
def test_dtensor_works_job_after_job(pool2, shape):
    def job():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        names = ("outer", "inner")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)["inner"]
        whole = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        return tuple(whole.to_local().shape)

    for _ in range(2):
        assert pool2.run(job) == [(4, 2), (4, 2)]


# ---- a rank hangs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient():
    with RankPool(2, timeout=1) as pool:
        yield pool


def test_a_rank_that_loops_while_another_waits(impatient):
    def job():
        if one(1):
            while True:
                pass
        dist.barrier()

    words = [
        "rank 0 has waited 1 s in call 1 of the world group (all ranks), barrier",
        "for rank 1",
        "rank 1: runs",
        "of job, in",
    ]
    assert expect_failure(impatient, job, RankTimeout, *words).rank == 1


def test_a_rank_that_loops_while_another_is_many_calls_ahead(impatient):
    """Further ahead than the notes reach back: the oldest that is kept says since when it waits, at the least."""

    def job():
        if one(1):
            while True:
                pass
        for work in [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(100)]:
            work.wait()

    assert expect_failure(impatient, job, RankTimeout, "rank 0 has waited 1 s in call 69", "for rank 1").rank == 1


def test_a_rank_that_loops_after_another_has_returned(impatient):
    def job():
        while one(1):
            time.sleep(0.01)

    words = ["rank 0 returned 1 s ago, and rank 1 still runs", "no collective call"]
    assert expect_failure(impatient, job, RankTimeout, *words).rank == 1


def test_ranks_that_wait_for_each_other_in_different_groups(impatient):
    def job():
        group = dist.new_group([0, 1])
        dist.barrier(group=group) if one(1) else dist.barrier()

    expect_failure(
        impatient,
        job,
        RankTimeout,
        "rank 0: waits in call 2 of the world group (all ranks)",
        "rank 1: waits in call 1 of group",
    )


def test_a_message_that_nobody_receives(impatient):
    def job():
        dist.recv(torch.ones(3), 1 - dist.get_rank())

    expect_failure(impatient, job, RankTimeout, "message of float32 [3]")


def test_a_rank_that_computes_for_longer_than_the_timeout_is_left_alone_while_nobody_waits(impatient):
    def job():
        time.sleep(1.5)
        dist.barrier()
        return dist.get_rank()

    assert impatient.run(job) == [0, 1]


def test_the_limit_bounds_the_whole_job():
    def job():
        while True:
            time.sleep(0.01)

    with RankPool(2, timeout=60, limit=1) as pool:
        expect_failure(pool, job, RankTimeout, "the job has run for 1 s, its limit")
