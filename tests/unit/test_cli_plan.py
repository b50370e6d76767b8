"""`tpcode plan`: the planner's answer as a table and as JSON, and what cannot work, in a sentence."""

import json
import os
import re
import subprocess
import sys

import pytest

from tpcode import cli, planning
from tpcode.config import PRESETS, Layout, ModelConfig
from tpcode.cost.hardware import CARDS, GiB
from tpcode.cost.layout import Plans, Refusal, plan

ENVIRONMENT = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
NO_TORCH = "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nfrom tpcode.cli import main\nmain()"


def answer(arguments, capsys):
    """Exit code, stdout and stderr, in this process."""
    with pytest.raises(SystemExit) as end:
        cli.app(["plan", *map(str, arguments)], prog_name="tpcode")
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_the_table_is_the_planners_and_needs_no_torch():
    """As typed, 80 columns wide: the layouts in the planner's order with its numbers, and every refusal."""
    arguments = ["plan", "--model", "llama-3-70b", "--gpus", "64", "--gpu", "h100"]
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80 and "…" not in done.stdout
    wanted = plan(ModelConfig.preset("llama-3-70b"), "h100", 64, batch=512, sequence=8192)
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" +\d+ +\d+ +\d+ +(yes|no) ", line)]
    assert len(rows) == 10 < len(wanted.fitting) and f"--top {len(wanted.fitting)} shows them" in done.stdout
    for row, one in zip(rows, wanted.fitting):
        layout, work, step = one.layout, one.workload, one.step
        assert row[:4] == [*map(str, (layout.tp, layout.pp, layout.dp)), "yes" if layout.sequence_parallel else "no"]
        assert row[5:8] == [str(work.microbatch), str(work.microbatches(layout)), str(work.interleave)]
        assert row[8:11] == [f"{one.memory.total / GiB:.1f}", f"{step.seconds:.2f}", f"{100 * step.mfu:.1f}"]
        assert row[12] == f"{step.tokens_per_second_per_gpu:,.0f}"
    for one in wanted.refused:
        assert f"{one.layout.tp}·{one.layout.pp}·{one.layout.dp}" in done.stdout
    assert "needs 79.1 GiB at least, and 72.0 GiB are to be had" in done.stdout
    assert "512 sequences of 8,192 tokens" in done.stdout and "tp over NVLink, pp over the network" in done.stdout


def test_json_has_all_of_it(capsys):
    code, out, _ = answer(["--model", "llama-3-8b", "--gpus", 16, "--batch", 64, "--sequence", 2048, "--json"], capsys)
    found, wanted = json.loads(out), plan(ModelConfig.preset("llama-3-8b"), "h100", 16, batch=64, sequence=2048)
    assert code == 0 and (found["batch"], found["sequence"]) == (64, 2048)
    assert found["parameters"] == PRESETS["llama-3-8b"].num_parameters
    assert [(one["tp"], one["pp"], one["dp"], one["step_seconds"]) for one in found["fitting"]] == [
        (one.layout.tp, one.layout.pp, one.layout.dp, one.step.seconds) for one in wanted.fitting
    ]
    assert [one["reason"] for one in found["refused"]] == [str(one.reason) for one in wanted.refused]
    for one in found["fitting"]:
        assert sum(one["seconds"].values()) == pytest.approx(one["step_seconds"])
        assert one["memory_bytes"]["total"] <= found["usable_bytes"]


def test_axes_that_are_settled_stay(capsys):
    """Those and no others, and the same numbers as among all."""
    code, out, _ = answer(["--model", "llama-3-70b", "--gpus", 64, "--tp", 8, "--pp", 4, "--json"], capsys)
    found = json.loads(out)
    assert code == 0 and found["refused"] == []
    assert [(one["tp"], one["pp"], one["dp"]) for one in found["fitting"]] == [(8, 4, 2)]
    every = planning.answer(planning.Question(model="llama-3-70b", gpus=64))
    [same] = [one for one in every.fitting if (one.layout.tp, one.layout.pp) == (8, 4)]
    assert found["fitting"][0]["step_seconds"] == same.step.seconds


def test_where_nothing_fits_it_says_how_many_gpus_would_do(capsys):
    code, out, _ = answer(["--model", "llama-3-70b", "--gpus", 4, "--gpu", "a100"], capsys)
    assert code == 1 and "No layout fits. On 32 of these GPUs one would." in out
    assert planning.answer(planning.Question(model="llama-3-70b", gpus=32, gpu="a100")).fitting
    assert not planning.answer(planning.Question(model="llama-3-70b", gpus=16, gpu="a100")).fitting
    _, out, _ = answer(["--model", "llama-3-70b", "--gpus", 63], capsys)
    assert "On 64 of these GPUs one would." in out  # and not on 126 or more


def test_how_many_would_do_keeps_to_the_axes_that_are_settled(capsys):
    """No power of two has a tp of 6; doubling does."""
    code, out, _ = answer(["--model", "gpt3-175b", "--gpus", 6, "--gpu", "a100", "--tp", 6], capsys)
    enough = int(re.search(r"No layout fits. On (\d+) of these GPUs one would.", out)[1])
    assert code == 1 and enough % 6 == 0
    assert planning.answer(planning.Question(model="gpt3-175b", gpus=enough, gpu="a100", tp=6)).fitting


@pytest.mark.parametrize(("gpus", "batch"), [(1, 512), (12, 516), (64, 512), (1024, 1024)])
def test_the_batch_is_chosen_so_that_every_layout_can_share_it(gpus, batch):
    question = planning.Question(model="llama-3-8b", gpus=gpus)
    assert (question.B, question.B % gpus) == (batch, 0)


BAD = {
    ("--model", "gpt5", "--gpus", "8"): ["no preset 'gpt5'", *PRESETS],
    ("--model", "gpt2", "--gpus", "8", "--gpu", "b200"): ["no card 'b200'", *CARDS],
    ("--model", "llama-3-8b", "--gpus", "8", "--tp", "3"): ["8 GPUs are no multiple of tp 3"],
    ("--model", "llama-3-8b", "--gpus", "12", "--tp", "2", "--pp", "4"): ["12 GPUs are no multiple of tp 2 · pp 4 = 8"],
    ("--model", "llama-3-8b", "--gpus", "8", "--tp", "4", "--pp", "2", "--dp", "2"): ["16 ranks, and there are 8 GPUs"],
    ("--model", "llama-3-8b", "--gpus", "64", "--tp", "64"): ["tp = 64 is more than the 32 query heads"],
    ("--model", "llama-3-8b", "--gpus", "12", "--tp", "3"): ["t that work: 1, 2, 4, 8, 16, 32"],
    ("--model", "llama-3-70b", "--gpus", "32", "--pp", "32"): ["hold 80 layers evenly; pp that work: 1, 2, 4, 5"],
    ("--model", "gpt2", "--gpus", "8", "--sequence", "4096"): ["more than the model's context of 1024 tokens"],
    ("--model", "gpt2", "--gpus", "0"): ["--gpus must be at least 1 and is 0"],
    ("--model", "gpt2", "--gpus", "8", "--batch", "-1"): ["--batch must be at least 1 and is -1"],
    ("--model", "gpt2", "--gpus", "8", "--usable", "80"): ["above 0 and at most 1, and is 80"],
    ("--gpus", "8"): ["Missing option '--model'"],
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD.items(), ids=lambda value: None)
def test_what_cannot_work_is_refused_in_a_sentence(arguments, words, capsys):
    code, out, said = answer(arguments, capsys)
    assert (code, out) == (2, "") and "Traceback" not in said
    assert all(word in said for word in words)


def test_each_reason_names_its_layouts_and_many_are_counted():
    plans = Plans([], [Refusal(Layout(tp=64, pp=p, dp=16 // p), "heads") for p in (1, 2, 4, 8, 16)])
    table = planning._refused(plans)
    assert [list(column.cells) for column in table.columns] == [
        ["64·1·16\n64·2·8\n64·4·4\n64·8·2\nand 1 more"],
        ["heads"],
    ]
