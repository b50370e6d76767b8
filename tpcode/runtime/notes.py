"""What is noted: every collective call of this process, whichever way it comes, turned into a line on the board.

Plain calls (`torch.distributed.all_reduce` and its siblings) all go through the methods of c10d's ProcessGroup.
Functional collectives, which DTensor is made of, call c10d from C++ and never touch those methods, so their kernels are
wrapped too. Making a group is noted as well: it is a call that all ranks must make, in one order. What C++ calls by
itself (the reducer of DistributedDataParallel) is not noted; there the timeouts alone stand guard.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d as c10d

from tpcode.runtime.board import ANY_SOURCE, EXCHANGE, RECEIVES, Board

# Method of ProcessGroup: (the call's name, which argument holds the tensors whose shapes must agree).
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "scatter": ("scatter", 0),
    "gather": ("gather", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather_single", 1),
    "all_gather_single": ("all_gather_single", 1),
    "allgather_into_tensor_coalesced": ("all_gather_single", 1),
    "all_gather_single_coalesced": ("all_gather_single", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_single", 1),
    "reduce_scatter_single": ("reduce_scatter_single", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("monitored_barrier", None),
}

# Functional collective: the call's name. Tensors come first, the group's name last, a reduce op is the string between.
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather_single",
    "all_gather_into_tensor_out": "all_gather_single",
    "all_gather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "reduce_scatter_tensor_out": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


# c10d has one kernel for every device, and the notes take the place of those for CPU and CUDA: this device's is left as
# it was. Going on by the dispatcher lets go of the GIL. A kernel that is called from Python keeps it, and never returns
# where a thread of gloo that ends an earlier call holds the queue's lock and waits for the GIL to free a tensor.
_PLAIN_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)

_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
_OPS = (ReduceOp, ReduceOp.RedOpType)
_OP_NAMES = {op: name for name, op in ReduceOp.RedOpType.__members__.items()}

_watching: list[list[str]] = []


@contextmanager
def watch() -> Iterator[list[str]]:
    """What this rank calls until the block ends, whichever way: "all_reduce SUM float32 [2]", "send 0 -> 1 int64 [3]".

    Collectives and messages alike, those of one rank alone too. Outside of a pool's ranks nothing is noted.
    """
    calls: list[str] = []
    _watching.append(calls)
    try:
        yield calls
    finally:
        _watching[:] = [other for other in _watching if other is not calls]


def _tell(call: str) -> None:
    for calls in _watching:
        calls.append(call)


class Notes:
    """One worker's writer of notes."""

    def __init__(self, board: Board, rank: int):
        self.board, self.rank = board, rank
        self._channels: dict = {}
        self._names: dict[tuple[int, ...], list[str]] = {}

    def clear(self) -> None:
        """A new job begins: the board is empty, and groups are made anew."""
        self._channels.clear()
        self._names.clear()

    # ---- writing ----------------------------------------------------------------------------------------------------

    def collective(self, group: ProcessGroup, text: str) -> None:
        """Note a call that every member of the group makes.

        Raises:
            CollectiveMismatch: a peer has noted another call in its place.
        """
        _tell(text)
        channel = self._channels.get(group)
        if channel is None:
            name, members = self._identify(group)
            channel = self._channels[group] = self.board.open_channel(name, members, self.rank)
        if len(channel.members) > 1:
            self.board.write(channel, text)

    def message(self, group: ProcessGroup, sender: int, receiver: int, tag: int, tensors) -> None:
        """Note a send or a recv; both ends write on a channel of their own. Ranks are the group's."""
        _tell(f"{'send' if sender == group.rank() else 'recv'} {sender} -> {receiver} {_tensors(tensors)}")
        key = (group, sender, receiver, tag)
        channel = self._channels.get(key)
        if channel is None:
            name, members = self._identify(group)
            pair = [members[sender], members[receiver]]
            name = f"messages {pair[0]} -> {pair[1]}, tag {tag}, {name}"
            channel = self._channels[key] = self.board.open_channel(name, pair, self.rank)
        self.board.write(channel, f"message of {_tensors(tensors)}")

    def any_source(self) -> None:
        """Note a recv from whoever sends first: messages to this rank can then not be paired."""
        self.board.open_channel(f"{ANY_SOURCE} {self.rank}", [self.rank], self.rank)

    def _identify(self, group: ProcessGroup) -> tuple[str, list[int]]:
        """A name for the group that is the same on every member, and the members' global ranks."""
        if group == dist.group.WORLD:
            return "the world group (all ranks)", list(range(self.board.ranks))
        members = dist.get_process_group_ranks(group)
        names = self._names.setdefault(tuple(members), [])
        if group.group_name not in names:
            names.append(group.group_name)
        nth = names.index(group.group_name)  # groups of the same ranks are made in the same order on all of them
        return f"group {members}" + (f", number {nth + 1}" if nth else ""), members

    # ---- standing in the way of the calls ---------------------------------------------------------------------------

    def install(self) -> None:
        """Note every collective of this process from now on."""
        for method, (name, which) in _METHODS.items():
            self._before(method, functools.partial(self.note_method, name, which))
        for method in ("alltoall", "alltoall_base", "all_to_all_single"):
            self._before(method, self._note_all_to_all)
        self._before("send", lambda group, tensors, peer, tag: self.message(group, group.rank(), peer, tag, tensors))
        self._before("recv", lambda group, tensors, peer, tag: self.message(group, peer, group.rank(), tag, tensors))
        self._before("recv_anysource", lambda group, tensors, tag: self.any_source())
        self._note_new_groups()
        self._note_functional()

    @staticmethod
    def _before(method: str, note) -> None:
        original = getattr(ProcessGroup, method, None)
        if original is None:  # a method that this release of torch does not have
            return

        @functools.wraps(original)
        def noted(group, *args, **kwargs):
            note(group, *args, **kwargs)
            return original(group, *args, **kwargs)

        setattr(ProcessGroup, method, noted)

    def note_method(self, name: str, which: int | None, group, *args, **kwargs) -> None:
        """Note a call of one of ProcessGroup's methods; `which` argument holds the tensors."""
        reduce_op = root = None
        takes_op, takes_root = "reduce" in name, name in _WITH_ROOT
        for value in (*args[1:], *kwargs.values()):  # an options object, or the op and the root themselves
            if takes_op:
                reduce_op = value if isinstance(value, _OPS) else getattr(value, "reduceOp", reduce_op)
            if takes_root:
                root = value if isinstance(value, int) else getattr(value, "rootRank", root)
        tensors = () if which is None else args[which] if which < len(args) else kwargs["tensors"]
        self.collective(
            group,
            _describe(
                name,
                tensors,
                _op_name(reduce_op) if takes_op else None,
                self._global_rank(group, root) if takes_root else None,
            ),
        )

    def _note_all_to_all(self, group, outputs, inputs, output_sizes=(), input_sizes=(), *args, **kwargs) -> None:
        self.collective(group, _describe_exchange(outputs, inputs, output_sizes, input_sizes, group.size()))

    def _global_rank(self, group: ProcessGroup, rank: int | None) -> int | None:
        if rank is None or group == dist.group.WORLD:
            return rank
        members = dist.get_process_group_ranks(group)
        return members[rank] if 0 <= rank < len(members) else rank

    def _note_new_groups(self) -> None:
        original = c10d._new_group_with_tag

        @functools.wraps(original)
        def noted(ranks=None, *args, use_local_synchronization=False, **kwargs):
            if not use_local_synchronization:  # else only the members make the call, by agreement
                self.collective(dist.group.WORLD, f"new_group {sorted(ranks) if ranks is not None else 'of all ranks'}")
            return original(ranks, *args, use_local_synchronization=use_local_synchronization, **kwargs)

        c10d._new_group_with_tag = noted

    def _note_functional(self) -> None:
        # Kept on the instance: a library's kernels are withdrawn when it is garbage collected.
        self._library = torch.library.Library("_c10d_functional", "IMPL")
        for name, call in _FUNCTIONAL.items():
            self._before_kernel(name, functools.partial(self._note_functional_call, call))
        self._before_kernel("all_to_all_single", self._note_functional_exchange)
        self._before_kernel(
            "isend", lambda t, peer, tag, group: self._note_functional_message(t, peer, tag, group, True)
        )
        self._before_kernel(
            "irecv", lambda t, peer, tag, group: self._note_functional_message(t, peer, tag, group, False)
        )

    def _before_kernel(self, name: str, note) -> None:
        op = getattr(getattr(torch.ops._c10d_functional, name, None), "default", None)
        if op is None:  # an operator that this release of torch does not have
            return

        def noted(keys, *args, **kwargs):
            note(*args)
            return op.redispatch(_PLAIN_KERNEL, *args, **kwargs)

        for device in ("CPU", "CUDA"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that a kernel is replaced, which is the point
                self._library.impl(name, noted, device, with_keyset=True)

    def _note_functional_call(self, name: str, tensors, *args) -> None:
        group = _resolve(args[-1])
        middle = args[0]
        self.collective(
            group,
            _describe(
                name,
                tensors,
                middle.upper() if "reduce" in name else None,
                self._global_rank(group, middle) if name == "broadcast" else None,
            ),
        )

    def _note_functional_exchange(self, tensor, output_sizes, input_sizes, group) -> None:
        group = _resolve(group)
        self.collective(group, _describe_exchange(None, tensor, output_sizes, input_sizes, group.size()))

    def _note_functional_message(self, tensor, peer: int, tag: int, group, sending: bool) -> None:
        group = _resolve(group)
        me, peer = group.rank(), dist.get_group_rank(group, peer)
        self.message(group, me if sending else peer, peer if sending else me, tag, tensor)


# ---- words ----------------------------------------------------------------------------------------------------------


def _describe(name: str, tensors, reduce_op: str | None, root: int | None) -> str:
    words = [name]
    if reduce_op is not None:
        words.append(reduce_op)
    if root is not None:
        words.append(f"root {root}")
    shapes = _tensors(tensors)
    return " ".join([*words, shapes] if shapes else words)


def _describe_exchange(outputs, inputs, output_sizes, input_sizes, members: int) -> str:
    """An all-to-all: dtype and row shape must agree; the sizes must agree in pairs, and the board compares those."""

    def sizes(given, tensors) -> list[int]:
        if not isinstance(tensors, torch.Tensor):
            return [t.numel() for t in tensors]
        if len(given):
            rows = tensors.shape[0]
            return [int(n) * (tensors.numel() // rows if rows else 0) for n in given]
        return [tensors.numel() // members] * members

    first = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
    sends = sizes(input_sizes, inputs)
    if outputs is None:  # the functional call makes its own output, of rows shaped like the input's
        row = first.numel() // first.shape[0] if first.shape[0] else 0
        receives = [int(n) * row for n in output_sizes] if len(output_sizes) else sends
    else:
        receives = sizes(output_sizes, outputs)
    return f"all_to_all {_dtype(first)}{EXCHANGE}{_commas(sends)}{RECEIVES}{_commas(receives)}"


def _tensors(tensors) -> str:
    if isinstance(tensors, torch.Tensor):
        return f"{_dtype(tensors)} {list(tensors.shape)}"
    return ", ".join(_tensors(t) for t in tensors)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _op_name(op) -> str:
    return "SUM" if op is None else _OP_NAMES[getattr(op, "op", op)]


def _resolve(group) -> ProcessGroup:
    """The process group that a functional collective was given, by name or boxed."""
    if isinstance(group, str):
        return c10d._resolve_process_group(group)
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)
