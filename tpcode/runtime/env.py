"""What this machine and this process offer: cores, GPUs, and whether torchrun started us."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Threads for each of `ranks` processes on this machine: one where ranks are at least as many as cores."""
    return max(1, cores() // ranks)


def loopback() -> str:
    """Name of the loopback interface, which gloo is told to use: a hostname need not resolve on a laptop."""
    return "lo0" if sys.platform == "darwin" else "lo"


def choose_backend(ranks: int, backend: str | None = None) -> str:
    """`"nccl"` where there is a GPU for each of `ranks`, else `"gloo"`; a stated backend is checked.

    Raises:
        ValueError: the backend is unknown, or NCCL is asked for with fewer GPUs than ranks.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if backend is None:
        return "nccl" if gpus >= ranks else "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; it must be 'gloo', 'nccl', or None to choose by the GPUs present")
    if backend == "nccl" and gpus < ranks:
        raise ValueError(
            f"backend 'nccl' needs one GPU per rank: {ranks} ranks, {gpus} GPUs usable here; "
            f"use backend='gloo', or at most {gpus} ranks"
        )
    return backend


def under_torchrun() -> bool:
    """Whether torchrun started this process. RANK and WORLD_SIZE alone may be left over from an experiment."""
    return "TORCHELASTIC_RUN_ID" in os.environ and _place() is not None


def _place() -> tuple[int, int] | None:
    """(rank, world size) that a launcher put into the environment, if one did."""
    if all(name in os.environ for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE")):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def init_from_env(timeout: float = 60.0) -> tuple[int, int]:
    """Join the ranks that torchrun, or a cluster's launcher, started, on one node or many; returns (rank, world size).

    Takes NCCL where this node has a GPU for each of its ranks, else gloo; sets the CUDA device and the threads. Safe to
    call again.

    Args:
        timeout: seconds that one collective may wait.

    Raises:
        RuntimeError: torchrun's variables are missing from the environment.
    """
    import torch
    import torch.distributed as dist

    place = _place()
    if place is None:
        raise RuntimeError(
            "RANK, WORLD_SIZE and MASTER_ADDR are not set: start this script with "
            "`torchrun --nproc-per-node 2 script.py`, or use tpcode.launch(fn, 2) without torchrun"
        )
    if not dist.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        backend = choose_backend(local_ranks)
        if backend == "nccl":
            torch.cuda.set_device(local_rank)
        elif local_ranks == place[1]:  # all on one node
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        torch.set_num_threads(threads_per_rank(local_ranks))
        dist.init_process_group(with_cpu(backend), timeout=timedelta(seconds=timeout))
        atexit.register(_leave)
    return place


def _leave() -> None:
    """Leave the group while torch's threads still run: a process that ends with it open may abort."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def with_cpu(backend: str) -> str:
    """The same backend for c10d, with gloo beside NCCL so that CPU tensors work too."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
