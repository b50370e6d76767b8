"""What a forward pass keeps for its backward, measured: which tensors, by which call of which layer.

with saved_for_backward(model) as meter:
    y = model(x)
print(meter.table())
meter.nbytes, meter.of("ffn"), meter.saved
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Saved:
    """One tensor that backward will want.

    Attributes:
        layer: path of the module whose forward saved it first; "" is the metered module itself, or what ran around it.
        op: the torch function, or the `autograd.Function`, that saved it first.
        shape, dtype: of the tensor; where it is a view of a larger one, of that one, which stays in memory whole.
        nbytes: of its storage.
    """

    layer: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass
class Meter:
    """What was saved, in order; filled while the block of `saved_for_backward` runs."""

    saved: list[Saved] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(tensor.nbytes for tensor in self.saved)

    def of(self, layer: str) -> int:
        """Bytes that one layer and those inside it saved, by the layer's path; "" is everything."""
        inside = f"{layer}." if layer else ""
        return sum(tensor.nbytes for tensor in self.saved if f"{tensor.layer}.".startswith(inside))

    def by_layer(self, depth: int | None = None) -> dict[str, int]:
        """Bytes by layer, in the order of running; paths are cut after `depth` names."""
        found: dict[str, int] = {}
        for tensor in self.saved:
            path = ".".join(tensor.layer.split(".")[:depth])
            found[path] = found.get(path, 0) + tensor.nbytes
        return found

    def table(self) -> str:
        """One line for each tensor: layer, op, shape, dtype and bytes; and the sum."""
        rows = [
            (tensor.layer, tensor.op, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
            for tensor in self.saved
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        lines = ["  ".join([*(text.ljust(w) for text, w in zip(row, widths)), f"{row[-1]:>9,}"]) for row in rows]
        return "\n".join([*lines, f"{'in all':{sum(widths) + 6}}  {self.nbytes:>9,} bytes"])


@contextmanager
def saved_for_backward(module: nn.Module) -> Iterator[Meter]:
    """Meter what autograd saves while the block runs: forward, and the loss if it is inside.

    A storage counts once, whole, however many tensors share it: several layers that read one input keep it once, and a
    view keeps all of what it looks at. Parameters and buffers of the module do not count, nor do views of them; a copy
    that forward makes of one (autocast's, in another dtype) does. Everything saved in the block counts, also by a graph
    that is dropped before its end. With activation recomputation that is what is kept until the forward runs again.

    Args:
        module: what runs in the block.

    Raises:
        TypeError: it is no module.
        RuntimeError: at the block's end, if the module has not run, or has run without gradients and saved nothing.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"saved_for_backward meters a torch.nn.Module, and this is a {type(module).__name__}")
    own = {_id(tensor.untyped_storage()) for tensor in [*module.parameters(), *module.buffers()]}
    meter, ops, running = Meter(), _Ops(), _Running()
    alive = {}  # a storage that is gone would leave its id to another

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _id(storage) not in own and _id(storage) not in alive:
            alive[_id(storage)] = storage
            op = ops.names[-1] if ops.names else _function_that_saves(sys._getframe(1))
            meter.saved.append(Saved(running.layer, op, _shape(tensor), tensor.dtype, storage.nbytes()))
        return tensor

    with ExitStack() as hooks:
        for path, part in module.named_modules():
            hooks.callback(part.register_forward_pre_hook(running.enter(path)).remove)
            hooks.callback(part.register_forward_hook(running.leave, always_call=True).remove)
        with saved_tensors_hooks(pack, lambda tensor: tensor), ops:
            yield meter
    if not running.ever:
        raise RuntimeError(f"the {type(module).__name__} did not run inside the block: there is nothing to meter")
    if not meter.saved and not running.with_gradients:
        raise RuntimeError(
            f"the {type(module).__name__} ran without gradients, and saved nothing: leave torch.no_grad() away"
        )


class _Running:
    """Which modules' forward is running, the innermost last."""

    def __init__(self):
        self.paths: list[str] = []
        self.ever = self.with_gradients = False

    @property
    def layer(self) -> str:
        return self.paths[-1] if self.paths else ""

    def enter(self, path: str):
        def hook(*_) -> None:
            self.paths.append(path)
            self.ever = True
            self.with_gradients |= torch.is_grad_enabled()

        return hook

    def leave(self, *_) -> None:
        self.paths.pop()


class _Ops(TorchFunctionMode):
    """The torch functions that are running, the innermost last; what these call themselves is not seen."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.names.pop()


def _function_that_saves(frame) -> str:
    """The name of the `autograd.Function` that saves a tensor from this frame: its `apply` is no torch function."""
    cls = frame.f_locals.get("cls") if frame.f_code is torch.autograd.Function.apply.__func__.__code__ else None
    return "" if cls is None else cls.__name__


def _id(storage) -> int:
    return storage._cdata  # its address would be 0 for every storage on "meta"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    base = tensor._base
    return tuple(tensor.shape if base is None or base.numel() == tensor.numel() else base.shape)
