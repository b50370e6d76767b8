"""What `tpcode bench` measures on ranks: the calls are the paper's, times and memory are what they are said to be."""

import json
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tpcode.bench import run
from tpcode.bench.measure import Group, Peak, measure, payloads, timed_collectives
from tpcode.bench.settings import Settings
from tpcode.comm import all_reduce, all_reduce_async
from tpcode.config import PRESETS, Layout
from tpcode.cost.communication import tp_layer
from tpcode.cost.flops import layer_flops
from tpcode.dense import MODELS
from tpcode.model import Block

B, S, H = 2, 8, 768
SETTINGS = Settings(
    model="gpt2", tp=(1, 2), batch=B, sequence=S, dtype="float32", largest_bytes=2**15, rounds=1, trace=True
)


@pytest.fixture(scope="module")
def reports(pool2):
    """Of both ranks; and whether torch's functions are back."""

    def job(settings):
        before = dist.all_reduce, dist.all_gather_single, dist.reduce_scatter_single
        report = measure(settings)
        return report, before == (dist.all_reduce, dist.all_gather_single, dist.reduce_scatter_single)

    return pool2.run(job, SETTINGS)


@pytest.fixture(scope="module")
def rows(reports):
    return {(row["layer"], row["tp"], row["sequence_parallel"]): row for row in reports[0][0]["layers"]}


def test_everything_is_measured_once(reports, rows):
    assert len(rows) == 3 * 3 == len(reports[0][0]["layers"])
    assert all(back for _, back in reports)
    collectives = reports[0][0]["collectives"]
    assert [(one["op"], one["payload_bytes"]) for one in collectives] == [
        (op, size) for op in ("all_reduce", "all_gather", "reduce_scatter") for size in (4096, 2**15)
    ]
    for one in collectives:
        factor = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}[one["op"]]  # at n = 2
        assert one["algbw_bytes_per_second"] == one["payload_bytes"] / one["seconds"]
        assert one["busbw_bytes_per_second"] == factor * one["algbw_bytes_per_second"]
    assert payloads(5000) == [4096, 5000] and payloads(4096) == [4096] and payloads(7) == [7]


def test_a_blocks_calls_are_the_papers(rows):
    for sequence_parallel in (False, True):
        layout = Layout(tp=2, sequence_parallel=sequence_parallel)
        volume = tp_layer(PRESETS["gpt2"], layout, microbatch=B, sequence=S, element_bytes=4)
        calls = rows["block", 2, sequence_parallel]["calls"]
        assert {call["op"]: call["calls"] for call in calls} == {
            op: volume.count(op) for op in ("all_reduce", "all_gather", "reduce_scatter") if volume.count(op)
        }
        assert {call["payload_bytes"] for call in calls} == {B * S * H * 4}
    assert rows["block", 1, False]["calls"] == []


def test_times_hang_together(rows):
    """FLOP/s, tokens/s and shares come from the same seconds; collectives take some of them at t = 2 and none at 1."""
    flops = 3 * layer_flops(PRESETS["gpt2"], B, S)
    for (layer, t, _), row in rows.items():
        assert row["tokens_per_second"] == B * S / row["seconds"]
        assert row["collective_share"] == row["collective_seconds"] / row["seconds"]
        assert (0 < row["collective_share"] < 1) == (t == 2)
        if layer == "block":
            assert row["flops_per_second_per_rank"] * row["seconds"] * t == pytest.approx(flops)


def test_memory_is_counted(rows):
    """Weights to the byte; the peak holds them, their gradients and what is kept, and is below what was asked for."""
    whole = 4 * (8 * H * H + 5 * H)
    assert rows["ffn", 1, False]["weights_bytes"] == whole
    assert rows["ffn", 2, False]["weights_bytes"] == 4 * (8 * H * H + 4 * H) // 2 + 4 * H  # c_proj's bias is whole
    for (layer, t, sp), row in rows.items():
        assert row["gradients_bytes"] == row["weights_bytes"]
        assert row["weights_bytes"] + row["gradients_bytes"] < row["peak_bytes"] < SETTINGS.needed_bytes()
        if t == 2 and not sp:
            assert row["peak_bytes"] < 0.6 * rows[layer, 1, False]["peak_bytes"]


@pytest.mark.parametrize(("model", "sequence"), [("gpt2", 512), ("smollm2-135m", 512)])
def test_the_memory_that_is_asked_for_is_enough_and_not_far_too_much(model, sequence):
    """Where activations outweigh weights, at t = 1: both families, by the same count as in the report."""
    settings = Settings(model=model, tp=(1,), batch=4, sequence=sequence, dtype="float32", largest_bytes=1, rounds=1)
    dense = MODELS[settings.layer.family](settings.layer)
    block = Block.from_dense(dense.part("blocks")[0], dense.names)
    x = torch.randn(4, sequence, settings.layer.hidden, requires_grad=True)
    with Peak([*dense.parameters(), *block.parameters(), x]) as peak:
        block(x).backward(torch.ones_like(x))
    assert peak.most <= settings.needed_bytes() < 3 * peak.most


def test_the_timeline_has_both_ranks_and_their_collectives(reports):
    for rank, (report, _) in enumerate(reports):
        name, *events = report["trace"]
        assert name["ph"] == "M" and name["args"]["name"].startswith(f"rank {rank} ")
        assert {event["pid"] for event in events} == {rank}
        assert len([event for event in events if event["name"].startswith("c10d::allreduce")]) == 4
        assert all(event["dur"] >= 0 for event in events)
    spans = [[(e["ts"], e["ts"] + e["dur"]) for e in report["trace"][1:]] for report, _ in reports]
    first, second = ((min(begin for begin, _ in span), max(end for _, end in span)) for span in spans)
    assert first[0] < second[1] and second[0] < first[1]  # one clock: the ranks' steps overlap


# ---- the instruments ------------------------------------------------------------------------------------------------


def test_waiting_for_a_rank_counts_and_hidden_time_does_not(pool2):
    def job():
        late = dist.get_rank() == 1
        x = torch.ones(4)
        dist.barrier()
        with timed_collectives(x.device) as spent:
            time.sleep(0.6 * late)
            all_reduce(x)
            waited = spent.take()
            time.sleep(0.6 * late)
            all_reduce_async(x)[1].wait()
            waited_async = spent.take()
            _, handle = all_reduce_async(x)
            time.sleep(0.6)
            handle.wait()
            return waited, waited_async, spent.take()

    (early, early_async, hidden), late = pool2.run(job)
    assert min(early, early_async) > 0.5 > max(*late, hidden)


def test_the_peak_is_what_lives_at_once():
    """Freed tensors leave, views are not counted twice, and what was there before counts."""
    before = torch.ones(1000)
    with Peak([before, before.view(10, 100)]) as peak:
        a = before + 1
        b = a.view(10, 100).t()
        del a
        c = b * 2  # 3 × 4000 bytes: before, b's storage, c
        assert (peak.now, peak.most) == (12000, 12000)
        del b, c
        assert peak.now == 4000
        before.add_(1)
    assert peak.most == 12000


def test_groups_work_side_by_side(pool4):
    """Of four ranks with t = 2 both pairs work, and with t = 3 one is left over; the first group reports."""

    def job():
        found = []
        for t in (2, 3, 4):
            group = Group.of(t, torch.device("cpu"))
            ranks = None if group.group is None else group.every(dist.get_rank())
            found.append((ranks, group.first and group.group is not None))
        return found

    assert pool4.run(job) == [
        [([0, 1], True), ([0, 1, 2], True), ([0, 1, 2, 3], True)],
        [([0, 1], True), ([0, 1, 2], True), ([0, 1, 2, 3], True)],
        [([2, 3], False), ([0, 1, 2], True), ([0, 1, 2, 3], True)],
        [([2, 3], False), (None, False), ([0, 1, 2, 3], True)],
    ]


def test_under_torchrun_one_rank_prints(tmp_path):
    """As a newcomer types it: JSON of the ranks that torchrun started, once, and a timeline."""
    trace = tmp_path / "trace.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tpcode", "bench"]
    options = ["--tp", "2", "--only", "collectives,ffn", "--sequence", "8", "--rounds", "1", "--largest-bytes", "32768"]
    command = [sys.executable, *torchrun, *options, "--json", "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["layer"], row["tp"]) for row in report["layers"]] == [("ffn", 2), ("ffn", 2)]
    assert {fit["op"] for fit in report["fits"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(row["predicted_collective_seconds"] > 0 for row in report["layers"])
    assert report["machine"]["backend"] in ("gloo", "nccl") and report["machine"]["load"] >= 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1} and min(e["ts"] for e in events if "ts" in e) == 0


# ---- on GPUs --------------------------------------------------------------------------------------------------------


def on_gpus(tp):
    return run(
        Settings(model="gpt2", tp=tp, batch=B, sequence=64, dtype="bfloat16", largest_bytes=2**20, rounds=2, trace=True)
    )


@pytest.mark.gpu(1)
def test_one_gpu_is_measured():
    """By its allocator's count, which sees at least the weights and gradients."""
    report = on_gpus((1,))
    assert report["machine"]["backend"] == "nccl" and report["collectives"] == []
    for row in report["layers"]:
        assert row["peak_bytes"] > 2 * row["weights_bytes"] and row["collective_seconds"] == 0 < row["seconds"]
    assert any(event.get("cat") == "kernel" for event in report["trace"])


@pytest.mark.gpu(2)
def test_two_gpus_are_measured_with_their_collectives():
    report = on_gpus((1, 2))
    shares = {row["tp"]: row["collective_share"] for row in report["layers"] if row["layer"] == "block"}
    assert shares[1] == 0 < shares[2] < 1
    assert {fit["op"] for fit in report["fits"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {event["pid"] for event in report["trace"]} == {0, 1}
