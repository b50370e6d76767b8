"""Hugging Face's attention and norms of small random models, float64, against the dense ones: output, every gradient.

They are what "equals dense" rests on for pretrained weights. Two of Hugging Face's computations are in float32 whatever
they are given, and are no measure in float64: the softmax of its "eager" Llama, in whose place stands its "sdpa", and
RMSNorm, which is compared loosely.
"""

import pytest
import torch
from torch import nn

from tpcode.dense import Attention, GPT2Attention, KVCache

transformers = pytest.importorskip("transformers")

B, S, H, A, K = 2, 6, 24, 6, 2
TOLERANCE = {"rtol": 0, "atol": 1e-12}


def causal():
    return torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def llama_like(family, bias=False, **kwargs):
    """A family's attention with random weights, biases and norms, and its rotary positions."""
    from importlib import import_module

    module = import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    sizes = {"hidden_size": H, "num_attention_heads": A, "num_key_value_heads": K, "head_dim": H // A}
    config = getattr(transformers, f"{family}Config")(
        **sizes, attention_bias=bias, num_hidden_layers=1, attn_implementation="sdpa", **kwargs
    )
    attention = getattr(module, f"{family}Attention")(config, 0).double()
    for name, parameter in attention.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    rotary = getattr(module, f"{family}RotaryEmbedding")(config)
    return attention, rotary(torch.zeros(1, dtype=torch.float64), torch.arange(S)[None]), config


def compare(ours, theirs, run_theirs, transpose=False, tolerance=TOLERANCE):
    """Output, dX and every parameter's gradient, by name."""

    def turned(tensor):
        return tensor.T if transpose and tensor.dim() == 2 else tensor

    ours.load_state_dict({name: turned(tensor) for name, tensor in theirs.state_dict().items()})
    x, dy = (torch.randn(B, S, H, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    y, wanted = ours(leaves[0]), run_theirs(leaves[1])
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(y, wanted, **tolerance)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, **tolerance)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, turned(parameter.grad), **tolerance)


@pytest.mark.parametrize("core", ["sdpa", "explicit"])
@pytest.mark.parametrize("bias", [False, True])
def test_llamas_attention(bias, core):
    theirs, positions, config = llama_like("Llama", bias, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ours = Attention(H, A, K, bias=bias, rope_theta=500.0, core=core, dtype=torch.float64)
    compare(ours, theirs, lambda x: theirs(x, positions, causal())[0])


@pytest.mark.parametrize(("family", "kind"), [("Qwen3", "head"), ("Olmo2", "all")])
def test_attention_with_qk_norm(family, kind):
    """Not vacuous: the norms' weights are random, and the other kind of norm would be off by far more than 1e-4."""
    theirs, positions, config = llama_like(family)
    eps = config.rms_norm_eps
    ours = Attention(H, A, K, rope_theta=10_000.0, qk_norm=kind, norm_eps=eps, dtype=torch.float64)
    compare(ours, theirs, lambda x: theirs(x, positions, causal())[0], tolerance={"rtol": 0, "atol": 1e-4})


@pytest.mark.parametrize("core", ["sdpa", "explicit"])
def test_gpt2s_attention(core):
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention as Theirs

    config = transformers.GPT2Config(n_embd=H, n_head=A, attn_implementation="eager")
    theirs = Theirs(config, layer_idx=0).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = GPT2Attention(H, A, core=core, dtype=torch.float64)
    compare(ours, theirs, lambda x: theirs(x, attention_mask=causal())[0], transpose=True)


def test_a_cache_goes_on_where_hugging_faces_does():
    """Token by token after a first part, positions included."""
    theirs, positions, _ = llama_like("Llama")
    ours = Attention(H, A, K, rope_theta=10_000.0, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x, cache = torch.randn(B, S, H, dtype=torch.float64), KVCache()
    with torch.no_grad():
        parts = [ours(part, cache) for part in x.split([3, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), theirs(x, positions, causal())[0], **TOLERANCE)
