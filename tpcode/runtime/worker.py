"""One rank: a process that waits for jobs, runs each as if it were the first, and reports what came of it."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import io
import os
import random
import signal
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

from tpcode.runtime import sending
from tpcode.runtime.board import Board
from tpcode.runtime.env import loopback, threads_per_rank, with_cpu

_MARK = "TPCODE_RANK"  # set in every rank's environment
_RUNTIME = os.path.dirname(os.path.realpath(__file__)) + os.sep
_TPCODE = os.path.dirname(os.path.dirname(_RUNTIME)) + os.sep
_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclass
class Setting:
    """What a rank needs to know to start; handed to the new process."""

    rank: int
    ranks: int
    backend: str
    port: int  # of the parent's TCPStore
    timeout: float  # seconds that the parent allows one collective
    board: Board
    jobs: Connection
    stdout: Connection
    stderr: Connection
    stack: Connection  # where the rank writes its Python stack when it gets SIGUSR1


@dataclass
class Job:
    """One call of `launch`, with the caller's surroundings as they are now."""

    call: bytes  # (fn, args, kwargs) as bytes, loaded only when the surroundings are in place
    directory: str
    path: list[str]
    argv: list[str]
    environment: dict[str, str]


@dataclass
class Returned:
    """fn returned; `result` is its value as bytes. `reusable` is false where the job left what cannot be undone."""

    result: bytes
    reusable: bool


@dataclass
class Raised:
    """fn raised. `exception` is empty where it cannot be sent."""

    when: float  # time.monotonic()
    summary: str  # "ValueError: …"
    report: bytes  # a traceback.TracebackException, formatted by the parent, which has the notebook's source
    exception: bytes


def main(setting: Setting) -> None:
    """The process's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    _end_with_parent()
    _send_output_to(setting.stdout, setting.stderr)
    faulthandler.register(signal.SIGUSR1, setting.stack.fileno(), all_threads=False)
    rank = Rank(setting)
    setting.jobs.send("ready")
    while True:
        try:
            job = setting.jobs.recv()
        except EOFError:  # the parent closed the pool
            os._exit(0)
        setting.jobs.send(rank.run(job))


def _end_with_parent() -> None:
    """End this process when its parent ends, by whatever signal: a pipe to it is then closed."""
    sentinel = parent_process().sentinel
    if sys.platform == "linux":  # SIGIO's default is to terminate, which needs no Python to run
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch():
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _send_output_to(stdout: Connection, stderr: Connection) -> None:
    """Send what Python and C code print to the parent, unbuffered: nothing is lost if the process dies next."""
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(n, "wb", closefd=False), "utf-8", "backslashreplace", write_through=True)
        for n in (1, 2)
    )
    libc = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        try:
            stream = ctypes.c_void_p.in_dll(libc, name)
        except ValueError:  # another C library, with other names: its buffer is flushed at the job's end
            continue
        libc.setvbuf(stream, None, 2, 0)  # 2 is _IONBF, unbuffered


class Rank:
    """The process group, and everything that one job must not leave to the next."""

    def __init__(self, setting: Setting):
        import torch
        import torch.distributed as dist

        from tpcode.runtime.notes import Notes

        self.setting = setting
        self.own_environment = {
            "RANK": str(setting.rank),
            "LOCAL_RANK": str(setting.rank),
            "WORLD_SIZE": str(setting.ranks),
            "LOCAL_WORLD_SIZE": str(setting.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(setting.port),
            "GLOO_SOCKET_IFNAME": loopback(),
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            _MARK: "1",
        }
        os.environ.update(self.own_environment)
        if setting.backend == "nccl":
            torch.cuda.set_device(setting.rank)
        dist.init_process_group(
            with_cpu(setting.backend),
            store=dist.TCPStore("127.0.0.1", setting.port, is_master=False),
            rank=setting.rank,
            world_size=setting.ranks,
            # The parent speaks first, and knows more. This is for waits that no note precedes.
            timeout=timedelta(seconds=setting.timeout + 30),
        )
        self.world = dist.group.WORLD
        self.notes = Notes(setting.board, setting.rank)
        self.notes.install()
        self.generator_state = torch.get_rng_state()
        self.known_modules = set(sys.modules)

    def run(self, job: Job) -> Returned | Raised:
        try:
            self._prepare(job)
            fn, args, kwargs = sending.loads(job.call)
            result = _to_send(fn(*args, **kwargs))
            return Returned(result, reusable=self._tidy())
        except BaseException as error:  # SystemExit too: a rank that calls sys.exit has not done its job
            return _raised(error)

    # ---- before a job -----------------------------------------------------------------------------------------------

    def _prepare(self, job: Job) -> None:
        import torch

        environment = job.environment | self.own_environment
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(job.directory)
        sys.path[:], sys.argv[:] = job.path, job.argv
        self._forget_callers_modules()
        self.notes.clear()
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():  # asked first: setting it imports all of inductor
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads_per_rank(self.setting.ranks))
        torch.set_rng_state(self.generator_state)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(torch.initial_seed())
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def _forget_callers_modules(self) -> None:
        """Modules of the caller's own are imported again, so that their source runs as it is now."""
        for name, module in list(sys.modules.items()):
            if name not in self.known_modules and _is_callers(getattr(module, "__file__", None)):
                del sys.modules[name]

    # ---- after a job ------------------------------------------------------------------------------------------------

    def _tidy(self) -> bool:
        """Undo what the job did to this process; False where only a new process will do."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        ctypes.CDLL(None).fflush(None)
        if not dist.is_initialized() or self.world != dist.group.WORLD:
            return False
        groups = [group for group in c10d._world.pg_map if group != self.world]
        for group in groups:
            dist.destroy_process_group(group)
        if groups:
            gc.collect()  # their threads and sockets go now, not in the middle of the next job
        return not (groups and _has_meshes())


def _has_meshes() -> bool:
    """Whether there is a DeviceMesh still: DTensor keeps them in caches of its own, with groups that are destroyed."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and any(type(thing) is module.DeviceMesh for thing in gc.get_objects())


def inside_rank() -> bool:
    """Whether this process is one of a pool's ranks."""
    return _MARK in os.environ


def _is_callers(file: str | None) -> bool:
    """Whether a module's file is the caller's own Python source: not installed, and not of this package."""
    return file is not None and file.endswith(".py") and is_callers_code(file)


def is_callers_code(file: str) -> bool:
    """Whether code of that file is the caller's: not installed, and not of this package. A notebook's cell is."""
    file = os.path.realpath(file)
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
    return not file.startswith((*_INSTALLED, _TPCODE)) and not any(part in file for part in installed)


def _to_send(value) -> bytes:
    try:
        return sending.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the rank's function returned a {type(value).__name__} that cannot be sent to the caller ({error}); "
            "return tensors, numbers, strings, or containers of them"
        ) from error


def _raised(error: BaseException) -> Raised:
    # Lines are looked up by the parent: a notebook's cells exist only there.
    report = traceback.TracebackException.from_exception(error, lookup_lines=False)
    report.stack[:] = [frame for frame in report.stack if not frame.filename.startswith(_RUNTIME)]
    summary = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        summary = f"SystemExit: it called sys.exit({error.code!r})"
    return Raised(time.monotonic(), summary, _to_send_or_empty(report), _to_send_or_empty(error))


def _to_send_or_empty(value) -> bytes:
    try:
        return sending.dumps(value)
    except Exception:
        return b""
