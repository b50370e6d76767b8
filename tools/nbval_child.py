"""The process in which nbval runs a learner's notebook: pytest with one plugin that reports each cell as a JSON line.

    python -m tools.nbval_child NOTEBOOK FOLDER TIMEOUT

It also takes away nbval's traps: markers and tags by which a cell could pass unseen are ignored, a dead kernel is
noticed at once instead of at the timeout, and what native code wrote before it died is kept. The kernel stands in
FOLDER. A cell's metadata names its exercise; after a failure the rest of that exercise is left out, and the next goes
on in the same kernel.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from queue import Empty

import nbval.kernel
import pytest

MARK = "\x1etpcode "  # begins a line that is a report
POLL = 0.5  # seconds between two looks at whether the kernel lives


class KernelDied(Exception):
    """The kernel's process ended while a cell ran."""


def watch_kernels(folder: str, stderr_file) -> None:
    """Make nbval start its kernel in `folder` with stderr in a file, and notice when it dies."""
    start, get_message = nbval.kernel.start_new_kernel, nbval.kernel.RunningKernel.get_message

    def start_new_kernel(startup_timeout=60, kernel_name="python", **options):
        options |= {"cwd": folder, "stderr": stderr_file, "extra_arguments": ["--log-level=ERROR"]}
        return start(startup_timeout, kernel_name, **options)

    def get_message_while_alive(self, stream, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL if end is None else min(POLL, max(0.0, end - time.monotonic()))
            try:
                return get_message(self, stream, left)
            except Empty:
                if not self.is_alive():
                    raise KernelDied(_how_it_ended(self)) from None
                if end is not None and time.monotonic() >= end:
                    raise

    nbval.kernel.start_new_kernel = start_new_kernel
    nbval.kernel.RunningKernel.get_message = get_message_while_alive


def _how_it_ended(kernel) -> str:
    code = kernel.km.provisioner.process.poll()
    if code is None or code >= 0:
        return f"exit status {code}"
    return f"signal {-code}, {signal.Signals(-code).name}"


class Reports:
    """Prints what became of each cell, and leaves out the rest of an exercise that failed."""

    def __init__(self, stderr_file):
        self.stderr_file = stderr_file
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.options = defaultdict(bool)  # no marker or tag counts

    def pytest_runtest_setup(self, item):
        if item.cell.metadata["exercise"] in self.failed:
            pytest.skip("an earlier cell of this exercise failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when != "call" and call.excinfo is None:
            return report
        if call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
            return report
        exercise = item.cell.metadata["exercise"]
        outcome = self.outcome(item, call)
        outcome |= {"exercise": exercise, "source": item.cell.source, "last": item.cell.metadata["last"]}
        print(f"\n{MARK}{json.dumps(outcome)}", file=sys.__stdout__, flush=True)
        if outcome["kind"] != "ran":
            self.failed.add(exercise)
        if outcome["kind"] in ("died", "hung") or (outcome["kind"] != "ran" and not exercise):
            item.session.shouldstop = "the kernel is gone, or the setup failed"
        return report

    def outcome(self, item, call) -> dict:
        """What became of a cell: its kind (ran, error, hung, died), and the texts that belong to it."""
        outputs = item.test_outputs or []
        printed = "".join(out.text for out in outputs if out.output_type == "stream")
        error = next((out for out in outputs if out.output_type == "error"), {})
        told = {"printed": printed, "ename": "", "evalue": "", "traceback": []}
        told |= {key: error[key] for key in ("ename", "evalue", "traceback") if key in error}
        if call.excinfo is None:
            return told | {"kind": "ran"}
        if isinstance(call.excinfo.value, KernelDied):
            self.stderr_file.seek(0)
            return told | {"kind": "died", "evalue": str(call.excinfo.value), "native": self.stderr_file.read()}
        if item.parent.timed_out:
            return told | {"kind": "hung"}
        return told | {"kind": "error", "evalue": told["evalue"] or str(call.excinfo.value)}


def main(notebook: str, folder: str, timeout: str) -> int:
    with tempfile.TemporaryFile("w+", errors="replace") as stderr_file:
        watch_kernels(folder, stderr_file)
        settings = Path(notebook).with_name("pytest.ini")  # an empty one: the project's do not apply
        settings.write_text("[pytest]\n")
        options = [
            *("-c", str(settings), "--rootdir", str(settings.parent), "-p", "no:cacheprovider", "-q", "--color=no"),
            *("--capture=no", "--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={timeout}"),
        ]
        return pytest.main([*options, notebook], plugins=[Reports(stderr_file)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
