"""PyTorch's DTensor: FFN and attention cut by its plan give what the book's layers give; what each sends is counted."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode import RankPool
from tpcode.dense import FFN, Attention, SwiGLU
from tpcode.layers import ParallelAttention, ParallelFFN, ParallelSwiGLU
from tpcode.runtime.notes import watch

B, S, H = 2, 3, 16
BLOCKS = {
    "ffn": (lambda: FFN(H, 32), ParallelFFN, ("c_fc",), "c_proj"),
    "swiglu": (lambda: SwiGLU(H, 32), ParallelSwiGLU, ("gate_proj", "up_proj"), "down_proj"),
    "attention": (lambda: Attention(H, 8, bias=True), ParallelAttention, ("q_proj", "k_proj", "v_proj"), "o_proj"),
    "gqa, rope": (
        lambda: Attention(H, 8, 4, rope_theta=10_000.0),
        ParallelAttention,
        ("q_proj", "k_proj", "v_proj"),
        "o_proj",
    ),
}


@pytest.fixture(scope="module", params=[2, 4], ids=lambda t: f"t={t}")
def compared(request):
    with RankPool(request.param, timeout=60) as pool:
        return pool.run(_every_block)


def _every_block() -> dict:
    return {name: _three_ways(*block) for name, block in BLOCKS.items()}


def _three_ways(make, cls, columns, row) -> dict:
    """Output, dx and the weights' gradients, whole: of the dense block, of the book's, of DTensor's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)  # the same on every rank
    dense = make().double()
    x, dy = torch.randn(2, B, S, H, dtype=torch.float64)
    ways = {"dense": _passed(dense, x, dy), "ours": _passed(cls.from_dense(dense), x, dy)}
    plan = {name: ColwiseParallel() for name in columns} | {row: RowwiseParallel()}
    dense.zero_grad()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways["dtensor"] = _passed(parallelize_module(dense, mesh, plan), x, dy)
    return ways


def _passed(block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict:
    x = x.clone().requires_grad_()
    with watch() as forward:
        y = block(x)
    with watch() as backward:
        y.backward(dy)
    if hasattr(block, "to_dense"):  # it joins the ranks' weights: make it join their gradients
        for parameter in block.parameters():
            parameter.data = parameter.grad
        whole = {name: parameter.detach() for name, parameter in block.to_dense().named_parameters()}
    else:
        whole = {name: parameter.grad for name, parameter in block.named_parameters()}
        whole = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in whole.items()}
    return {"y": y.detach(), "dx": x.grad, **whole, "forward": forward, "backward": backward}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("way", ["ours", "dtensor"])
def test_both_are_the_dense_block(compared, name, way):
    for rank, of_rank in enumerate(compared):
        for key, want in of_rank[name]["dense"].items():
            if key not in ("forward", "backward"):
                difference = (of_rank[name][way][key] - want).abs().max()
                assert difference < 1e-12, f"{name}, {way}: {key} on rank {rank} is off by {difference}"


@pytest.mark.parametrize("name", BLOCKS)
def test_one_all_reduce_each_way_where_dtensor_sums_each_layers_dx(compared, name):
    """DTensor's plan gives each column layer a copy (f) of its own; the book's layers that read one x share it."""
    columns = len(BLOCKS[name][2])
    for of_rank in compared:
        counts = {way: [len(of_rank[name][way][phase]) for phase in ("forward", "backward")] for way in of_rank[name]}
        assert counts["dense"] == [0, 0]
        assert counts["ours"] == [1, 1]
        assert counts["dtensor"] == [1, columns]
