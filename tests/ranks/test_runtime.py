"""`launch` and `RankPool`: from everywhere, every job as if in new processes, nothing left behind."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tpcode import RankError, RankPool, launch
from tpcode.runtime import env

ROOT = Path(__file__).parents[2]


def run_python(*arguments, cwd, stdin=None, timeout=120, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=stdin,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# ---- what a job is --------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order_with_arguments_passed(pool4):
    def job(x, *, scale):
        return dist.get_rank(), (x * scale).tolist()

    assert pool4.run(job, torch.tensor([1.0, 2.0]), scale=3) == [(r, [3.0, 6.0]) for r in range(4)]


def test_plain_collectives_work(pool4):
    def job():
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        return x.item()

    assert pool4.run(job) == [6.0] * 4


def test_a_result_still_under_way_is_waited_for(pool2):
    def job():
        import torch.distributed._functional_collectives as functional

        return functional.all_reduce(torch.ones(1 << 20), "sum", dist.group.WORLD)

    for result in pool2.run(job):
        assert type(result) is torch.Tensor and result.eq(2).all()


def test_one_rank_is_a_rank():
    assert launch(lambda: (dist.get_rank(), dist.get_world_size()), 1) == [(0, 1)]


def test_modules_of_main_come_back_as_themselves(pool2):
    class Layer(torch.nn.Linear):
        pass

    first, second = pool2.run(lambda: Layer(2, 3))
    assert type(first) is Layer and first.weight.shape == (3, 2)


def test_threads_are_one_a_rank_where_ranks_are_as_many_as_cores(pool2):
    assert pool2.run(torch.get_num_threads) == [max(1, env.cores() // 2)] * 2
    assert [env.threads_per_rank(n) for n in (env.cores(), 2 * env.cores())] == [1, 1]


def look():
    """What a job finds in its process."""
    from torch.distributed import distributed_c10d as c10d

    return {
        "process": os.getpid(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "draw": torch.rand(1).item(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": (os.environ.get("SPOILED"), os.environ["RANK"]),
        "directory": os.getcwd(),
        "path": sys.path[0],
        "groups": len(c10d._world.pg_map),
    }


def test_a_job_leaves_nothing_to_the_next():
    """Not vacuous: the next job runs in the same processes, though this one made groups and imported DTensor. (In a
    pool of its own: ranks whose DTensor has a mesh are replaced.)"""

    def spoil():
        import torch.distributed.tensor

        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(7)
        torch.manual_seed(1234)
        torch.set_grad_enabled(False)
        os.environ["SPOILED"] = "yes"
        os.environ.pop("RANK")
        os.chdir("/")
        sys.path.insert(0, "/spoiled")
        dist.new_group([0, 1])
        dist.new_group([0])

    with RankPool(2) as pool:
        before = pool.run(look)
        pool.run(spoil)
        assert pool.run(look) == before
    assert before[0]["groups"] == 1 and before[1]["environment"] == (None, "1")


def test_a_job_that_asks_for_deterministic_algorithms_asks_for_itself_alone():
    def spoil():
        torch.use_deterministic_algorithms(True)

    with RankPool(2) as pool:
        before = pool.run(look)
        pool.run(spoil)
        assert pool.run(look) == before and not before[0]["deterministic"]


def test_random_numbers_are_not_the_same_in_every_job(pool2):
    """Python's and NumPy's generators start from the system's entropy, as in a new process."""
    draws = [pool2.run(lambda: (random.random(), float(np.random.rand()))) for _ in range(2)]
    assert len({draw for job in draws for rank in job for draw in rank}) == 8


def test_a_destroyed_process_group_is_made_anew(pool2):
    pool2.run(dist.destroy_process_group)
    assert pool2.run(dist.get_world_size) == [2, 2]


def test_the_callers_directory_and_environment_are_the_ranks(pool2, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEARNING_RATE", "0.1")
    assert pool2.run(lambda: (os.getcwd(), os.environ["LEARNING_RATE"])) == [(str(tmp_path), "0.1")] * 2


def test_the_callers_modules_run_as_they_are_now(pool2, monkeypatch, tmp_path):
    """A warm worker that kept an imported module would run its old source."""
    monkeypatch.syspath_prepend(tmp_path)

    def job():
        import edited_module

        return edited_module.answer()

    for answer in (1, 2):
        (tmp_path / "edited_module.py").write_text(f"def answer():\n    return {answer}  # {'x' * answer}\n")
        assert pool2.run(job) == [answer] * 2


def test_output_of_rank_0_is_live_and_the_others_follow_marked(pool2, capfd):
    def job():
        print(f"step one of rank {dist.get_rank()}")
        print("no newline", end="")
        os.system("echo from a child process")
        print("to stderr", file=sys.stderr)

    pool2.run(job)
    out, err = capfd.readouterr()
    assert out == (
        "step one of rank 0\nno newlinefrom a child process\n"
        "[rank 1] step one of rank 1\n[rank 1] no newlinefrom a child process\n"
    )
    assert err == "to stderr\n[rank 1] to stderr\n"


def test_rank_0_is_heard_before_the_job_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch.distributed as dist\nfrom tpcode import launch\n"
        "def job():\n    print('loss 1.0', end='\\r'); time.sleep(60)\n"
        "launch(job, 2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout.read(9) == b"loss 1.0\r"
        assert process.poll() is None  # it still runs: this was not flushed at the end
    finally:
        process.kill()
        process.wait()


def test_more_output_than_a_pipe_holds_is_not_lost(pool2, capfd):
    def job():
        for _ in range(4000):
            print("x" * 99)

    pool2.run(job)
    assert capfd.readouterr().out.count("x" * 99) == 8000


def test_nothing_printed_before_a_crash_is_lost(pool2, capfd):
    def job():
        print("last words", end="")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError):
        pool2.run(job)
    assert "[rank 1] last words" in capfd.readouterr().out


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: launch(2, dist.get_rank), TypeError, "fn is 2 and must be a function"),
        (lambda: launch(dist.get_rank, 0), ValueError, "world_size is 0; at least 1"),
        (lambda: launch(dist.get_rank, -2), ValueError, "world_size is -2"),
        (lambda: launch(dist.get_rank, 2.0), TypeError, "world_size is 2.0"),
        (lambda: launch(dist.get_rank, True), TypeError, "world_size is True"),
        (lambda: RankPool(2, backend="mpi"), ValueError, "'gloo', 'nccl'"),
        (lambda: RankPool(999, backend="nccl"), ValueError, "one GPU per rank: 999 ranks"),
        (lambda: RankPool(2, timeout=0), ValueError, "timeout is 0"),
        (lambda: RankPool(2, timeout="60"), TypeError, "timeout is '60'"),
        (lambda: RankPool(2, limit=-1), ValueError, "limit is -1"),
    ],
)
def test_bad_arguments_are_refused(call, error, words):
    with pytest.raises(error, match=None) as caught:
        call()
    assert words in str(caught.value)


def test_what_cannot_be_sent_is_refused_before_anything_starts(pool2):
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        pool2.run(lambda x: x, threading.Lock())


def test_launch_inside_a_rank_is_refused(pool2):
    with pytest.raises(RankError, match="launch was called inside a rank"):
        pool2.run(lambda: launch(dist.get_rank, 2))


def test_a_closed_pool_says_so():
    pool = RankPool(1)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(dist.get_rank)


# ---- from everywhere ------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist
from tpcode import launch
print("top level")
def total(x):
    t = torch.tensor([x + dist.get_rank()])
    dist.all_reduce(t)
    return t.item()
print(launch(total, 2, 10))
"""


def test_from_a_script_without_a_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_python("script.py", cwd=tmp_path)
    assert ended.stdout == "top level\n[21, 21]\n", ended.stderr
    assert ended.stderr == ""


def test_from_standard_input(tmp_path):
    ended = run_python("-", cwd=tmp_path, stdin=SCRIPT)
    assert ended.stdout == "top level\n[21, 21]\n", ended.stderr


def test_from_a_script_that_imports_its_neighbour(tmp_path):
    (tmp_path / "neighbour.py").write_text("import torch.distributed as dist\ndef who():\n    return dist.get_rank()\n")
    (tmp_path / "script.py").write_text(
        "from neighbour import who\nfrom tpcode import launch\nprint(launch(who, 2))\nprint(launch(lambda: who(), 2))\n"
    )
    ended = run_python("script.py", cwd=tmp_path)
    assert ended.stdout == "[0, 1]\n[0, 1]\n", ended.stderr


def test_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py", cwd=tmp_path
    )
    assert [ended.stdout.count(text) for text in ("top level", "[21, 21]")] == [2, 2], ended.stderr


def test_many_ranks_under_torchrun_end_quietly(tmp_path):
    """A process that ends while its group is open may abort in a thread of gloo's."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("2, 10", "8, 10"))
    ended = run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "script.py", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr


def test_under_torchrun_with_another_number_of_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "script.py", cwd=tmp_path
    )
    assert ended.returncode != 0
    assert "launch asks for 2 ranks, and torchrun started 1" in ended.stderr


def test_variables_left_over_from_an_experiment_are_not_torchrun(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(lambda: (dist.get_rank(), os.environ["WORLD_SIZE"]), 2) == [(0, "2"), (1, "2")]


def test_init_from_env_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 2 script.py"):
        env.init_from_env()


def notebook(*cells: str):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    return NotebookClient(book, timeout=120, kernel_name="python3", allow_errors=True)


def test_from_a_notebook_cell():
    client = notebook(
        """
        import torch, torch.distributed as dist
        from tpcode import launch
        class Double(torch.nn.Module):
            def forward(self, x):
                return 2 * x
        def job():
            print("rank", dist.get_rank())
            return Double()
        made = launch(job, 2)
        print([type(m) is Double for m in made])
        """,
        """
        def broken():
            if dist.get_rank() == 1:
                raise ValueError("found in the cell")  # the line itself
            dist.barrier()
        launch(broken, 2)
        """,
    )
    first, second = client.execute().cells
    assert "".join(o.text for o in first.outputs) == "rank 0\n[rank 1] rank 1\n[True, True]\n"
    (shown,) = second.outputs[-1].traceback  # the message and the learner's lines, nothing of the pool
    assert shown.startswith("RankError: rank 1 raised ValueError: found in the cell\n\nTraceback")
    assert "  Cell In[2], line 3, in broken\n    raise ValueError(" in shown
    assert ".py" not in shown


def test_an_interrupted_kernel_goes_on():
    """Jupyter's interrupt reaches the whole process group; the ranks leave the decision to the parent."""
    client = notebook(
        """
        import os, signal, threading, time
        import torch.distributed as dist
        from tpcode import launch
        launch(dist.get_rank, 2)
        threading.Timer(1.0, lambda: os.killpg(os.getpgid(0), signal.SIGINT)).start()
        launch(time.sleep, 2, 600)
        """,
        "print(launch(dist.get_rank, 2))",
    )
    first, second = client.execute().cells
    assert first.outputs[-1].ename == "KeyboardInterrupt"
    assert second.outputs[0].text == "[0, 1]\n"


def test_two_programs_at_once_do_not_meet(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, torch, torch.distributed as dist\nfrom tpcode import launch\n"
        "def job(x):\n"
        "    t = torch.tensor([x])\n"
        "    for _ in range(50):\n        dist.all_reduce(t, dist.ReduceOp.MAX)\n"
        "    return t.item()\n"
        "print([launch(job, 2, int(sys.argv[1])) for _ in range(3)])\n"
    )
    programs = [
        subprocess.Popen(
            [sys.executable, "script.py", str(x)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for x in (5, 7)
    ]
    assert [p.communicate(timeout=120)[0] for p in programs] == [f"{[[x, x]] * 3}\n" for x in (5, 7)]


# ---- nothing left behind --------------------------------------------------------------------------------------------

PARENT = """
import os, re, threading, time
from tpcode import RankPool
def job():
    return os.getpid()
def busy():
    while True:
        pass
pools = [RankPool(2) for _ in range(3)]
print(*(pid for pool in pools for pid in pool.run(job)), flush=True)
# Two are idle. Two are busy, and two in C, for ages: there no other thread gets to run.
endless = {pools[1]: (busy,), pools[2]: (re.match, r"(a+)+$", "a" * 60 + "b")}
for pool, work in endless.items():
    threading.Thread(target=pool.run, args=work, daemon=True).start()
time.sleep(600)
"""


def alive(pids):
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def all_gone(pids, seconds=20.0):
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive(pids)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_rank_outlives_its_parent(sign):
    """Neither an idle one, nor one that computes, in Python or in C."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    try:
        assert len(alive(ranks)) == 6
        family = psutil.Process(process.pid).children(recursive=True)
        computed = [psutil.Process(rank).cpu_times().user for rank in ranks]
        busy = list(zip(ranks, computed, strict=True))[2:]
        while any(psutil.Process(rank).cpu_times().user < before + 0.1 for rank, before in busy):
            time.sleep(0.05)
        process.send_signal(sign)
        process.wait(20)
        assert all_gone([*ranks, *(p.pid for p in family)])
    finally:
        process.kill()
        for rank in alive(ranks):  # a test that fails must not leave them busy
            os.kill(rank, signal.SIGKILL)


def test_a_program_that_ends_leaves_no_process_and_no_shared_memory(tmp_path):
    program = "import os\nfrom tpcode import launch\nprint(*launch(os.getpid, 2))"
    ended = run_python("-c", program, cwd=tmp_path)
    assert ended.returncode == 0 and ended.stderr == ""
    assert all_gone([int(pid) for pid in ended.stdout.split()])


def test_shared_memory_has_no_name_to_be_left_behind():
    """Neither the board nor its lock appears in a directory, so not even SIGKILL can leave them there."""

    def mapped() -> list[str]:
        return [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()]

    before = len([name for name in mapped() if "/dev/shm/sem." in name])  # other libraries' semaphores
    with RankPool(2) as pool:
        pool.run(os.getpid)
        boards = [name for name in mapped() if "tpcode" in name]
        assert boards and all("(deleted)" in name for name in boards)
        assert len([name for name in mapped() if "/dev/shm/sem." in name]) == before


def test_a_pool_gives_back_its_processes_and_files():
    def files():
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    with RankPool(2) as pool:  # the first pool starts the forkserver, which stays
        pool.run(os.getpid)
    before = files()
    for _ in range(3):
        with RankPool(2) as pool:
            ranks = pool.run(os.getpid)
    assert all_gone(ranks)
    assert files() <= before + 2  # a connection to the store may close a little later


def test_launch_keeps_a_few_pools_of_different_sizes():
    first = launch(os.getpid, 2)
    assert launch(os.getpid, 2) == first
    for n in (1, 3, 4):
        launch(os.getpid, n)
    assert all_gone(first)


# ---- watching -------------------------------------------------------------------------------------------------------


def test_whatever_a_rank_calls_is_seen(pool2):
    def job():
        import torch.distributed._functional_collectives as functional

        from tpcode.comm import all_reduce
        from tpcode.runtime.notes import watch

        rank, x = dist.get_rank(), torch.ones(2)
        dist.all_reduce(x)  # before: not seen
        with watch() as calls, watch() as inner:
            dist.all_reduce(x.clone())
            all_reduce(x, op="max")
            functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
            (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
        dist.barrier()
        return calls, inner == calls

    for rank, (calls, same) in enumerate(pool2.run(job)):
        assert same
        assert calls == [
            "all_reduce SUM float32 [2]",
            "all_reduce MAX float32 [2]",
            "all_reduce SUM float32 [2]",
            f"{'send' if rank == 0 else 'recv'} 0 -> 1 float32 [2]",
        ]
