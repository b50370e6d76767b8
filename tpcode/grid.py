"""Training on a grid of t × dp ranks, on one node or many: tensor parallelism inside a node, replicas across nodes.

    torchrun --nproc-per-node 8 -m tpcode.grid --tp 4 --steps 100 --save run

Rank r has tensor-parallel rank r mod t and data-parallel rank r div t, as in Megatron-LM: so the t ranks of one replica
are neighbours, and lie in one node where t divides the node's ranks. The t ranks of a replica work on one batch; the dp
ranks with the same slice work on batches of their own, and average their gradients once a step.

Symbols: b sequences of a replica, s sequence, t and dp the axes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shutil import rmtree

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpcode.checkpoint import CheckpointError, load, save
from tpcode.comm import all_gather, all_reduce, broadcast
from tpcode.config import ModelConfig
from tpcode.model import ParallelTransformer
from tpcode.runtime import RankError, RankTimeout, init_from_env
from tpcode.shapes import divide, head_groups, require_int
from tpcode.training import AdamW, clip_grad_norm, finalize_grads

START_SECONDS = 300.0  # that ranks of many nodes may take to meet
_LOST = re.compile(r"gloo|nccl|timed? ?out|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


# ---- the grid -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """This rank's place.

    Attributes:
        t, dp: sizes of the axes.
        rank, tp_rank, dp_rank: this rank's number in the world and along each axis.
        tp_group: the t ranks that hold one replica.
        dp_group: the dp ranks that hold the same slice.
        timeout: seconds that a collective in these may wait.
    """

    t: int
    dp: int
    rank: int
    tp_group: ProcessGroup | None
    dp_group: ProcessGroup | None
    timeout: float

    @property
    def tp_rank(self) -> int:
        """r mod t."""
        return self.rank % self.t

    @property
    def dp_rank(self) -> int:
        """r div t."""
        return self.rank // self.t


def make_grid(tp: int, timeout: float = 60.0) -> Grid:
    """Two groups for each rank. Every rank of the world calls it; without a world it is one rank's.

    Raises:
        ValueError: t does not divide the ranks; the message has the sizes that work.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    dp = divide(world, tp, "the number of ranks")
    groups: dict[str, ProcessGroup | None] = {"tp": None, "dp": None}
    if dist.is_initialized():
        dist.barrier()  # ranks may come late; from now on one that does is lost
        lists = {"tp": [range(i * tp, (i + 1) * tp) for i in range(dp)], "dp": [range(i, world, tp) for i in range(tp)]}
        for axis, members in lists.items():  # in one order on every rank
            for ranks in members:
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
                groups[axis] = group if rank in ranks else groups[axis]
    return Grid(tp, dp, rank, groups["tp"], groups["dp"], timeout)


@torch.no_grad()
def average_grads(model: nn.Module, grid: Grid) -> None:
    """The mean over the replicas of every gradient: one all-reduce of all of them, over the dp ranks.

    It goes after `finalize_grads`, and before the norm is taken. (Frameworks do it in buckets while backward runs.)
    """
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if grads and grid.dp > 1:
        mean = all_reduce(torch.cat([grad.flatten() for grad in grads]), op="avg", group=grid.dp_group)
        for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


# ---- a step ---------------------------------------------------------------------------------------------------------


def train_step(model: ParallelTransformer, optimizer: AdamW, ids: Tensor, targets: Tensor, grid: Grid) -> float:
    """One step on this replica's ids and targets [b, s]; returns the mean loss of all replicas.

    Replicas have as many sequences each, so that the mean of their means is the mean of the whole batch.
    """
    loss = model.loss(ids, targets)
    loss.backward()
    finalize_grads(model)
    average_grads(model, grid)
    clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return all_reduce(loss.detach(), op="avg", group=grid.dp_group).item() if grid.dp > 1 else loss.item()


def batch_of(text: Tensor, step: int, batch: int, sequence: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """This replica's part of a step's batch: ids and the tokens that follow, [B/dp, s] each.

    Which passages a step reads depends on its number alone, neither on the grid nor on where training began.
    """
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - sequence, (batch,), generator=draw).chunk(grid.dp)[grid.dp_rank]
    windows = torch.stack([text[start : start + sequence + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


@contextmanager
def naming_the_lost(grid: Grid, step: int, directory: Path | None) -> Iterator[None]:
    """Turn what a backend says when a peer is gone into an error that says where, and what to do.

    Raises:
        RankTimeout: a peer did not answer in time.
        RankError: a connection to a peer was closed.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankError) or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            raise
        late = re.search(r"timed? ?out", str(error), re.IGNORECASE)
        node, nodes = os.environ.get("GROUP_RANK", "0"), os.environ.get("GROUP_WORLD_SIZE", "1")
        what = f"did not answer within {grid.timeout:g} s" if late else "closed its connection"
        again = f" Start all nodes again: training goes on from the last step in {directory}." if directory else ""
        raise (RankTimeout if late else RankError)(
            f"rank {grid.rank} on node {node} of {nodes}, step {step}: one of its peers (ranks {_peers(grid)}) {what}. "
            f"Its process or its node has ended, or the link to it is cut.{again} The backend says: "
            f"{str(error).splitlines()[0]}",
            grid.rank,
        ) from error


def _peers(grid: Grid) -> str:
    """The others of both groups."""
    first = grid.rank - grid.tp_rank
    ranks = {*range(first, first + grid.t), *range(grid.tp_rank, grid.t * grid.dp, grid.t)} - {grid.rank}
    return ", ".join(map(str, sorted(ranks)))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save_step(model: ParallelTransformer, optimizer: AdamW, steps: int, directory: Path, grid: Grid) -> None:
    """Write what `steps` steps have made into directory/step-000010: the model's shards, and each rank's Adam.

    The first replica writes; the others have the same. The directory gets its name when all is written, so that what a
    run leaves that is killed meanwhile is never taken for a checkpoint. All nodes must see one file system.
    """
    if grid.dp_rank != 0:
        return
    from safetensors.torch import save_file

    target, partial = directory / _name(steps), directory / f".{_name(steps)}"
    if grid.rank == 0:
        rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    save(model, partial / "model")
    header = {"steps": str(optimizer.steps), "t": str(grid.t)}
    save_file(_state(model, optimizer), partial / _adam(grid), header)
    all_gather(torch.ones(1, device=model.embedding.weight.device), 0, grid.tp_group)  # all have written
    if grid.rank == 0:
        partial.rename(target)


def last_step(directory: Path, grid: Grid, device: torch.device) -> int:
    """The steps that the last checkpoint has made, 0 where there is none. Rank 0 looks, and all take its answer."""
    found = 0
    if grid.rank == 0:
        names = (re.fullmatch(r"step-(\d{6,})", path.name) for path in directory.glob("step-*"))
        found = max((int(match[1]) for match in names if match), default=0)
    return int(broadcast(torch.tensor(found, device=device), src=0))


def load_step(
    steps: int, directory: Path, grid: Grid, device: torch.device, lr: float, **options
) -> tuple[ParallelTransformer, AdamW]:
    """The model and its Adam, as `save_step` wrote them. The model would take any t; Adam's state is cut for one.

    Args:
        options: of the model, as `sequence_parallel`, see `tpcode.checkpoint.load`.

    Raises:
        CheckpointError: files are missing or damaged, or Adam's state is another t's.
    """
    from safetensors import safe_open

    place = directory / _name(steps)
    model = load(place / "model", grid.tp_group, **options).to(device)
    optimizer, file = AdamW(model.parameters(), lr), place / _adam(grid)
    if not file.is_file():
        found = sorted(path.name for path in place.glob("adamw-*"))
        raise CheckpointError(f"{file} is missing; there are {', '.join(found) or 'none'}: take --tp as it was")
    with safe_open(file, framework="pt") as saved:
        optimizer.steps = int(saved.metadata()["steps"])
        for name, tensor in _state(model, optimizer).items():
            tensor.copy_(saved.get_tensor(name))
    return model, optimizer


def _state(model: ParallelTransformer, optimizer: AdamW) -> dict[str, Tensor]:
    """Adam's averages by the name of their parameter."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    kinds = {"mean": optimizer.means, "square": optimizer.squares}
    return {f"{kind}.{name}": one for kind, all_ in kinds.items() for name, one in zip(names, all_, strict=True)}


def _name(steps: int) -> str:
    return f"step-{steps:06}"


def _adam(grid: Grid) -> str:
    return f"adamw-{grid.tp_rank:05}-of-{grid.t:05}.safetensors"


# ---- the program ----------------------------------------------------------------------------------------------------


def main(given: list[str] | None = None) -> None:
    """Train a small GPT on bytes of text; what a checkpoint holds is gone on with."""
    options = _options(given)
    config = _config(options, ranks=int(os.environ.get("WORLD_SIZE", 1)))
    text = _text(options)
    if "RANK" in os.environ:
        init_from_env(timeout=max(START_SECONDS, options.timeout))
    grid = make_grid(options.tp, options.timeout)
    device = torch.device("cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu")
    say = print if grid.rank == 0 else lambda *_, **__: None
    first = last_step(options.save, grid, device) if options.save else 0
    if first:
        model, optimizer = load_step(first, options.save, grid, device, options.lr, sequence_parallel=options.sp)
        if model.config != config:
            raise ValueError(f"{options.save} holds a model of other sizes: {model.config}")
    else:
        kind = getattr(torch, options.dtype)
        model = ParallelTransformer(config, grid.tp_group, sequence_parallel=options.sp, dtype=kind, device=device)
        optimizer = AdamW(model.parameters(), options.lr)
    say(f"{_describe(grid)}; {f'goes on after step {first}' if first else 'begins'}", flush=True)
    for step in range(first, options.steps):
        with naming_the_lost(grid, step + 1, options.save):
            ids, targets = batch_of(text, step, options.batch, options.sequence, grid)
            loss = train_step(model, optimizer, ids.to(device), targets.to(device), grid)
            say(f"step {step + 1} loss {loss:.12f}", flush=True)
            if options.save and (step + 1) % options.every == 0:
                save_step(model, optimizer, step + 1, options.save, grid)
                say(f"saved {options.save / _name(step + 1)}", flush=True)


def _describe(grid: Grid) -> str:
    """Where the axes lie; and a warning where a replica does not lie in one node."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    across = "" if here % grid.t == 0 else f" (across nodes of {here} ranks: its all-reduces take the network)"
    return f"{grid.t * grid.dp} ranks, {grid.t * grid.dp // here} node(s): tp = {grid.t}{across}, dp = {grid.dp}"


def _config(options: argparse.Namespace, ranks: int) -> ModelConfig:
    """The model's sizes. Refuses what does not split, on every rank alike, before they meet.

    Raises:
        ValueError: t does not divide the ranks, the heads or the sequence, or dp the batch.
    """
    dp = divide(ranks, options.tp, "the number of ranks")
    head_groups(options.heads, options.heads, options.tp)
    if options.batch % dp:
        raise ValueError(f"--batch {options.batch} is not shared evenly by dp = {dp} replicas: take a multiple of {dp}")
    if options.sp:
        divide(options.sequence, options.tp, "--sequence")
    return ModelConfig(
        family="gpt2",
        hidden=options.hidden,
        ffn=4 * options.hidden,
        heads=options.heads,
        layers=options.layers,
        vocab=256,
        max_seq=options.sequence,
    )


def _text(options: argparse.Namespace) -> Tensor:
    """The file's bytes as ids; without one, this package's own source, which every node has."""
    files = [options.text] if options.text else sorted(Path(__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if len(text) <= options.sequence:
        raise ValueError(f"--text has {len(text)} bytes, and a sequence takes {options.sequence} and one more")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def _options(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m tpcode.grid", description="Train a small GPT on tp × dp ranks, on one node or many."
    )
    sizes = {"--tp": 1, "--steps": 100, "--batch": 8, "--sequence": 64, "--hidden": 64, "--heads": 4, "--layers": 2}
    words = {"--tp": "ranks of one replica; the others are replicas", "--batch": "sequences in a step, of all replicas"}
    for name, default in sizes.items():
        parser.add_argument(name, type=int, default=default, help=f"{words.get(name, '')} [{default}]".strip())
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW [0.001]")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--text", type=Path, help="a file to learn, byte by byte [tpcode's own source]")
    parser.add_argument(
        "--save", type=Path, help="a directory for checkpoints, which all nodes see; goes on from there"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints [10]")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank may wait for a peer [60]")
    options = parser.parse_args(given)
    for name in ("tp", "steps", "batch", "sequence", "hidden", "heads", "layers", "every"):
        require_int(getattr(options, name), f"--{name}")
    return options


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f"tpcode.grid: {error}")
    except RankError as error:
        sys.exit(f"tpcode.grid: {type(error).__name__}: {error.args[0]}")
