"""Training on t ranks: which gradients are summed, the norm of a gradient that lies in pieces, and a small loop.

Symbols: b microbatch, s sequence, t ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpcode.comm import all_gather, all_reduce, group_rank, group_size
from tpcode.layers import Placement, placements, set_dropout_step
from tpcode.model import ParallelTransformer


@torch.no_grad()
def finalize_grads(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Sum over the ranks what each holds a part of: the gradients whose placement says `partial_grad`, and no others.

    Call it after the last backward of a step and before the gradients are used. A parameter that every rank has needs
    no sum where every rank has seen all tokens: all have its whole gradient, and summing would make it t times too
    large. Where each rank has seen tokens of its own (norms and row biases under sequence parallelism) it does. What is
    summed within backward (replicated KV heads) is whole by now. One all-reduce for all; none if there is nothing.

    Args:
        model: anything whose modules place their parameters.
        group: the tensor-parallel ranks; None is the model's own `group`, or all ranks where it has none.
    """
    parts = [p.grad for p, placement in _placed(model) if placement.partial_grad and p.grad is not None]
    if parts:
        whole = all_reduce(torch.cat([part.flatten() for part in parts]), group=_group_of(model, group))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, group: ProcessGroup | None = None) -> float:
    """Scale all gradients down so that their norm is at most `max_norm`, and return the norm that they had.

    It is the norm of the dense model's gradient: the root of the sum of squares of every parameter once. Of what is cut
    each rank adds its own squares. Of what is on every rank, rank 0 alone does; of a KV head's replicas the first; a
    tied embedding is one parameter and comes once; padding does not come at all. One all-reduce of one number then
    gives every rank the same bits: with norms that differ in the last bit, ranks would scale what they hold alike by
    different factors, and drift apart.

    Args:
        model, group: as for `finalize_grads`, which goes before: a norm of parts is the norm of nothing.
        max_norm: a positive number; `float("inf")` only measures.

    Raises:
        ValueError: max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive and is {max_norm}")
    group = _group_of(model, group)
    rank, t = group_rank(group), group_size(group)
    found = [(p.grad, placement) for p, placement in _placed(model) if p.grad is not None]
    if not found:
        return 0.0
    squares = sum(_squares(grad, placement, rank, t) for grad, placement in found)
    norm = all_reduce(squares, group=group).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)  # as in torch.nn.utils.clip_grad_norm_
    for grad, _ in found:
        grad.mul_(scale)
    return norm.item()


def train(
    model: ParallelTransformer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    lr: float = 1e-3,
    max_norm: float = 1.0,
    optimizer=None,
    first_step: int = 0,
    progress: bool = True,
) -> list[float]:
    """Train on one batch after another, and return the loss of each. Every rank of the group calls it.

    Besides what the model sends, a step sends each rank's fingerprint of its batch (8 bytes) and the gradient's norm.

    Args:
        batches: pairs of ids and targets, [b, s] each, the same on every rank.
        lr: of AdamW without weight decay.
        max_norm: of the gradient, see `clip_grad_norm`.
        optimizer: something with `step` and `zero_grad` in AdamW's place.
        first_step: the number of the first step: it decides what dropout drops.
        progress: whether rank 0 prints a bar.

    Raises:
        ValueError: the ranks have different batches; the message says which.
    """
    optimizer = AdamW(model.parameters(), lr) if optimizer is None else optimizer
    total = len(batches) if hasattr(batches, "__len__") else None
    progress = progress and group_rank(model.group) == 0
    losses: list[float] = []
    model.train()
    try:
        for step, (ids, targets) in enumerate(batches, first_step):
            require_same_batch(ids, targets, model.group, step)
            set_dropout_step(model, step)
            loss = model.loss(ids, targets)
            loss.backward()
            finalize_grads(model)
            clip_grad_norm(model, max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if progress:
                print("\r" + _bar(len(losses), total, losses[-1]), end="", flush=True)
    finally:
        if progress and losses:
            print(flush=True)
    return losses


def require_same_batch(ids: Tensor, targets: Tensor, group: ProcessGroup | None = None, step: int = 0) -> None:
    """Refuse, on every rank, a batch that is not the same on all of them. One all-gather of 8 bytes from each.

    Without it nothing fails: losses go down, each rank adds up parts of different products, and the model is wrong.

    Raises:
        ValueError: the ranks have different batches; the message says which.
        TypeError: these are no tensors.
    """
    for name, tensor in (("ids", ids), ("targets", targets)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"step {step}: {name} must be a tensor and not a {type(tensor).__name__}")
    own = torch.tensor([_fingerprint(ids, targets)], device=ids.device)
    first, *others = all_gather(own, 0, group).tolist()
    if different := [rank for rank, other in enumerate(others, 1) if other != first]:
        ranks = f"rank{'s' if len(different) > 1 else ''} {', '.join(map(str, different))}"
        raise ValueError(
            f"step {step}: {ranks} of the tensor-parallel group got another batch than rank 0. These ranks work on one "
            f"batch together: seed and shard the data by the data-parallel rank, not by the global one"
        )


class AdamW:
    """AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW`, whose import alone takes each rank seconds.

    It treats each entry on its own, and so a shard as it would treat the whole: it need not know of ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.lr, self.betas, self.eps, self.weight_decay, self.steps = lr, betas, eps, weight_decay, 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        (b1, b2), n = self.betas, self.steps
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            if parameter.grad is None:
                continue
            mean.lerp_(parameter.grad, 1 - b1)
            square.mul_(b2).addcmul_(parameter.grad, parameter.grad, value=1 - b2)
            spread = (square / (1 - b2**n)).sqrt_().add_(self.eps)
            parameter.mul_(1 - self.lr * self.weight_decay).addcdiv_(mean, spread, value=-self.lr / (1 - b1**n))

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


# ---- helpers --------------------------------------------------------------------------------------------------------


def _placed(model: nn.Module) -> list[tuple[nn.Parameter, Placement]]:
    where = placements(model)
    return [(parameter, where[name]) for name, parameter in model.named_parameters()]


def _group_of(model: nn.Module, group: ProcessGroup | None) -> ProcessGroup | None:
    return getattr(model, "group", None) if group is None else group


def _squares(grad: Tensor, placement: Placement, rank: int, t: int) -> Tensor:
    """The sum of squares of what this rank counts, in float64."""
    if placement.dim is None:
        grad = grad if rank == 0 else grad.new_zeros(1)
    elif (counted := _counted(placement, rank, t)) is not None:
        grad = grad.index_select(placement.dim, counted.to(grad.device))
    return torch.linalg.vector_norm(grad, dtype=torch.float64).square()


@cache
def _counted(placement: Placement, rank: int, t: int) -> Tensor | None:
    """The entries along the placement's dimension that this rank counts; None is all."""
    counted = placement.counted(rank, t)
    return None if counted.all() else counted.nonzero().flatten()


def _fingerprint(*tensors: Tensor) -> int:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:7])


def _bar(step: int, total: int | None, loss: float) -> str:
    if total is None:
        return f"step {step}  loss {loss:.3f}"
    filled = 30 * step // total
    return f"[{'#' * filled}{'.' * (30 - filled)}] step {step}/{total}  loss {loss:.3f}"
