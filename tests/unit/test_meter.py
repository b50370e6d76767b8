"""The meter sees each storage once and no parameter, says which call of which layer kept it, and cleans up."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpcode.config import ModelConfig
from tpcode.dense import FFN, GPT2
from tpcode.layers import ColumnParallelLinear
from tpcode.meter import Saved, saved_for_backward


class Two(nn.Module):
    """Two layers that read one input, and a buffer that is multiplied in."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        return self.left(x) * self.scale + self.right(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ffn_to_the_byte(dtype):
    ffn = FFN(8, 20, dtype=dtype)
    with saved_for_backward(ffn) as meter:
        ffn(torch.randn(3, 5, 8, dtype=dtype))
    assert meter.nbytes == 3 * 5 * (8 + 2 * 20) * dtype.itemsize  # X, H and Z; no weight
    assert [(tensor.layer, tensor.op) for tensor in meter.saved] == [
        ("c_fc", "linear"),
        ("", "gelu"),
        ("c_proj", "linear"),
    ]


def test_what_two_layers_read_counts_once_and_parameters_and_buffers_not_at_all():
    two = Two()
    with saved_for_backward(two) as meter:
        two(torch.randn(5, 4, requires_grad=True))
    assert [(tensor.layer, tensor.shape, tensor.nbytes) for tensor in meter.saved] == [("left", (5, 4), 80)]


def test_a_view_counts_all_of_what_it_keeps_alive():
    norm = nn.LayerNorm(4, bias=False)
    wide = torch.randn(5, 12)
    with saved_for_backward(norm) as meter:
        norm(wide[:, 4:8])
    inputs = meter.saved[0]
    assert inputs == Saved("", "layer_norm", (5, 12), torch.float32, 5 * 12 * 4)


def test_two_forwards_count_twice_though_the_first_graph_is_gone():
    """Rules out: a storage that took over the address or id of a freed one, and is then not counted."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with saved_for_backward(layer) as once:
        layer(torch.randn(32, 64))
    with saved_for_backward(layer) as twice:
        for _ in range(2):
            layer(torch.randn(32, 64))
    assert twice.nbytes == 2 * once.nbytes == 2 * 3 * 32 * 64 * 4


def test_layers_by_path():
    config = ModelConfig(family="gpt2", hidden=8, ffn=16, heads=2, layers=2, vocab=10, max_seq=6, dropout=0.5)
    model = GPT2(config, core="explicit")
    ids = torch.zeros(2, 6, dtype=torch.long)
    with saved_for_backward(model) as meter:
        model.loss(ids, ids)
    assert meter.of("") == meter.nbytes == sum(tensor.nbytes for tensor in meter.saved)
    blocks = meter.by_layer(3)
    assert blocks["transformer.h.0"] == blocks["transformer.h.1"] == meter.of("transformer.h.1")
    assert meter.of("transformer.h.1") == sum(
        meter.of(f"transformer.h.1.{part}") for part in ("ln_1", "attn", "dropout_1", "ln_2", "mlp", "dropout_2")
    )
    assert meter.of("transformer.h.1.a") == 0  # a name is a whole one
    assert ("", "cross_entropy") in {(tensor.layer, tensor.op) for tensor in meter.saved}
    assert sum(meter.by_layer().values()) == meter.nbytes


def test_an_autograd_function_has_its_name():
    layer = ColumnParallelLinear(torch.randn(6, 4))
    with saved_for_backward(layer) as meter:
        layer(torch.randn(3, 4))
    assert meter.saved == [Saved("", "_ColumnProduct", (3, 4), torch.float32, 48)]


def test_with_recomputation_the_input_alone_is_kept():
    ffn = FFN(8, 20)
    x = torch.randn(3, 8, requires_grad=True)
    with saved_for_backward(ffn) as meter:
        y = checkpoint(ffn, x, use_reentrant=False)
        assert meter.nbytes == x.nbytes
        y.sum().backward()  # runs it again; what that keeps it keeps for a moment
    assert meter.nbytes == x.nbytes


def test_without_a_place_in_memory():
    """On "meta" all storages have the address 0."""
    ffn = FFN(4096, 16_384, device="meta", dtype=torch.float16)
    with saved_for_backward(ffn) as meter:
        ffn(torch.empty(2048, 4096, device="meta", dtype=torch.float16))
    assert meter.nbytes == 2048 * (4096 + 2 * 16_384) * 2


def test_the_results_stay_what_they_are_and_nothing_stays_behind():
    ffn, x = FFN(8, 20), torch.randn(3, 8)
    y = ffn(x)
    with pytest.raises(ValueError, match="stop"), saved_for_backward(ffn):
        assert torch.equal(ffn(x), y)
        raise ValueError("stop")
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in ffn.modules())
    with saved_for_backward(ffn) as meter:
        with pytest.raises(RuntimeError):
            ffn(torch.randn(3, 9))  # fails within c_fc: its path must be left
        ffn(x).sin()
    assert [(tensor.layer, tensor.op) for tensor in meter.saved[-2:]] == [("c_proj", "linear"), ("", "sin")]


def test_the_table():
    ffn = FFN(8, 20)
    with saved_for_backward(ffn) as meter:
        ffn(torch.randn(3, 8))
    first, *_, last = meter.table().splitlines()
    assert first.split() == ["c_fc", "linear", "[3,", "8]", "float32", "96"]
    assert last.split() == ["in", "all", "576", "bytes"]
    assert len({len(line) for line in meter.table().splitlines()[:-1]}) == 1


def test_what_cannot_be_metered_is_said():
    ffn = FFN(8, 20)
    with pytest.raises(TypeError, match="this is a function"), saved_for_backward(lambda x: x):
        pass
    with pytest.raises(RuntimeError, match="the FFN did not run inside the block"), saved_for_backward(ffn):
        pass
    with pytest.raises(RuntimeError, match="ran without gradients"), saved_for_backward(ffn), torch.no_grad():
        ffn(torch.randn(3, 8))
    silent = nn.Identity()
    with saved_for_backward(silent) as meter:
        silent(torch.randn(3))
    assert meter.nbytes == 0  # it keeps nothing, and may
