"""The board: shared memory on which ranks write what they are about to do, before they do it.

Gloo answers ranks that disagree with a crash that Python cannot catch, with silent garbage, or by waiting for ever. So
every rank writes a note (operation, reduce op or source, dtypes, shapes) on a board in shared memory *before* it
enters, and compares it with what a peer wrote for the same number of the same group. The first rank to differ raises
`CollectiveMismatch` and does not enter. The parent reads the board to see who waits for whom.

The board is one anonymous piece of memory, so nothing is left behind when a process is killed:

    head        number of channels, next free byte
    directory   per channel: its name, members (global ranks), and where its pages begin
    pages       per member of a channel: count of notes, checksum over all of them, and the last HISTORY notes

A channel is a process group, or one direction between two ranks of a group (send and recv). Notes that a peer has
overwritten can no longer be compared one by one; the checksums, compared at the job's end, catch those.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass
from multiprocessing.reduction import DupFd

from tpcode.runtime.errors import CollectiveMismatch

HISTORY = 32  # notes kept per member and channel
_NOTE = struct.Struct("<QdH")  # number, time, length of the text that follows
_NOTE_BYTES = 1024
_TEXT_BYTES = _NOTE_BYTES - _NOTE.size
_COUNT = struct.Struct("<QI")  # notes written, their checksum
_COUNT_BYTES = 16
_PAGE_BYTES = _COUNT_BYTES + HISTORY * _NOTE_BYTES
_HEAD = struct.Struct("<QQ")  # channels, next free byte
_ENTRY = struct.Struct("<HHQ")  # length of the name, members, first byte of the pages
_NAME_BYTES = 96

# How the note of an all-to-all states the elements for each member: "all_to_all float32 sends 1,2 receives 3,4".
EXCHANGE, RECEIVES = " sends ", " receives "

# Name of the channel that says: this rank takes messages from anyone, so those to it cannot be paired.
ANY_SOURCE = "messages from any rank to rank"


class SharedMemory:
    """Anonymous memory shared with the worker processes that it is handed to; gone when the last one ends.

    Its lock is a record lock on the file behind it, which the kernel gives back when a process dies; a multiprocessing
    lock would have a name, and could be left behind.
    """

    def __init__(self, size: int, fd: int | None = None):
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, size)  # sparse: pages that nobody writes cost nothing
        self.size, self._fd = size, fd
        self.bytes = mmap.mmap(fd, size)
        self._threads = threading.Lock()  # a record lock does not tell the threads of one process apart

    def __enter__(self) -> None:
        """Until the block ends, no other process, and no other thread of this one, is in such a block."""
        self._threads.acquire()
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *exception) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    def __reduce__(self):
        return _attach, (self.size, DupFd(self._fd))

    def close(self) -> None:
        self.bytes.close()
        os.close(self._fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tpcode-notes")
    fd, path = tempfile.mkstemp(prefix="tpcode-notes-")
    os.unlink(path)
    return fd


def _attach(size: int, duplicate) -> SharedMemory:
    return SharedMemory(size, duplicate.detach())


@dataclass
class Channel:
    """A process group, or one direction between two ranks, as one process sees it on the board."""

    name: str
    members: list[int]  # global ranks
    pages: int  # first byte of the first member's page
    me: int = 0  # index of this process among the members
    count: int = 0
    checksum: int = 0


@dataclass(frozen=True)
class Note:
    """What one rank wrote for one collective."""

    number: int
    time: float  # time.monotonic() on the writing rank; the clock is one for all processes of a machine
    text: str


class Board:
    """The shared memory that `ranks` ranks write their notes on. Made by the parent, handed to each worker."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.capacity = 256 + 4 * ranks * ranks
        self._entry_bytes = _ENTRY.size + _NAME_BYTES + 2 * ranks
        self._first_page = _HEAD.size + self.capacity * self._entry_bytes
        most = self._first_page + 256 * ranks * _PAGE_BYTES + 4 * ranks * ranks * 2 * _PAGE_BYTES
        self.memory = SharedMemory(most)
        self.clear()

    def clear(self) -> None:
        """Forget everything; called by the parent while no job runs."""
        _HEAD.pack_into(self.memory.bytes, 0, 0, self._first_page)

    def close(self) -> None:
        self.memory.close()

    # ---- the directory ----------------------------------------------------------------------------------------------

    def channels(self) -> list[Channel]:
        """All channels so far, in order of first use."""
        count, _ = _HEAD.unpack_from(self.memory.bytes, 0)
        return [self._read_entry(i) for i in range(count)]

    def _read_entry(self, index: int) -> Channel:
        at = _HEAD.size + index * self._entry_bytes
        length, size, pages = _ENTRY.unpack_from(self.memory.bytes, at)
        at += _ENTRY.size
        name = bytes(self.memory.bytes[at : at + length]).decode(errors="replace")
        members = list(struct.unpack_from(f"<{size}H", self.memory.bytes, at + _NAME_BYTES))
        return Channel(name, members, pages)

    def open_channel(self, name: str, members: list[int], rank: int) -> Channel:
        """This process's view of the channel of that name, added to the directory by the first to ask."""
        name = name if len(name) <= _NAME_BYTES else name[: _NAME_BYTES - 9] + f"#{zlib.crc32(name.encode()):08x}"
        with self.memory:
            for channel in self.channels():
                if channel.name == name and channel.members == members:
                    break
            else:
                channel = self._add_entry(name, members)
        channel.me = members.index(rank)
        return channel

    def _add_entry(self, name: str, members: list[int]) -> Channel:
        memory = self.memory.bytes
        count, free = _HEAD.unpack_from(memory, 0)
        end = free + len(members) * _PAGE_BYTES
        if count == self.capacity or end > self.memory.size:
            raise RuntimeError(f"one job made {count} process groups and send/recv pairs; {self.capacity} is the most")
        for page in range(free, end, _PAGE_BYTES):
            _COUNT.pack_into(memory, page, 0, 0)
        at = _HEAD.size + count * self._entry_bytes
        _ENTRY.pack_into(memory, at, len(name.encode()), len(members), free)
        at += _ENTRY.size
        memory[at : at + len(name.encode())] = name.encode()
        struct.pack_into(f"<{len(members)}H", memory, at + _NAME_BYTES, *members)
        _HEAD.pack_into(memory, 0, count + 1, end)
        return Channel(name, members, free)

    # ---- notes ------------------------------------------------------------------------------------------------------

    def count(self, channel: Channel, member: int) -> tuple[int, int]:
        """(notes written, their checksum) of the member with that index."""
        return _COUNT.unpack_from(self.memory.bytes, channel.pages + member * _PAGE_BYTES)

    def note(self, channel: Channel, member: int, number: int) -> Note | None:
        """That member's note of that number; None where it is not written yet, or overwritten."""
        found = self._read(channel, member, number)
        return Note(number, found[0], found[1].decode(errors="replace")) if found else None

    def _read(self, channel: Channel, member: int, number: int) -> tuple[float, bytes] | None:
        at = self._slot(channel, member, number)
        written, when, length = _NOTE.unpack_from(self.memory.bytes, at)
        # A slot may hold what an earlier job wrote: the count says whether it is of this one.
        if written != number or not 0 < number <= self.count(channel, member)[0]:
            return None
        return when, self.memory.bytes[at + _NOTE.size : at + _NOTE.size + length]

    def write(self, channel: Channel, text: str) -> None:
        """Compare with what peers have written for this number, then write.

        Raises:
            CollectiveMismatch: a peer is about to do something else.
        """
        raw = text.encode()
        if len(raw) > _TEXT_BYTES:
            raw = raw[: _TEXT_BYTES - 11] + f" #{zlib.crc32(raw):08x}".encode()
        channel.count += 1
        channel.checksum = zlib.crc32(raw if EXCHANGE not in text else _common(text).encode(), channel.checksum)
        at = self._slot(channel, channel.me, channel.count)
        page = channel.pages + channel.me * _PAGE_BYTES
        memory = self.memory.bytes
        # "Read theirs, write mine" is one step, so that of two ranks that differ the second always sees the difference.
        with self.memory:
            self._compare(channel, raw, text)
            _NOTE.pack_into(memory, at, channel.count, time.monotonic(), len(raw))
            memory[at + _NOTE.size : at + _NOTE.size + len(raw)] = raw
            _COUNT.pack_into(memory, page, channel.count, channel.checksum)

    def _compare(self, channel: Channel, raw: bytes, mine: str) -> None:
        exchange = EXCHANGE in mine
        for member, rank in enumerate(channel.members):
            if member == channel.me:
                continue
            found = self._read(channel, member, channel.count)
            if found is None or (found[1] == raw and not exchange):
                continue
            theirs = found[1].decode(errors="replace")
            if not _agree(mine, channel.me, theirs, member):
                calls = {rank: theirs, channel.members[channel.me]: mine}
                raise CollectiveMismatch(mismatch_message(channel, channel.count, calls), channel.members[channel.me])

    @staticmethod
    def _slot(channel: Channel, member: int, number: int) -> int:
        return channel.pages + member * _PAGE_BYTES + _COUNT_BYTES + (number % HISTORY) * _NOTE_BYTES


def _agree(mine: str, me: int, theirs: str, them: int) -> bool:
    """Whether two notes can be of one call: the same text, but for an all-to-all's sizes.

    There each rank states its own, and what I send you must be what you receive from me. `me`, `them` are the members'
    places in the group.
    """
    if EXCHANGE not in mine or EXCHANGE not in theirs:
        return mine == theirs
    if _common(mine) != _common(theirs):
        return False
    (sent, received), (their_sent, their_received) = _sizes(mine, them), _sizes(theirs, me)
    return sent == their_received and received == their_sent


def _common(text: str) -> str:
    """The part of a note that is the same on all ranks."""
    return text.split(EXCHANGE)[0]


def _sizes(text: str, member: int) -> tuple[str, str]:
    """What an all-to-all's note sends to that member of the group, and receives from it."""
    sends, receives = text.split(EXCHANGE)[1].split(RECEIVES)
    return sends.split(",")[member], receives.split(",")[member]


def mismatch_message(channel: Channel, number: int, calls: dict[int, str]) -> str:
    lines = [f"  rank {rank}: {text}" for rank, text in sorted(calls.items())]
    return "\n".join(
        [
            f"call {number} of {channel.name} differs between ranks:",
            *lines,
            "Every rank of a group must make the same calls, in the same order, with the same dtypes and shapes.",
        ]
    )
