"""`make gpu-check`: the tests that need GPUs, and a bench, on whatever GPUs there are; in less than three minutes.

What there are too few GPUs for is skipped, and named at the end. It ends with 0 unless something failed.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS_SECONDS, BENCH_SECONDS, ONE_TEST_SECONDS = 90, 75, 60
ENOUGH = 2  # GPUs for collectives


def main() -> int:
    began = time.monotonic()
    gpus = names()
    listed = f"GPUs: {', '.join(gpus)}" if gpus else "no GPU that torch can use (tpcode doctor says why)"
    print(listed, flush=True)
    tests, skipped, passed = run_tests()
    failed = [] if tests in (0, NO_TESTS) else ["the tests"]
    if not gpus:
        skipped.append("the bench: needs 1 GPU, there are 0")
    else:
        if len(gpus) < ENOUGH:
            skipped.append(f"collectives, and layers on several ranks, in the bench: needs {ENOUGH} GPUs, there is 1")
        if bench() != 0:
            failed.append("the bench")
    seconds = time.monotonic() - began
    print(f"\n{passed} tests passed, failed: {', '.join(failed) or 'nothing'}; {seconds:.0f} s in all")
    print("\n".join(["skipped:", *(f"  {one}" for one in skipped)]) if skipped else "skipped: nothing")
    return bool(failed)


NO_TESTS = 5  # pytest's exit code where it found none


def names() -> list[str]:
    """Of the GPUs that torch can use."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def files_with_gpu_tests() -> list[str]:
    """Only these are collected: importing all tests takes longer than running these."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text("utf-8")]


def run_tests() -> tuple[int, list[str], int]:
    """Exit code, what was skipped and why, and how many passed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rf", f"--timeout={ONE_TEST_SECONDS}"]
    code, said = limited([*command, *files_with_gpu_tests()], TESTS_SECONDS)
    return code, skips(said), sum(line.split()[1:2] == ["PASSED"] for line in said.splitlines())


def skips(said: str) -> list[str]:
    """Each skipped test with its reason, in pytest's words: "tests/a.py::test_b SKIPPED (needs 2 GPUs, as here)"."""
    found = re.findall(r"^(\S+::\S+) SKIPPED \((.*)\)", said, re.MULTILINE)
    return [f"{test}: {reason}" for test, reason in found]


def bench() -> int:
    """`tpcode bench` on all GPUs."""
    code, _ = limited([sys.executable, "-m", "tpcode", "bench", "--rounds", "5"], BENCH_SECONDS)
    return code


def limited(command: list[str], seconds: float) -> tuple[int, str]:
    """Run a command for so long at most: exit code and standard output, which is printed too."""
    print(f"\n$ {' '.join(command[1:])}", flush=True)
    environment = os.environ | {"COLUMNS": "110" if "bench" in command else "250"}  # pytest cuts what is longer
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=seconds, env=environment)
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = 1, (error.stdout or b"").decode(errors="replace") + f"\nstopped after {seconds} s"
    print(said, flush=True)
    return code, said


if __name__ == "__main__":
    sys.exit(main())
