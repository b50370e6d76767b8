"""`tpcode bench` without ranks: the fit, what cannot be measured, what memory it asks for, and its tables."""

import re

import pytest
from rich.console import Console

import tpcode.doctor
import tpcode.runtime
from tpcode import cli
from tpcode.bench import settings as module
from tpcode.bench import tables
from tpcode.bench.fit import fit, fit_all, predict_all
from tpcode.bench.settings import Settings, settings, sizes_of_t
from tpcode.config import PRESETS
from tpcode.cost.communication import busbw

SMALL = {"model": "gpt2", "batch": 2, "sequence": 8, "dtype": "float32", "largest_bytes": 2**15}


# ---- alpha and beta -------------------------------------------------------------------------------------------------


def test_a_line_is_found_again():
    alpha, speed = 3e-5, 2.5e9
    line = fit((size, alpha + size / speed) for size in (4096, 2**15, 2**18, 2**22))
    assert line.alpha_seconds == pytest.approx(alpha) and line.bytes_per_second == pytest.approx(speed)


def test_relative_errors_count():
    """Of a large payload 10% too slow and a small one 10% too fast neither rules: by absolute errors the small one's
    would be nothing, and alpha would be far off."""
    alpha, speed = 1e-4, 1e9
    points = [(size, factor * (alpha + size / speed)) for size, factor in ((4096, 0.9), (2**18, 1), (2**26, 1.1))]
    line = fit(points)
    assert all(abs(line.seconds(size) / seconds - 1) < 0.1 for size, seconds in points)
    assert 0.7 * alpha < line.alpha_seconds < alpha


def test_no_part_of_a_line_is_negative():
    falling = fit([(4096, 2e-3), (2**20, 1e-3)])  # noise: the larger one was faster
    assert falling.bytes_per_second == float("inf") and 1e-3 < falling.alpha_seconds < 2e-3
    steep = fit([(1000, 1e-7), (2000, 1e-6)])
    assert steep.alpha_seconds == 0 and steep.bytes_per_second > 0


def test_one_payload_makes_no_line():
    with pytest.raises(ValueError, match="two different payloads"):
        fit([(4096, 1e-3), (4096, 2e-3)])


def report():
    """Made up: all-reduces of 1 ms and a byte a nanosecond, gathers and scatters of half of it."""
    half = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}
    found = {
        "machine": {
            "backend": "gloo",
            "device": "CPU",
            "threads_per_rank": 1,
            "torch": "2.13.0",
            "cores": 2,
            "load": 0.1,
        },
        "settings": {"model": "gpt2", "batch": 2, "sequence": 8, "dtype": "float32", "world": 2},
        "collectives": [],
        "layers": [],
    }
    for op, factor in half.items():
        for size in (4096, 10**6):
            seconds = factor * (1e-3 + size * 1e-9)
            bandwidths = {"algbw_bytes_per_second": size / seconds}
            bandwidths["busbw_bytes_per_second"] = busbw(op, size, seconds, 2)
            found["collectives"].append({"op": op, "tp": 2, "payload_bytes": size, "seconds": seconds, **bandwidths})
    for layer in ("ffn", "block"):
        for t, sp, calls in (
            (1, False, {}),
            (2, False, {"all_reduce": 4}),
            (2, True, {"all_gather": 6, "reduce_scatter": 4}),
        ):
            row = {"layer": layer, "tp": t, "sequence_parallel": sp, "seconds": 0.1 / t}
            row["calls"] = [{"op": op, "payload_bytes": 2 * 10**6, "calls": n} for op, n in calls.items()]
            row |= {"collective_seconds": 0.015 * bool(calls), "collective_share": 0.3 * bool(calls)}
            row |= {"tokens_per_second": 160.0 * t, "flops_per_second_per_rank": 2e9}
            sizes = {"weights": 4, "gradients": 4, "kept_for_backward": 2, "peak": 11}
            row |= {f"{name}_bytes": size * 2**20 // t for name, size in sizes.items()}
            found["layers"].append(row)
    found["fits"] = fit_all(found["collectives"])
    predict_all(found)
    return found


def test_a_layers_collectives_are_predicted_from_the_fits():
    rows = {(row["tp"], row["sequence_parallel"]): row for row in report()["layers"] if row["layer"] == "block"}
    assert rows[1, False]["predicted_collective_seconds"] == 0
    assert rows[2, False]["predicted_collective_seconds"] == pytest.approx(4 * 3e-3)
    assert rows[2, True]["predicted_collective_seconds"] == pytest.approx(10 * 1.5e-3)


def test_what_was_not_measured_predicts_nothing():
    found = report()
    found["fits"] = [one for one in found["fits"] if one["op"] == "all_reduce"]
    predict_all(found)
    assert [row["predicted_collective_seconds"] is None for row in found["layers"][:3]] == [False, False, True]


# ---- tables ---------------------------------------------------------------------------------------------------------


def printed(found, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    tables.show(found, console)
    return console.export_text()


def test_the_tables_tell_all_and_fit_a_terminal():
    text = printed(report())
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    joined = [" ".join(row) for row in rows]
    assert "all_reduce 2 4 KiB 1,004 0.004 0.004 1,004 +0%" in joined
    assert "all_gather 2 1000000 B 1,000 1.000 0.500 1,000 +0%" in joined
    assert "all_reduce 2 1,000 1.000 +0%" in joined
    assert "block 2 yes 50.00 30% 320 2.0 5.5" in joined
    assert "block 2 no 4 12.00 15.00 1.25" in joined
    assert "kept for backward 2.00 1.00 0.50" in joined
    assert "2 50.00 15.00 30% █████████" in joined


def test_a_busy_machine_is_named():
    found = report()
    assert "busy" not in printed(found)
    found["machine"]["load"] = 7.3
    assert "busy (load 7.3 on 2 cores)" in " ".join(printed(found).split())


def test_tables_of_a_part_alone():
    """Without collectives nothing is predicted, without t = 2 no demo is shown, and nothing is empty."""
    found = report()
    found["collectives"], found["fits"] = [], []
    found["layers"] = [row for row in found["layers"] if row["layer"] == "block" and row["tp"] == 1]
    text = printed(found)
    assert "alpha" not in text and "ratio" not in text and "all-reduces as t grows" not in text
    assert "block" in text


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_sizes_of_t():
    assert [sizes_of_t(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_what_is_not_said_is_chosen_for_the_machine(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 2)
    chosen = settings(sequence=64, rounds=2)
    assert (chosen.model, chosen.tp, chosen.world, chosen.sequence, chosen.rounds) == ("gpt2", (1, 2), 2, 64, 2)
    monkeypatch.setattr(module, "cores", lambda: 64)
    assert settings().tp == (1, 2, 4)  # one machine's memory speed: more ranks on it say little
    assert settings(model="smollm2-135m").tp == (1,)  # nine heads: neither 2 nor 4
    chosen = settings(model="smollm2-135m", tp=(1, 3), sequence=None)
    assert (chosen.world, chosen.sequence) == (3, 129)  # not 128: a sequence that nobody asked for is one that splits


def with_gpus(monkeypatch, gpus):
    monkeypatch.setattr(module, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(module, "choose_backend", lambda ranks: "nccl" if gpus >= ranks else "gloo")
    return settings()


@pytest.mark.parametrize(("gpus", "tp"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4)), (8, (1, 2, 4, 8))])
def test_gpus_are_taken_where_there_are_any(gpus, tp, monkeypatch):
    """Those sizes over which the layer's 32 heads and 8 KV heads split: not 6."""
    chosen = with_gpus(monkeypatch, gpus)
    assert (chosen.model, chosen.dtype, chosen.tp) == ("llama-3-8b", "bfloat16", tp)


def test_under_torchrun_the_ranks_that_are_there_are_taken(monkeypatch):
    variables = {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    chosen = settings(model="gpt2-medium")
    assert (chosen.tp, chosen.world) == ((1, 2, 4, 8), 8)
    with pytest.raises(ValueError, match="--tp 16 needs 16 ranks, and torchrun started 8"):
        settings(model="gpt2-medium", tp=(16,))


def test_flops_and_parameters_add_up():
    """Of a GPT: 24nh² + 4bs²h forward in a block, and three times that in all; 12h² + 13h parameters."""
    one = Settings(tp=(1,), **SMALL)
    n, h = 16, 768
    assert one.flops("block") == 3 * (24 * n * h**2 + 4 * 2 * 8**2 * h)
    assert one.flops("ffn") == 3 * 16 * n * h**2 and one.flops("attention") == one.flops("block") - one.flops("ffn")
    assert one.parameters("block") == 12 * h**2 + 13 * h


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_ranks(monkeypatch):
    def refuse(*arguments, **options):
        pytest.fail("ranks were started")

    monkeypatch.setattr(tpcode.runtime, "RankPool", refuse)


def answer(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.app(["bench", *arguments], prog_name="tpcode")
    said = capsys.readouterr()
    assert said.out == ""
    return end.value.code, said.err


BAD = {
    ("--tp", "1,x"): ["whole numbers with commas between them", "'x'"],
    ("--tp", "0"): ["--tp must be at least 1 and is 0"],
    ("--tp", "5"): ["t that work: 1, 2, 3, 4, 6, 12"],
    ("--tp", "2", "--sequence", "129"): ["--sequence", "129 does not divide by t = 2", "1, 3, 43, 129"],
    ("--only", "ffn,mlp"): ["no 'mlp'; there are collectives, ffn, attention, block"],
    ("--model", "gpt5"): ["no preset 'gpt5'", *PRESETS],
    ("--rounds", "0"): ["--rounds must be at least 1 and is 0"],
    ("--largest-bytes", "-4"): ["--largest-bytes must be at least 1 and is -4"],
    ("--trace", "/nowhere/trace.json"): ["/nowhere/trace.json", "directory must exist"],
    ("--only", "collectives", "--trace", "trace.json"): ["--only names none of ffn, attention, block"],
    ("--dtype", "int8"): ["Invalid value for '--dtype'"],
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD.items(), ids=lambda value: None)
def test_what_cannot_work_is_refused_in_a_sentence(arguments, words, no_ranks, capsys):
    code, said = answer(arguments, capsys)
    assert code == 2 and all(word in said for word in words) and "Traceback" not in said


def test_too_little_memory_is_said_before_ranks_start(no_ranks, monkeypatch, capsys):
    """What it needs and what there is: of every rank, since ranks of one machine share its memory."""
    monkeypatch.setattr(tpcode.doctor, "free_memory", lambda: 3 * 2**30)
    code, said = answer(["--tp", "2", "--only", "block", "--model", "gpt3-175b", "--sequence", "2048"], capsys)
    assert code == 1
    needed, each, free = map(
        float, re.search(r"needs ([\d.]+) GiB \(2 ranks of ([\d.]+) GiB\), and ([\d.]+)", said).groups()
    )
    assert free == 3.0 and needed == pytest.approx(2 * each, abs=0.2)
    weights = 12 * 12288**2 * 4 / 2**30
    assert 3 * weights < each < 6 * weights


def test_ranks_share_the_memory_of_their_machine(monkeypatch):
    """What is enough for one is not for two; where nobody knows what is free, it is tried."""
    one, two = (Settings(tp=(t,), **SMALL) for t in (1, 2))
    for free in (1.5 * (one.needed_bytes() + module.RANK_BYTES), None):
        monkeypatch.setattr(tpcode.doctor, "free_memory", lambda free=free: free)
        one.require_memory()
        if free is None:
            two.require_memory()
        else:
            with pytest.raises(MemoryError, match="2 ranks of"):
                two.require_memory()
