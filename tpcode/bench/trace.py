"""A timeline for Chrome (chrome://tracing, or ui.perfetto.dev): one step, every rank a process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "gpu_user_annotation")


def chrome_events(step: Callable[[], None], rank: int, group) -> list[dict[str, Any]]:
    """Run a step under PyTorch's profiler: its events in Chrome's trace event format, with this rank for process.

    Times are microseconds on the clock of this host: ranks of one host line up, those of several only roughly.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (group.device.type == "cuda")
    group.barrier()
    with profile(activities=activities) as profiler:
        step()
        group.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found = json.loads(file.read_text())
    begin = found.get("baseTimeNanoseconds", 0) / 1e3
    events = [
        {"name": one["name"], "cat": one["cat"], "ph": "X", "ts": begin + float(one["ts"]), "dur": float(one["dur"]),
         "pid": rank, "tid": str(one["tid"])}
        for one in found["traceEvents"]
        if one.get("ph") == "X" and one.get("cat") in KINDS
    ]  # fmt: skip
    device = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU"
    name = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} ({device})"}}
    return [name, *events]


def write(events: list[dict[str, Any]], path: Path) -> None:
    """Into a file that Chrome opens, beginning at 0."""
    first = min((one["ts"] for one in events if "ts" in one), default=0.0)
    moved = [one | {"ts": one["ts"] - first} if "ts" in one else one for one in events]
    path.write_text(json.dumps({"traceEvents": moved, "displayTimeUnit": "ms"}))
