"""`make bench`: how long ranks take to start, a call on warm ranks, and a note; beside mp.spawn and torchrun.

Everything is measured in this one run, round after round, so that a busy moment hits all alike. Medians, with the
smallest and largest value beside them.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from tpcode import RankPool
from tpcode.runtime.board import Board
from tpcode.runtime.notes import Notes

ROUNDS = 5

FIRST_POOL = """
import time
start = time.perf_counter()
from tpcode import RankPool
with RankPool({n}) as pool:
    print(time.perf_counter() - start)
"""

TORCHRUN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def main() -> None:
    measured: dict[tuple[str, str], list[float]] = {}
    limits = {
        ("first pool of a program, ranks ready", "4 ranks"): 2.5,
        ("further pool, ranks ready", "4 ranks"): 0.5,
        ("call on warm ranks", "2 ranks"): 0.010,
        ("call on warm ranks", "4 ranks"): 0.010,
        ("note", "2 ranks"): 20e-6,
    }
    console = Console(width=110)
    for round_ in range(ROUNDS):
        for n in (2, 4):
            ranks = f"{n} ranks"
            console.print(f"round {round_ + 1} of {ROUNDS}, {ranks}", highlight=False)
            for what, seconds in (
                ("first pool of a program, ranks ready", first_pool(n)),
                ("further pool, ranks ready", further_pool(n)),
                ("mp.spawn, ranks have met", spawn(n)),
                ("torchrun, ranks have met", torchrun(n)),
                ("call on warm ranks", warm_call(n)),
            ):
                measured.setdefault((what, ranks), []).append(seconds)
        measured.setdefault(("note", "2 ranks"), []).append(note())
    table = Table(title=f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("", "", "median", "smallest", "largest", "at most"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for (what, ranks), seconds in sorted(measured.items()):
        limit = limits.get((what, ranks))
        figures = [show(f(seconds)) for f in (statistics.median, min, max)]
        table.add_row(what, ranks, *figures, show(limit) if limit else "")
    console.print(table)


def show(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def first_pool(n: int) -> float:
    """Seconds from the first line of a new program to its ranks being ready, the import of torch included."""
    program = [sys.executable, "-c", FIRST_POOL.format(n=n)]
    return float(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


def further_pool(n: int) -> float:
    with RankPool(1):  # the forkserver is up
        start = time.perf_counter()
        with RankPool(n):
            return time.perf_counter() - start


def warm_call(n: int, calls: int = 50) -> float:
    """Median seconds of a call that makes one barrier."""
    with RankPool(n) as pool:
        pool.run(dist.barrier)
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            pool.run(dist.barrier)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def spawn(n: int) -> float:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(meet, args=(n, Path(folder) / "store"), nprocs=n)
    return time.perf_counter() - start


def meet(rank: int, n: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), n), rank=rank, world_size=n, timeout=timedelta(60))
    dist.barrier()


def torchrun(n: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "meet.py"
        script.write_text(TORCHRUN)
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", str(script)],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - start


def note(calls: int = 5000) -> float:
    """Seconds for one note of an all-reduce, comparison with a peer's included."""
    with RankPool(2) as pool:
        return max(pool.run(time_notes, calls))


def time_notes(calls: int) -> float:
    """Two ranks' writers in one process take turns, so that every second note finds a peer's to compare with."""
    board = Board(2)
    writers = [Notes(board, rank) for rank in range(2)]
    group, x, options = dist.group.WORLD, torch.ones(1024), dist.AllreduceOptions()
    start = time.perf_counter()
    for _ in range(calls):
        for writer in writers:
            writer.note_method("all_reduce", 0, group, [x], options)
    seconds = (time.perf_counter() - start) / (2 * calls)
    board.close()
    return seconds


if __name__ == "__main__":
    main()
