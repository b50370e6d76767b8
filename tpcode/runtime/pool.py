"""Ranks for everyone: `launch` runs a function on n processes, and `RankPool` keeps such processes warm."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import types
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tpcode.runtime import sending, worker
from tpcode.runtime.board import ANY_SOURCE, HISTORY, Board, Channel
from tpcode.runtime.env import choose_backend, init_from_env, under_torchrun
from tpcode.runtime.errors import CollectiveMismatch, RankError, RankTimeout

_POLL = 0.05  # seconds between looks at the board while ranks work
_GRACE = 0.1  # seconds in which the first rank to fail is found out: its failure makes others fail
_START = 120.0  # seconds that ranks may take to start
_KEPT_POOLS = 3  # warm pools that `launch` keeps, of different sizes


def launch(fn, world_size: int, *args, **kwargs) -> list:
    """Run `fn(*args, **kwargs)` on `world_size` ranks, each a process with a process group; wait for all of them.

    `fn` may be defined anywhere: a notebook cell, a script, a lambda. Inside it, plain `torch.distributed` works.
    Processes are kept for the next call, which then takes milliseconds, yet each call starts as if in new ones. Started
    by torchrun, `launch` runs `fn` on the ranks that are there, and returns the list on each of them.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: a rank raised, exited or was killed; the others are stopped.
        CollectiveMismatch: ranks made different collective calls.
        RankTimeout: a rank waited for the others for more than 60 s (`RankPool` lets you choose).
        TypeError, ValueError: `fn` is not callable or cannot be sent; `world_size` is not a positive integer.
    """
    _check_callable(fn)
    _check_ranks(world_size, "world_size")
    if worker.inside_rank():
        raise RuntimeError("launch was called inside a rank: call it outside, before or after this launch")
    if under_torchrun():
        return _run_here(fn, world_size, args, kwargs)
    with _pools_lock:
        return _warm_pool(world_size).run(fn, *args, **kwargs)


class RankPool:
    """`n` ranks that wait for functions to run; closes when its `with` block ends.

        with RankPool(4, timeout=10) as pool:
            pool.run(fn, x)

    Args:
        n: number of ranks.
        backend: "nccl", "gloo", or None: NCCL where there is a GPU for each rank, else gloo on loopback.
        timeout: seconds that a rank may wait in one collective, and that others may run on once one has returned.
        limit: seconds that one job may take in all; None is no limit.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or size.
    """

    def __init__(self, n: int, backend: str | None = None, timeout: float = 60.0, limit: float | None = None):
        _check_ranks(n, "n")
        _check_seconds(timeout, "timeout")
        if limit is not None:
            _check_seconds(limit, "limit")
        _context()  # before this process imports torch, so that both do it at the same time
        self.n, self.backend = n, choose_backend(n, backend)
        self.timeout, self.limit = float(timeout), limit
        self._lock = threading.Lock()
        self._ranks: _Ranks | None = None
        self._closed = False
        _open_pools.add(self)
        self._start()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RankPool({self.n}, backend={self.backend!r}, timeout={self.timeout}, limit={self.limit})"

    def run(self, fn, *args, **kwargs) -> list:
        """Run `fn(*args, **kwargs)` on every rank; as `launch`."""
        _check_callable(fn)
        call = _to_send(fn, args, kwargs)
        with self._lock:
            if self._closed:
                raise RuntimeError("this RankPool is closed; make another")
            self._start()
            ranks = self._ranks
            try:
                return ranks.run(_job(call), self.timeout, self.limit)
            finally:
                if not ranks.reusable:
                    self._stop()

    def close(self) -> None:
        """Stop the ranks; safe to call again."""
        self._closed = True
        self._stop()
        _open_pools.discard(self)

    def _start(self) -> None:
        if self._ranks is None:
            self._ranks = _Ranks(self.n, self.backend, self.timeout)

    def _stop(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.stop()


# ---- the warm pools of `launch` -------------------------------------------------------------------------------------

_open_pools: set[RankPool] = set()
_warm_pools: dict[int, tuple[RankPool, float]] = {}  # by size, least recently used first; with the source's age
_pools_lock = threading.RLock()


def _warm_pool(n: int) -> RankPool:
    source = _newest_source()
    pool, made_from = _warm_pools.pop(n, (None, None))
    if pool is not None and made_from != source:  # tpcode itself has been edited: workers have the old code
        pool.close()
        pool = None
    if pool is None:
        while len(_warm_pools) >= _KEPT_POOLS:
            _warm_pools.pop(next(iter(_warm_pools)))[0].close()
        pool = RankPool(n)
    _warm_pools[n] = pool, source
    return pool


def _newest_source() -> float:
    return max(path.stat().st_mtime for path in Path(__file__).parent.parent.rglob("*.py"))


_parent = os.getpid()


@atexit.register
def _close_all() -> None:
    if os.getpid() == _parent:  # a fork of this process does not own the ranks
        for pool in list(_open_pools):
            pool.close()


# ---- the processes --------------------------------------------------------------------------------------------------


class _Ranks:
    """The processes of one pool, from their start to the first failure."""

    def __init__(self, n: int, backend: str, timeout: float):
        import torch.distributed as dist

        context = _context()
        self.n, self.reusable = n, False
        self.board = Board(n)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.jobs, self.stacks, self.output = [], [], [], _Output()
        try:
            for rank in range(n):
                jobs, their_jobs = context.Pipe()
                pipes = [context.Pipe(duplex=False) for _ in range(3)]
                theirs = [writer for _, writer in pipes]
                setting = worker.Setting(rank, n, backend, self.store.port, timeout, self.board, their_jobs, *theirs)
                process = context.Process(target=worker.main, args=(setting,), name=f"rank {rank}")
                with _no_main_module():
                    process.start()
                for end in (their_jobs, *theirs):
                    end.close()
                self.processes.append(process)
                self.jobs.append(jobs)
                self.output.add(pipes[0][0], pipes[1][0])
                self.stacks.append(pipes[2][0])
            self._await_start()
        except BaseException:
            self.stop()
            raise
        self.reusable = True

    def _await_start(self) -> None:
        waiting, deadline = set(range(self.n)), time.monotonic() + _START
        while waiting:
            wait([self.jobs[r] for r in waiting] + [self.processes[r].sentinel for r in waiting], _POLL)
            self.output.read()
            for rank in sorted(waiting):
                if self.jobs[rank].poll():
                    try:
                        self.jobs[rank].recv()
                    except EOFError:
                        self._fail_to_start(rank)
                    waiting.discard(rank)
                elif not self.processes[rank].is_alive():
                    self._fail_to_start(rank)
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {sorted(waiting)} have not started within {_START:.0f} s")

    def _fail_to_start(self, rank: int):
        self.processes[rank].join(2)
        self.output.finish()
        raise RankError(f"rank {rank} {_end_of(self.processes[rank])} while it started", rank)

    def stop(self) -> None:
        """Kill the processes, print what they had printed, give everything back."""
        self.reusable = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
            with contextlib.suppress(ValueError):  # it hangs in the kernel, and dies later
                process.close()
        self.output.finish()
        self.output.close()
        for pipe in (*self.jobs, *self.stacks):
            pipe.close()
        self.processes = []
        self.board.close()

    # ---- a job ------------------------------------------------------------------------------------------------------

    def run(self, job: worker.Job, timeout: float, limit: float | None) -> list:
        self.reusable = False  # until the job has ended well
        self.board.clear()
        message = multiprocessing.reduction.ForkingPickler.dumps(job)
        for pipe in self.jobs:
            with contextlib.suppress(BrokenPipeError):  # a rank that died meanwhile is found below
                pipe.send_bytes(message)
        replies = self._collect(timeout, limit)
        self._check_counts(replies)
        self.output.finish()
        results = [sending.loads(reply.result) for reply in replies]
        self.reusable = all(reply.reusable for reply in replies)
        return results

    def _collect(self, timeout: float, limit: float | None) -> list[worker.Returned]:
        replies: list = [None] * self.n
        returned_at: dict[int, float] = {}
        start = looked = time.monotonic()
        failed_at = None
        while None in replies:
            pending = [r for r in range(self.n) if replies[r] is None]
            wait(
                [self.jobs[r] for r in pending] + [self.processes[r].sentinel for r in pending] + self.output.pipes,
                _POLL,
            )
            self.output.read()
            dead = []
            for rank in pending:
                reply = self._reply(rank)
                if isinstance(reply, worker.Returned):
                    returned_at[rank] = time.monotonic()
                elif reply is _DEAD:
                    dead.append(rank)
                replies[rank] = None if reply is _DEAD else reply
            now = time.monotonic()
            if dead or any(isinstance(reply, worker.Raised) for reply in replies):
                failed_at = failed_at or now
                if now - failed_at >= _GRACE or all(r is not None or i in dead for i, r in enumerate(replies)):
                    raise self._failure(replies, dead)
            elif now - looked >= _POLL:
                looked = now
                self._check_counts(replies)
                self._check_waits(replies, returned_at, now, timeout)
                if limit is not None and now - start > limit:
                    raise self._timeout(replies, f"the job has run for {limit:g} s, its limit", pending[0])
        for reply in replies:
            if isinstance(reply, worker.Raised):
                raise self._failure(replies, [])
        return replies

    def _reply(self, rank: int):
        """The rank's reply, None if it still works, _DEAD if its process has ended without one."""
        ended = not self.processes[rank].is_alive()  # asked first: a reply may come just before the end
        if self.jobs[rank].poll():
            try:
                return self.jobs[rank].recv()
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(2)
                return _DEAD
        return _DEAD if ended else None

    def _failure(self, replies: list, dead: list[int]) -> RankError:
        """The error of the first rank to fail. A process that died comes first: its end makes others raise."""
        if dead:
            rank = dead[0]
            return RankError(f"rank {rank} {_end_of(self.processes[rank])}{_so_did(dead[1:])}", rank)
        raised = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, worker.Raised)}
        first = min(raised.values(), key=lambda reply: reply.when)
        rank = min(r for r in raised if raised[r].summary == first.summary)  # the same on all: named alike every time
        first = raised[rank]
        report, exception = _load_or_none(first.report), _load_or_none(first.exception)
        text = "".join(report.format()) if report is not None else first.summary
        if isinstance(exception, CollectiveMismatch) and report is not None:
            where = traceback.format_list([f for f in report.stack if worker.is_callers_code(f.filename)])
            others = self._python_stacks([r for r, reply in enumerate(replies) if reply is None])
            at = [f"rank {r} is {place}" for r, place in others.items()]
            return CollectiveMismatch(
                exception.args[0], rank, "\n".join([f"rank {rank} called it here:", "".join(where).rstrip(), *at])
            )
        more = _so_did([r for r in raised if r != rank])
        return RankError(f"rank {rank} raised {first.summary}{more}", rank, text, exception)

    # ---- what the board says ----------------------------------------------------------------------------------------

    def _channels(self) -> list[Channel]:
        """The channels on which members must agree."""
        with self.board.memory:
            channels = self.board.channels()
        anyone = {channel.members[0] for channel in channels if channel.name.startswith(ANY_SOURCE)}
        return [
            channel
            for channel in channels
            if not channel.name.startswith(ANY_SOURCE)
            and not (channel.name.startswith("messages") and channel.members[1] in anyone)
        ]

    def _check_counts(self, replies: list) -> None:
        """Raise where a rank has returned and a peer has made more calls, or other ones, than it did."""
        for channel in self._channels():
            with self.board.memory:
                state = [self.board.count(channel, m) for m in range(len(channel.members))]
            if len(set(state)) == 1:
                continue
            counts = [count for count, _ in state]
            for member, rank in enumerate(channel.members):
                if replies[rank] is not None and counts[member] < max(counts):
                    raise self._unequal_counts(channel, counts, rank, replies)
            if all(replies[rank] is not None for rank in channel.members):  # same counts, other calls
                raise CollectiveMismatch(
                    f"the calls of {channel.name} differ between ranks, further back than the last notes kept; "
                    "every rank of a group must make the same calls, in the same order",
                    channel.members[0],
                )

    def _unequal_counts(self, channel: Channel, counts: list[int], rank: int, replies: list) -> CollectiveMismatch:
        number = counts[channel.members.index(rank)] + 1
        stacks = self._python_stacks([r for r in channel.members if replies[r] is None])
        lines = [f"ranks made different numbers of calls in {channel.name}:"]
        for member, (peer, count) in enumerate(zip(channel.members, counts)):
            note = self.board.note(channel, member, number)
            state = "returned after" if replies[peer] is not None else "runs, after"
            place = f"\n          {stacks[peer]}" if peer in stacks else ""
            if note is not None:
                lines.append(f"  rank {peer}: made call {number}, {note.text}{place}")
            else:
                lines.append(f"  rank {peer}: {state} {count} call{'' if count == 1 else 's'}{place}")
        lines.append("Every rank of a group must make each call: one that is missing leaves the others waiting.")
        return CollectiveMismatch("\n".join(lines), rank)

    def _check_waits(self, replies: list, returned_at: dict[int, float], now: float, timeout: float) -> None:
        for channel in self._channels():
            counts = [self.board.count(channel, m)[0] for m in range(len(channel.members))]
            number = min(counts) + 1
            late = [rank for rank, count in zip(channel.members, counts) if count < number]
            for member, rank in enumerate(channel.members):
                oldest = max(number, counts[member] - HISTORY + 1)  # of the calls that nobody answers, still kept
                note = self.board.note(channel, member, oldest)
                if note is not None and now - note.time > timeout:
                    what = f"rank {rank} has waited {timeout:g} s in call {oldest} of {channel.name}, {note.text}"
                    raise self._timeout(replies, f"{what}, for {_ranks(late)}", late[0])
        for rank, when in returned_at.items():
            if now - when > timeout:
                running = [r for r, reply in enumerate(replies) if reply is None]
                what = f"rank {rank} returned {timeout:g} s ago, and {_ranks(running)} still run"
                raise self._timeout(replies, what + ("s" if len(running) == 1 else ""), running[0])

    def _timeout(self, replies: list, what: str, rank: int) -> RankTimeout:
        running = [r for r in range(self.n) if replies[r] is None]
        stacks = self._python_stacks(running)
        lines = []
        for r in range(self.n):
            lines.append(f"  rank {r}: {self._whereabouts(r, replies)}")
            if r in stacks:
                lines.append(f"          {stacks[r]}")
        return RankTimeout("\n".join([what + ":", *lines]), rank)

    def _whereabouts(self, rank: int, replies: list) -> str:
        last, channel_of_last, waits = None, None, False
        for channel in self._channels():
            if rank not in channel.members:
                continue
            member = channel.members.index(rank)
            count = self.board.count(channel, member)[0]
            note = self.board.note(channel, member, count)
            if note is not None and (last is None or note.time > last.time):
                last, channel_of_last = note, channel
                waits = any(self.board.count(channel, m)[0] < count for m in range(len(channel.members)))
        call = f"call {last.number} of {channel_of_last.name}, {last.text}" if last else ""
        if replies[rank] is not None:
            return f"has returned; its last was {call}" if last else "has returned without any collective"
        if waits:
            return f"waits in {call}"
        return f"runs; its last was {call}" if last else "runs, and has made no collective call"

    def _python_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where each of these ranks is in the caller's code: the innermost frame that is not torch's or ours."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        places = {}
        for rank in ranks:
            text = ""
            while self.stacks[rank].poll(0.2):
                text += os.read(self.stacks[rank].fileno(), 1 << 16).decode(errors="replace")
            frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', text)
            for file, line, function in frames:  # the innermost comes first
                if worker.is_callers_code(file) and not file.startswith("<"):
                    places[rank] = f"at line {line} of {function}, in {file}"
                    break
        return places


_DEAD = object()


class _Output:
    """What the ranks print: rank 0's at once, the others' at the end, in rank order, each line marked."""

    def __init__(self):
        self.streams: list[tuple[Connection, Connection]] = []  # of each rank: stdout, stderr
        self.pipes: list[Connection] = []  # those that may still bring something
        self.decoders: list[list[codecs.IncrementalDecoder]] = []
        self.kept: list[list[tuple[int, str]]] = []

    def add(self, *pair: Connection) -> None:
        """The next rank's standard output and standard error."""
        for pipe in pair:
            os.set_blocking(pipe.fileno(), False)
        self.streams.append(pair)
        self.pipes += pair
        self.decoders.append([codecs.getincrementaldecoder("utf-8")("replace") for _ in pair])
        self.kept.append([])

    def read(self) -> None:
        """Take what is there; pipes must never fill up, or the ranks stand still."""
        for rank, pair in enumerate(self.streams):
            for which, pipe in enumerate(pair):
                if pipe not in self.pipes:
                    continue
                try:
                    while chunk := os.read(pipe.fileno(), 1 << 16):
                        self._take(rank, which, self.decoders[rank][which].decode(chunk))
                    self.pipes.remove(pipe)  # its rank has ended
                except BlockingIOError:
                    pass

    def _take(self, rank: int, which: int, text: str) -> None:
        if rank == 0:
            target = (sys.stdout, sys.stderr)[which]
            target.write(text)
            target.flush()
        else:
            self.kept[rank].append((which, text))

    def finish(self) -> None:
        """Print what ranks 1 and up have printed."""
        self.read()
        for rank, kept in enumerate(self.kept):
            for which in (0, 1):
                text = "".join(part for stream, part in kept if stream == which)
                target = (sys.stdout, sys.stderr)[which]
                for line in text.splitlines():
                    target.write(f"[rank {rank}] {line}\n")
                if text:
                    target.flush()
            kept.clear()

    def close(self) -> None:
        for pair in self.streams:
            for pipe in pair:
                pipe.close()


# ---- starting processes ---------------------------------------------------------------------------------------------


def _context():
    """Forkserver with torch loaded, so that a new rank is a fork of a clean process; spawn where that is unsafe."""
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The one with sympy is what torch imports for `backward(dY)`: without it each rank of each pool would, for 0.4 s.
    modules = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "numpy", "cloudpickle"]
    context.set_forkserver_preload(modules)
    forkserver.ensure_running()  # it returns at once, and the server imports while this process does
    return context


_main_lock = threading.Lock()


@contextlib.contextmanager
def _no_main_module():
    """Hide `__main__` while a process starts: it would run a script that has no main guard again, and look for a file
    named <stdin>. Functions of `__main__` travel by value instead."""
    with _main_lock:
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _job(call: bytes) -> worker.Job:
    return worker.Job(call, os.getcwd(), list(sys.path), list(sys.argv), dict(os.environ))


def _to_send(fn, args, kwargs) -> bytes:
    try:
        return sending.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"{name} or its arguments cannot be sent to the ranks: {error}; "
            "pass tensors and plain values, and open files, locks and process groups inside the function"
        ) from error


def _load_or_none(sent: bytes):
    """What a rank sent; None where it could not send it, or where it can only be loaded there."""
    try:
        return sending.loads(sent) if sent else None
    except Exception:
        return None


# ---- under torchrun -------------------------------------------------------------------------------------------------


def _run_here(fn, world_size: int, args, kwargs) -> list:
    """Run on the ranks that torchrun started, this process being one of them."""
    import torch.distributed as dist

    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise ValueError(
            f"launch asks for {world_size} ranks, and torchrun started {started}; "
            f"use --nproc-per-node so that there are {world_size}, or launch(fn, {started})"
        )
    init_from_env()
    results: list = [None] * world_size
    dist.all_gather_object(results, sending.dumps(fn(*args, **kwargs)))
    return [sending.loads(result) for result in results]


# ---- arguments and words --------------------------------------------------------------------------------------------


def _check_callable(fn) -> None:
    if not callable(fn):
        raise TypeError(f"fn is {fn!r:.40} and must be a function: launch(fn, 2), not launch(fn(), 2) or launch(2, fn)")


def _check_ranks(n, name: str) -> None:
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"{name} is {n!r}; it must be an integer, the number of ranks")
    if n < 1:
        raise ValueError(f"{name} is {n}; at least 1 rank is needed")


def _check_seconds(value, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; it must be a positive number of seconds")


def _end_of(process) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def _so_did(ranks: list[int]) -> str:
    return f" (so did {_ranks(ranks)})" if ranks else ""


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
