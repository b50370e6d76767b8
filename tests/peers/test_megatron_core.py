"""Megatron-core's layers on gloo: with the same shards they give the same outputs and gradients, and send the same.

Its tensors are [s, b, h] and the book's [b, s, h]; these layers do not look at what stands before the last dimension.
"""

import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode import RankPool
from tpcode.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tpcode.runtime.notes import watch

pytest.importorskip("megatron.core", reason="needs megatron-core: make peers")

S, B, H, F, V = 3, 2, 8, 16, 24
LAYERS = {  # how often each sends, forward and backward
    "column": (0, 1),
    "column, gathered": (1, 1),
    "row": (1, 0),
    "row, scattered": (1, 1),
    "embedding": (1, 0),
    "cross-entropy": (3, 0),
}


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda t: f"t={t}")
def compared(request):
    """For each rank and layer what both made of the same input, and what both called."""
    with RankPool(request.param, timeout=60) as pool:
        return pool.run(_every_layer)


def _every_layer() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what is not installed and not needed: Apex, Transformer Engine
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig

        t = dist.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=t)
        config = ModelParallelConfig(
            tensor_model_parallel_size=t, use_cpu_initialization=True, params_dtype=torch.float64
        )
        with patch.object(torch.cuda, "current_device", lambda: "cpu"):  # where its gather makes its output
            return {name: _both(name, config) for name in LAYERS}


def _both(name: str, config) -> dict:
    """{"ours", "theirs": output, gradients, calls forward and backward}"""
    torch.manual_seed(7)  # the same numbers on every rank
    if name == "cross-entropy":
        return _both_losses()
    if name == "embedding":
        ours, theirs = _both_embeddings(config)
        x = torch.tensor([[0, 5, V - 1], [7, 7, 12]])
    else:
        ours, theirs = _both_linears(name, config)
        x = torch.randn(S, B, ours.in_features, dtype=torch.float64)
        if name == "row":  # its input is cut
            x = x.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(own.data)
    return {"ours": _passed(ours, x), "theirs": _passed(theirs, x)}


def _both_linears(name: str, config) -> tuple[nn.Module, nn.Module]:
    from megatron.core import tensor_parallel as megatron

    options = {"config": config, "init_method": nn.init.zeros_, "bias": True}
    dense = nn.Linear(H, F) if name.startswith("column") else nn.Linear(F, H)
    dense = dense.double()
    if name.startswith("column"):
        gather = name.endswith("gathered")
        ours = ColumnParallelLinear.from_dense(dense, gather_output=gather)
        return ours, megatron.ColumnParallelLinear(H, F, gather_output=gather, **options)
    cut = name == "row"
    ours = RowParallelLinear.from_dense(dense, input_is_parallel=cut)
    return ours, megatron.RowParallelLinear(F, H, input_is_parallel=cut, skip_bias_add=False, **options)


def _both_embeddings(config) -> tuple[nn.Module, nn.Module]:
    from megatron.core import tensor_parallel as megatron

    dense = nn.Embedding(V, H).double()
    theirs = megatron.VocabParallelEmbedding(V, H, init_method=nn.init.zeros_, config=config)
    return VocabParallelEmbedding.from_dense(dense), theirs


def _passed(layer: nn.Module, x: torch.Tensor) -> dict:
    x = x.clone().requires_grad_(x.is_floating_point())
    with watch() as forward:
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y  # Megatron's linear layers also return a bias to be added later
    dy = (
        torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype).expand_as(y) * torch.arange(1, 1 + S)[:, None, None][: len(y)]
    )
    with watch() as backward:
        y.backward(dy)
    gradients = {"dx": x.grad} | {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), **gradients, "forward": _kinds(forward), "backward": _kinds(backward)}


def _both_losses() -> dict:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as megatron_cross_entropy

    logits = torch.randn(S, B, V).chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()  # Megatron's are float32
    targets = torch.tensor([[0, 5], [23, 11], [12, 17]])

    def passed(loss):
        x = logits.clone().requires_grad_()
        with watch() as forward:
            # Megatron's computes in place, and its logits are an activation's: a leaf would be refused.
            y = loss(x * 1.0, targets)
        with watch() as backward:
            y.backward(torch.arange(1.0, 1 + S * B).reshape(S, B))
        return {"y": y.detach(), "dx": x.grad, "forward": _kinds(forward), "backward": _kinds(backward)}

    return {
        "ours": passed(lambda x, y: vocab_parallel_cross_entropy(x, y, reduction="none")),
        "theirs": passed(megatron_cross_entropy),
    }


def _kinds(calls: list[str]) -> list[tuple[str, int]]:
    """What is sent, whichever call it is made with: the kind, and how many elements."""
    kinds = []
    for call in calls:
        op, *_, shape = call.replace("_single", "").partition(" [")
        sizes = [int(size) for size in shape.rstrip("]").split(",")]
        kinds.append((op.split()[0], torch.Size(sizes).numel()))
    return sorted(kinds)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_megatrons(compared, name):
    tolerance = 1e-6 if name == "cross-entropy" else 1e-12  # Megatron's loss is computed in float32
    for rank, of_rank in enumerate(compared):
        ours, theirs = of_rank[name]["ours"], of_rank[name]["theirs"]
        for key in ours.keys() - {"forward", "backward"}:
            if ours[key] is not None or theirs[key] is not None:
                difference = (ours[key] - theirs[key]).abs().max()
                assert difference < tolerance, f"{name}, {key} on rank {rank}: {difference}"


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_sent_is_megatrons(compared, name):
    if len(compared) > 1:
        for of_rank in compared:
            ours, theirs = of_rank[name]["ours"], of_rank[name]["theirs"]
            assert (ours["forward"], ours["backward"]) == (theirs["forward"], theirs["backward"])
            assert (len(ours["forward"]), len(ours["backward"])) == LAYERS[name]
