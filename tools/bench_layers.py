"""`make bench`: a step of an FFN, split by the book, by Megatron-core and by DTensor, on 2 ranks of one thread each.

The ways take turns, step by step, so that a busy moment hits all alike; the book's is there twice, and the ratio of the
two says how much a ratio means. Medians of the steps, as ratios. Then one rank against the dense FFN.
"""

import os
import statistics
import time
import warnings
from itertools import product

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from tpcode import RankPool
from tpcode.dense import FFN
from tpcode.layers import ParallelFFN

TOKENS = 256
SIZES = {64: 200, 512: 60, 2048: 20}  # h, and how many steps
AT_MOST = {
    "Megatron-core": {},
    "DTensor": {64: 0.50, 512: 0.95, 2048: 1.00},
    "dense, t = 1": {64: 1.15, 512: 1.03, 2048: 1.03},
}


def main() -> None:
    console = Console(width=110)
    table = Table(title=f"FFN, {TOKENS} tokens, float32; torch {torch.__version__}, {os.cpu_count()} cores")
    for column in ("h", "the book's over", "ratio of medians", "null", "at most"):
        table.add_column(column, justify="right", no_wrap=True)
    for t, (h, steps) in product((2, 1), SIZES.items()):
        with RankPool(t) as pool:  # new ranks each time: Megatron-core and DTensor keep what they made
            seconds = pool.run(by_turns, h, steps)[0]
        ours, null = seconds.pop("the book"), seconds.pop("the book again")
        for name, theirs in seconds.items():
            limit = AT_MOST[name].get(h, max(1.05, null / ours, ours / null))
            table.add_row(str(h), name, f"{ours / theirs:.2f}", f"{ours / null:.2f}", f"{limit:.2f}")
    console.print(table)


def by_turns(h: int, steps: int) -> dict[str, float]:
    """Median seconds of a step, forward, backward and SGD, for each way."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dense = FFN(h, 4 * h)
    x = torch.randn(1, TOKENS, h)
    ways = {"the book": ParallelFFN.from_dense(dense), "the book again": ParallelFFN.from_dense(dense)}
    ways |= {"dense, t = 1": dense} if dist.get_world_size() == 1 else {"Megatron-core": megatron(h)}
    if dist.get_world_size() > 1:
        ways["DTensor"] = by_plan(dense)  # cuts the dense one itself: last
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps + 3):
        order = list(ways) if step % 2 else list(reversed(ways))
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            train_step(ways[name], x)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[3:]) for name, values in seconds.items()}


def train_step(ffn: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    ffn(x).sum().backward()
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter -= 1e-6 * parameter.grad
            parameter.grad = None


class MegatronFFN(nn.Module):
    """Its column and row layers with the same activation between them."""

    def __init__(self, h: int, config):
        from megatron.core import tensor_parallel

        super().__init__()
        options = {"config": config, "init_method": nn.init.normal_, "bias": True}
        self.fc1 = tensor_parallel.ColumnParallelLinear(h, 4 * h, gather_output=False, **options)
        self.fc2 = tensor_parallel.RowParallelLinear(4 * h, h, input_is_parallel=True, skip_bias_add=False, **options)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)[0], approximate="tanh"))[0]


def megatron(h: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Apex and Transformer Engine, which are not needed here
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # it warns where this is not set
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        config = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, params_dtype=torch.float32
        )
        return MegatronFFN(h, config)


def by_plan(dense: FFN) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(dense, mesh, {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()})


if __name__ == "__main__":
    main()
