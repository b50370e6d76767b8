"""Overlap: the chunked pair equals the dense FFN, the order in which ranks launch, multiply and wait, the recorder that
tells it, and the tool that measures what is hidden."""

import os
import signal
import subprocess
import time

import pytest
import torch
from torch import nn

from tools import bench_overlap, namespaces
from tpcode import RankPool
from tpcode.comm import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    broadcast,
    group_rank,
    group_size,
    record,
    reduce_scatter,
    reduce_scatter_async,
)
from tpcode.comm.timeline import timeline
from tpcode.dense import FFN
from tpcode.layers import ParallelFFN
from tpcode.layers.chunked import ChunkedColumnParallelLinear, ChunkedFFN, ChunkedRowParallelLinear

TOLERANCE = 1e-12
CHUNKS = (1, 2, 3, 5, 100)  # 15 tokens: evenly, unevenly, and more chunks than tokens
SHAPES = ((3, 5), (15,), (), (2, 0))


# ---- the same numbers -----------------------------------------------------------------------------------------------


def differences_to_dense() -> dict[str, float]:
    """Largest differences of output and every gradient, by chunks, shape and name."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for shape in SHAPES:
        for bias in (True, False):
            dense = FFN(6, 12, bias=bias)
            x, dy = torch.randn(2, *shape, 6)
            want = _with_gradients(dense, x, dy)
            for chunks in CHUNKS:
                own = _with_gradients(ChunkedFFN.from_dense(dense, chunks=chunks), x, dy)
                assert own.keys() == want.keys()
                for name, value in own.items():
                    found[f"{chunks} chunks, {shape}, {name}, bias {bias}"] = _largest(value, _own(name, want[name]))
    return found


def _with_gradients(ffn: nn.Module, x, dy) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    for parameter in ffn.parameters():
        parameter.grad = None
    y = ffn(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in ffn.named_parameters()}


def _own(name: str, whole):
    dim = {"c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1}.get(name)
    return whole if dim is None else whole.chunk(group_size(), dim)[group_rank()]


def _largest(ours, theirs) -> float:
    assert ours.shape == theirs.shape and ours.dtype == torch.float64
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


def test_the_chunked_pair_equals_the_dense_ffn(pool2, pool4):
    """Output, dX and every parameter's gradient, on every rank at t = 1, 2, 4. Not vacuous: every number of chunks but
    1 goes through other code than `ParallelFFN`, as the next test counts; a dY of a sum would hide a wrong row."""
    with RankPool(1) as pool1:
        for pool in (pool1, pool2, pool4):
            for found in pool.run(differences_to_dense):
                assert len(found) == len(SHAPES) * len(CHUNKS) * (6 + 4)
                assert {what: size for what, size in found.items() if not size < TOLERANCE} == {}


def order_and_ledger(chunks: int | None) -> dict:
    """What one rank does in forward and backward of an FFN with 6 tokens, h = 4, F = 8."""
    dense = FFN(4, 8, bias=False, dtype=torch.float64)
    ffn = ParallelFFN.from_dense(dense) if chunks is None else ChunkedFFN.from_dense(dense, chunks=chunks)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    with record() as ledger, timeline() as seen:
        ffn(x).backward(torch.randn(2, 3, 4, dtype=torch.float64))
    lengths = {kind: seen.seconds(kind) for kind in ("product", "collective", "wait")}
    return {
        "order": seen.order(),
        "payload": ledger.payload_bytes(),
        "calls": [ledger.count("all_reduce", phase=phase) for phase in ("forward", "backward")],
        "lengths": lengths,
        "spans": seen.spans,
    }


PLAIN = [
    "forward: product [6, 4] [4, 4]",
    "forward: product [6, 4] [4, 4]",
    "forward: launch 1, all_reduce",
    "forward: wait for 1",
    "backward: product [6, 4] [4, 4]",  # dZ
    "backward: product [4, 6] [6, 4]",  # dB
    "backward: product [6, 4] [4, 4]",  # dX, in parts
    "backward: launch 2, all_reduce",
    "backward: product [4, 6] [6, 4]",  # dA
    "backward: wait for 2",
]
IN_TWO = [
    "forward: product [6, 4] [4, 4]",
    "forward: product [3, 4] [4, 4]",
    "forward: launch 1, all_reduce",
    "forward: product [3, 4] [4, 4]",
    "forward: launch 2, all_reduce",
    "forward: wait for 1",
    "forward: wait for 2",
    "backward: product [6, 4] [4, 4]",
    "backward: product [4, 6] [6, 4]",
    "backward: product [3, 4] [4, 4]",
    "backward: launch 3, all_reduce",
    "backward: product [3, 4] [4, 4]",
    "backward: launch 4, all_reduce",
    "backward: product [4, 6] [6, 4]",
    "backward: wait for 3",
    "backward: wait for 4",
]


def sorted_backward(order: list[str]) -> list[str]:
    """dZ and dB, which need nothing of each other, in one order: autograd takes either first."""
    first = order.index(next(line for line in order if line.startswith("backward")))
    return [*order[:first], *sorted(order[first : first + 2], reverse=True), *order[first + 2 :]]


def test_the_order_in_which_ranks_launch_multiply_and_wait(pool2):
    """The column layer's backward launches before the weight gradient's product and waits after it; in chunks each sum
    is under way while the next chunk is multiplied. Merged or cut, the bytes are the same."""
    plain, one, two = (pool2.run(order_and_ledger, chunks) for chunks in (None, 1, 2))
    for rank in range(2):
        assert sorted_backward(plain[rank]["order"]) == PLAIN
        assert one[rank]["order"] == plain[rank]["order"]  # chunks=1 is the plain pair
        assert sorted_backward(two[rank]["order"]) == IN_TWO
        assert plain[rank]["calls"] == [1, 1] and two[rank]["calls"] == [2, 2]
        assert plain[rank]["payload"] == two[rank]["payload"] == 2 * 6 * 4 * 8


WORDS = ("launch", "wait for")

# ---- the recorder ---------------------------------------------------------------------------------------------------


def test_the_recorder_tells_real_times(pool2):
    for found in pool2.run(order_and_ledger, 2):
        assert all(one.seconds >= 0 for one in found["spans"])
        collectives = {one.number: one for one in found["spans"] if one.kind == "collective"}
        waits = {one.number: one for one in found["spans"] if one.kind == "wait"}
        assert set(collectives) == set(waits) == {1, 2, 3, 4}
        assert all(collectives[number].start <= waits[number].start for number in waits)
        assert all(length > 0 for length in found["lengths"].values())


def sync_and_nothing_outside():
    import torch.distributed as dist

    before = dist.ProcessGroup.allreduce
    with timeline() as seen:
        assert dist.ProcessGroup.allreduce is not before
        all_reduce(torch.ones(3))
        with timeline() as inner:
            dist.all_reduce(torch.ones(3))  # whichever code calls
        unfinished = dist.all_reduce(torch.ones(3), async_op=True)  # nobody waits for it within the block
    after = dist.ProcessGroup.allreduce is before
    all_reduce(torch.ones(3))
    unfinished.wait()
    return after, seen.order()[:5], inner.order(), len(seen.order())


def test_nothing_is_installed_outside_of_the_block(pool2):
    for after, order, inner, total in pool2.run(sync_and_nothing_outside):
        assert after
        assert order[:2] == ["forward: launch 1, all_reduce", "forward: wait for 1"]
        assert inner == ["forward: launch 1, all_reduce", "forward: wait for 1"]
        assert total == 6  # three launches; two waits, and the last after the block, which its handle still tells


def every_collective():
    x = torch.ones(2, 2)
    with timeline() as seen:
        all_gather(x, 0)
        reduce_scatter(x, 0)
        broadcast(x, 0)
        handles = [all_reduce_async(x)[1], all_gather_async(x, 1)[1], reduce_scatter_async(x, 1)[1]]
        for handle in handles[::-1]:
            handle.wait()
    return seen


def every_collective_told():
    seen = every_collective()
    return seen.order(), all(one.end >= one.start for one in seen.spans)


def test_it_sees_every_collective(pool2):
    """Those that the package makes, blocking or not; waits in another order than launches."""
    blocking = ["all_gather", "reduce_scatter", "broadcast"]
    want = [f"{word} {n + 1}{f', {op}' * (word == 'launch')}" for n, op in enumerate(blocking) for word in WORDS]
    want += ["launch 4, all_reduce", "launch 5, all_gather", "launch 6, reduce_scatter"]
    want += ["wait for 6", "wait for 5", "wait for 4"]
    for order, ended in pool2.run(every_collective_told):
        assert [line.removeprefix("forward: ") for line in order] == want
        assert ended


def test_seconds_refuses_an_unknown_kind():
    with timeline() as seen:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert seen.order() == ["forward: product [2, 3] [3, 4]"]
    with pytest.raises(ValueError, match="kind must be one of product, collective, wait"):
        seen.seconds("gemm")


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [ChunkedColumnParallelLinear, ChunkedRowParallelLinear])
def test_chunks_are_refused_by_name(layer):
    dense = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="chunks must be at least 1 and is 0"):
        layer.from_dense(dense, chunks=0)
    with pytest.raises(TypeError, match="chunks must be an integer"):
        layer.from_dense(dense, chunks=2.0)
    with pytest.raises(ValueError, match=r"chunks = 2 .* sequence_parallel=True"):
        layer.from_dense(dense, chunks=2, sequence_parallel=True)
    assert layer.from_dense(dense, chunks=1, sequence_parallel=True).chunks == 1
    with pytest.raises(ValueError, match="input's last dimension|last dimension"):
        layer.from_dense(dense, chunks=2)(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="takes a tpcode.dense.FFN, and this is a Linear"):
        ChunkedFFN.from_dense(dense, chunks=2)


# ---- the tool that measures -----------------------------------------------------------------------------------------


def test_the_tool_measures_every_way_on_ranks(pool2):
    """The ways are what they are called: the floor sends nothing, the others all the same bytes."""
    for seconds in pool2.run(bench_overlap.by_turns, 8, 6, 3, 2):
        assert list(seconds) == ["floor", "sync", "async", "chunked", "floor again"]
        assert all(len(times) == 3 and min(times) > 0 for times in seconds.values())
    for ways in pool2.run(what_each_way_sends):
        assert ways == {"silent": (0, 0), "talking": (2, 2 * 6 * 8 * 4)}


def what_each_way_sends():
    dense, sent = FFN(8, 16, bias=False), {}
    for name, talks in {"silent": False, "talking": True}.items():
        with record() as ledger:
            bench_overlap.forward_and_backward(bench_overlap.PlainFFN(dense, talks), *torch.randn(2, 1, 6, 8))
        sent[name] = ledger.count(), ledger.payload_bytes()
    return sent


def test_what_is_hidden():
    times = {"floor": [1, 2, 4], "sync": [1.4, 2.8, 9], "async": [1.3, 2.6, 5.2], "chunked": [1.2, 2.4, 4.8]}
    found = bench_overlap.result(times | {"floor again": [1.0, 2.0, 5.0]})
    assert found.over_floor["sync"] == pytest.approx(1.4) and found.null == 1
    assert found.hidden("async") == pytest.approx(0.25) and found.hidden("chunked") == pytest.approx(0.5)
    lines = bench_overlap.report("here", found, bars=True)
    assert "hides 50% of what sync adds (at least 33%: yes)" in lines[-1]
    assert "hides" not in "".join(bench_overlap.report("here", found, bars=False))


def test_a_busy_machine_is_measured_again(capsys):
    noisy = {way: [1.0] for way in ("floor", "async", "chunked")} | {"sync": [2.0], "floor again": [1.05]}
    quiet = noisy | {"floor again": [1.02]}
    runs = [noisy, quiet, quiet]
    bench_overlap.measured(lambda: runs.pop(0), "here", bars=True)
    assert len(runs) == 1 and "measured again" in capsys.readouterr().out
    bench_overlap.measured(lambda: noisy, "here", bars=True)
    assert "too busy to tell" in capsys.readouterr().out


@pytest.mark.parametrize("failing", range(len(namespaces.making(namespaces.two_hosts(7), "1gbit"))))
def test_what_was_made_is_removed_whichever_command_fails(failing, monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/sbin/{tool}")
    ran = []

    def run(command):
        ran.append(command)
        failed = len(ran) == failing + 1
        return subprocess.CompletedProcess(command, int(failed), stderr="Operation not permitted" if failed else "")

    refused = pytest.raises(namespaces.NoNamespaces, match=r"`(ip|tc) .*` said: Operation not permitted")
    with refused, namespaces.linked_namespaces("1gbit", run=run):
        raise AssertionError("not reached")
    assert ran[failing + 1 :] == namespaces.removing(namespaces.two_hosts())


def test_what_was_made_is_removed_after_a_kill(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/sbin/{tool}")
    ran, before = [], signal.getsignal(signal.SIGTERM)

    def run(command):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    with pytest.raises(SystemExit), namespaces.linked_namespaces("1gbit", run=run) as hosts:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)  # the signal comes before that
    assert ran[-4:] == namespaces.removing(hosts)
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_ip_or_tc_it_says_so(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    refused = pytest.raises(namespaces.NoNamespaces, match="no `ip` here .*iproute2")
    with refused, namespaces.linked_namespaces("1gbit"):
        raise AssertionError("not reached")


def test_names_fit_a_device():
    assert all(len(host.device) <= 15 for host in namespaces.two_hosts(4_194_304))  # the largest process id


def test_namespaces_are_made_and_removed_or_refused_by_name():
    """With root they are made, limited, and gone after a failure; without, the refusal says what is missing."""
    try:
        with namespaces.linked_namespaces("1gbit") as hosts:
            limits = [
                namespaces.run_command(["tc", "-n", host.namespace, "qdisc", "show", "dev", host.device]).stdout
                for host in hosts
            ]
            raise InterruptedError
    except namespaces.NoNamespaces as reason:
        assert str(reason).startswith("no network namespaces: ")
        return
    except InterruptedError:
        assert all("tbf" in limit and "rate 1Gbit" in limit for limit in limits)
    left = namespaces.run_command(["ip", "netns", "list"]).stdout + namespaces.run_command(["ip", "link"]).stdout
    assert not any(host.namespace in left or host.device in left for host in hosts)
