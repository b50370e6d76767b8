"""Training over two hosts: tp inside each, dp across, started by torchrun on both as the book's recipe says.

The hosts are network namespaces of this machine, each with an address and a loopback of its own, and a cable between
them: what one can reach of the other goes over that link, and ends when it is cut.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import tpcode.grid
from tools.namespaces import Host, NoNamespaces, linked_namespaces
from tpcode import ModelConfig, RankError, RankTimeout
from tpcode.checkpoint import CheckpointError
from tpcode.dense import MODELS
from tpcode.grid import Grid, average_grads, batch_of, make_grid, naming_the_lost

TIMEOUT = 8  # seconds that a rank waits for a peer
SLACK = 2  # in which it must then have said so
SIZES = ["--tp", "2", "--batch", "4", "--sequence", "16", "--hidden", "16", "--heads", "2", "--layers", "1"]
OPTIONS = [*SIZES, "--dtype", "float64", "--lr", "0.01", "--every", "5"]


# ---- hosts ----------------------------------------------------------------------------------------------------------


@contextmanager
def two_hosts():
    """Skips where they cannot be made."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(linked_namespaces(rate=None))
        except NoNamespaces as reason:
            pytest.skip(str(reason))
        yield hosts


# ---- torchrun on each -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """torchrun on one host: its lines, each with the time at which it came."""

    process: subprocess.Popen
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self):
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for(self, pattern: str, seconds: float) -> tuple[float, str]:
        """The first line that the pattern is found in."""
        deadline = time.monotonic() + seconds
        while True:
            over = self.process.poll() is not None or time.monotonic() > deadline
            if over:
                time.sleep(0.5)  # the last lines may be on their way
            for when, line in list(self.lines):
                if re.search(pattern, line):
                    return when, line
            if over:
                pytest.fail(f"no {pattern!r} within {seconds} s, or before the end:\n{self.text}")
            time.sleep(0.02)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    @property
    def losses(self) -> dict[int, float]:
        return {
            int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss ([\d.]+)$", self.text, re.MULTILINE)
        }


@contextmanager
def training(hosts: Sequence[Host], *options: str):
    """The recipe: the same command on each host, but for the node's rank; two ranks on each."""
    runs = []
    try:
        for node, host in enumerate(hosts):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
                "--node-rank", str(node), "--master-addr", hosts[0].address, "--master-port", "29500",
                "-m", "tpcode.grid", *OPTIONS, *options,
            ]  # fmt: skip
            # These hosts have no name server, and c10d looks names up: let it give up soon.
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": host.device,
                "PYTHONUNBUFFERED": "1",
                "RES_OPTIONS": "timeout:1 attempts:1",
            }
            process = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *torchrun],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
            runs.append(Run(process))
        yield runs
    finally:
        for run in runs:
            end(run.process)


def end(process: subprocess.Popen) -> None:
    """torchrun and its ranks, where they have not ended by themselves."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.wait(10)


def dense_losses(steps: int, text: Tensor) -> list[float]:
    """The same training in one process, by the dense model, PyTorch's AdamW and PyTorch's clipping."""
    config = ModelConfig(family="gpt2", hidden=16, ffn=64, heads=2, layers=1, vocab=256, max_seq=16)
    model = MODELS["gpt2"](config, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(steps):
        ids, targets = batch_of(text, step, 4, 16, Grid(1, 1, 0, None, None, 1.0))
        loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- the test -------------------------------------------------------------------------------------------------------


def test_a_cut_link_is_named_in_time_and_training_goes_on_to_the_same_loss(tmp_path):
    """Rules out: a hang (the error comes within the timeout and 2 s, on both hosts); a nameless error (it names rank,
    node, step and what to do); a checkpoint that lacks Adam's averages, or a restart that reads other data (the losses
    after it are the dense model's, which was never stopped); gradients not averaged over the hosts (so do those before
    it: a replica sees half of the batch)."""
    text, saved = Path(__file__).read_bytes(), tmp_path / "run"
    (tmp_path / "text").write_bytes(text)
    files = ["--text", str(tmp_path / "text"), "--save", str(saved)]
    with two_hosts() as hosts:
        with training(hosts, *files, "--steps", "100000", "--timeout", str(TIMEOUT)) as runs:
            runs[0].wait_for(r"saved .*step-000005", 90)
            cut = time.monotonic()
            hosts[1].cut()
            for node, run in enumerate(runs):
                named = rf"^tpcode\.grid: RankTimeout: rank [{2 * node}{2 * node + 1}] on node {node} of 2, step \d+: "
                when, said = run.wait_for(named, TIMEOUT + 30)
                assert when - cut <= TIMEOUT + SLACK, f"after {when - cut:.1f} s"
                assert f"did not answer within {TIMEOUT} s" in said and "Start all nodes again" in said
            assert all(run.process.wait(30) != 0 for run in runs)
            before = runs[0].losses

        hosts[1].mend()
        done = max(int(path.name.removeprefix("step-")) for path in saved.glob("step-*"))
        assert 5 <= done <= len(before) and not list(saved.glob(".step-*"))
        with training(hosts, *files, "--steps", str(done + 5)) as runs:
            assert [run.process.wait(90) for run in runs] == [0, 0], runs[0].text
            runs[0].wait_for(f"saved .*step-{done + 5:06}", 5)
            assert f"goes on after step {done}" in runs[0].text and "loss" not in runs[1].text
            after = runs[0].losses

    assert list(before) == list(range(1, len(before) + 1)) and list(after) == list(range(done + 1, done + 6))
    wanted = dense_losses(max(len(before), done + 5), torch.tensor(list(text)))
    for losses in (before, after):
        assert [losses[step] for step in losses] == pytest.approx([wanted[step - 1] for step in losses], abs=1e-9)
    assert wanted[done + 4] < wanted[0] - 0.1  # it learns: a loss that stands still would be the same by itself


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_the_grid_and_what_is_averaged_over_it(pool4):
    """Of four ranks with t = 2: neighbours are one replica, ranks two apart average. Each sees only its own groups."""

    def job():
        import torch.distributed as dist

        grid = make_grid(2)
        model = torch.nn.Linear(2, 2)
        for i, parameter in enumerate(model.parameters(), 1):
            parameter.grad = torch.full_like(parameter, i * float(dist.get_rank()))
        average_grads(model, grid)
        members = [dist.get_process_group_ranks(group) for group in (grid.tp_group, grid.dp_group)]
        return members, (grid.tp_rank, grid.dp_rank), [p.grad.unique().tolist() for p in model.parameters()]

    assert pool4.run(job) == [
        ([[0, 1], [0, 2]], (0, 0), [[1.0], [2.0]]),
        ([[0, 1], [1, 3]], (1, 0), [[2.0], [4.0]]),
        ([[2, 3], [0, 2]], (0, 1), [[1.0], [2.0]]),
        ([[2, 3], [1, 3]], (1, 1), [[2.0], [4.0]]),
    ]


def test_a_batch_depends_on_its_step_alone():
    """Replicas cut one batch: side by side they are what one rank would read."""
    text = torch.arange(1000) % 256
    grids = [Grid(1, 2, rank, None, None, 1.0) for rank in range(2)]
    whole, _ = batch_of(text, 7, 4, 16, Grid(1, 1, 0, None, None, 1.0))
    parts = [batch_of(text, 7, 4, 16, grid) for grid in grids]
    assert torch.equal(torch.cat([ids for ids, _ in parts]), whole)
    assert all(torch.equal(targets, (ids + 1) % 256) for ids, targets in parts)
    assert not torch.equal(batch_of(text, 8, 4, 16, grids[0])[0], parts[0][0])


def test_only_a_lost_peer_is_named_as_one():
    grid = Grid(2, 2, 3, None, None, 5.0)
    for words, kind in (
        ("Timed out waiting 5000ms for recv operation to complete", RankTimeout),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4242", RankError),
        ("NCCL communicator was aborted", RankError),
    ):
        named = pytest.raises(kind, match=r"rank 3 on node 0 of 1, step 9: one of its peers \(ranks 1, 2\)")
        with named as found, naming_the_lost(grid, 9, Path("run")):
            raise RuntimeError(words)
        assert words in str(found.value) and "goes on from the last step in run" in str(found.value)
        assert type(found.value) is kind and found.value.rank == 3
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("timed out")):
        with pytest.raises(type(error), match=str(error)) as found, naming_the_lost(grid, 9, None):
            raise error
        assert found.value is error


BAD = {
    ("--tp", "3"): "the number of ranks = 4 does not divide by t = 3; t that work: 1, 2, 4",
    ("--tp", "4", "--heads", "6", "--hidden", "24"): "do not split over t = 4",
    ("--tp", "2", "--batch", "5"): "--batch 5 is not shared evenly by dp = 2 replicas: take a multiple of 2",
    ("--tp", "2", "--sp", "--sequence", "15"): "--sequence = 15 does not divide by t = 2",
    ("--steps", "0"): "--steps must be at least 1 and is 0",
}


@pytest.mark.parametrize(("arguments", "words"), BAD.items(), ids=lambda value: None)
def test_what_cannot_work_is_refused_before_ranks_meet(arguments, words, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(tpcode.grid, "init_from_env", lambda **options: pytest.fail("it went to meet the others"))
    with pytest.raises(ValueError, match=re.escape(words)):
        tpcode.grid.main([*arguments])


def test_training_is_stopped_and_goes_on_in_one_process(tmp_path, capsys):
    """What a killed run left half written is not taken for a checkpoint; other sizes and another t are refused."""
    small = [*OPTIONS[2:], "--every", "2", "--save", str(tmp_path)]
    tpcode.grid.main([*small, "--steps", "4"])
    (tmp_path / ".step-000009").mkdir()
    said = capsys.readouterr().out
    tpcode.grid.main([*small, "--steps", "6"])
    rest = capsys.readouterr().out
    assert "goes on after step 4" in rest and "step 4 loss" in said and "step 5 loss" in rest
    with pytest.raises(ValueError, match="holds a model of other sizes"):
        tpcode.grid.main([*small, "--layers", "2"])
    (tmp_path / "step-000006/adamw-00000-of-00001.safetensors").rename(tmp_path / "step-000006/adamw-00000-of-00002.x")
    with pytest.raises(CheckpointError, match="adamw-00000-of-00001.*is missing.*take --tp as it was"):
        tpcode.grid.main([*small, "--steps", "7"])
