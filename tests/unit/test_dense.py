"""The dense modules against the same by hand, and against Hugging Face's names and values."""

import numpy as np
import pytest
import torch

from tpcode import byhand
from tpcode.dense import FFN, SwiGLU

H, F = 6, 12


def test_ffn_equals_the_one_by_hand():
    ffn = FFN(H, F, bias=False, dtype=torch.float64)
    x, dy = torch.randn(7, H, dtype=torch.float64, requires_grad=True), torch.randn(7, H, dtype=torch.float64)
    y = ffn(x)
    y.backward(dy)
    A, B = (w.detach().numpy().T for w in (ffn.c_fc.weight, ffn.c_proj.weight))
    Y, H_, Z = byhand.ffn_forward(x.detach().numpy(), A, B, byhand.gelu)
    dX, dA, dB = byhand.ffn_backward(dy.numpy(), x.detach().numpy(), A, B, H_, Z, byhand.gelu)
    for ours, hand in [(y.detach(), Y), (x.grad, dX), (ffn.c_fc.weight.grad.T, dA), (ffn.c_proj.weight.grad.T, dB)]:
        np.testing.assert_allclose(ours.numpy(), hand, rtol=0, atol=1e-12)


def test_parameters_have_hugging_face_names():
    assert [name for name, _ in FFN(H, F).named_parameters()] == [
        "c_fc.weight",
        "c_fc.bias",
        "c_proj.weight",
        "c_proj.bias",
    ]
    names = [name for name, _ in SwiGLU(H, F).named_parameters()]
    assert names == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


def test_equal_to_hugging_face_modules():
    pytest.importorskip("transformers")
    from transformers import GPT2Config, LlamaConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
    from transformers.models.llama.modeling_llama import LlamaMLP

    x = torch.randn(2, 3, H, dtype=torch.float64)
    theirs = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=F, num_attention_heads=1)).double()
    ours = SwiGLU(H, F, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)

    theirs = GPT2MLP(F, GPT2Config(n_embd=H, n_head=1)).double().eval()
    torch.nn.init.normal_(theirs.c_fc.bias)
    ours = FFN(H, F, dtype=torch.float64)
    transposed = {name: p.T if p.dim() == 2 else p for name, p in theirs.state_dict().items()}
    ours.load_state_dict(transposed)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu", "relu", "silu"])
def test_activations_by_name(name):
    reference = {
        "gelu_tanh": torch.nn.GELU("tanh"),
        "gelu": torch.nn.GELU(),
        "relu": torch.relu,
        "silu": torch.nn.SiLU(),
    }
    x = torch.linspace(-3, 3, 11, dtype=torch.float64)
    assert torch.equal(FFN(H, F, activation=name).activation(x), reference[name](x))


def test_an_activation_may_be_a_function():
    assert FFN(H, F, activation=torch.sigmoid).activation is torch.sigmoid


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="one of gelu_tanh, gelu, relu, silu, or a function, and is 'swish'"):
        FFN(H, F, activation="swish")
    with pytest.raises(TypeError, match="FFN width F must be an integer and is 12.0"):
        FFN(H, 12.0)
    with pytest.raises(ValueError, match="hidden h must be at least 1 and is 0"):
        SwiGLU(0, F)
