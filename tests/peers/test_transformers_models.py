"""Hugging Face's GPT-2 and Llama, small and random, float64, against this package's on ranks, through its own files:
logits, loss, every gradient; and the way back, our files read by Hugging Face.

Two of its computations are in float32 whatever they are given, and are no measure in float64: the softmax of its
"eager" attention, in whose place stands its "sdpa", and RMSNorm, in whose place this file puts torch's.
"""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tpcode.checkpoint import load, merge, save
from tpcode.runtime import launch

TOLERANCE = 1e-10
B, S, V = 2, 6, 11
CASES = {
    "gpt2, tied": ("GPT2", {}),
    "gpt2, untied": ("GPT2", {"tie_word_embeddings": False}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, untied, bias": ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
}


def theirs(name):
    transformers = pytest.importorskip("transformers")  # here, since ranks import this file
    family, options = CASES[name]
    if family == "GPT2":
        sizes = {"n_embd": 8, "n_head": 4, "n_layer": 2, "n_inner": 10, "n_positions": S}
        options = {**options, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    else:
        sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        sizes |= {"intermediate_size": 10, "max_position_embeddings": S, "rms_norm_eps": 1e-5}
        options = {**options, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=V, attn_implementation="sdpa", **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    for key, parameter in model.double().named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in key or ".ln_" in key), std=0.4)
    return in_float64(model)


def in_float64(model):
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(torch_rms_norm, module)
    return model


def torch_rms_norm(module, x):
    return nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def problem():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(V, (B, S), generator=generator), torch.randint(V, (B, S), generator=generator)


@functools.cache
def wanted(name, directory):
    """Logits, loss and every gradient of theirs, in torch's shapes; the model goes into files."""
    model = theirs(name)
    model.save_pretrained(directory, max_shard_size="4KB")
    ids, targets = problem()
    logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits.mT, targets)
    loss.backward()
    conv1d = {f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    gradients = {key: p.grad.T if key in conv1d else p.grad for key, p in model.named_parameters()}
    return logits.detach(), loss.item(), gradients


@pytest.fixture(scope="module")
def directories():
    with tempfile.TemporaryDirectory() as folder:
        yield {name: Path(folder) / name.replace(", ", "-") for name in CASES}


def ours(directory):
    """This rank's logits, the loss, and the whole gradients."""
    model = load(directory)
    ids, targets = problem()
    loss = model.loss(ids, targets)
    loss.backward()
    with torch.no_grad():
        logits = model(ids)
    for parameter in model.parameters():
        parameter.data = parameter.grad  # merged as the weights are
    return logits, loss.item(), {name: p.detach() for name, p in model.to_dense().named_parameters()}


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_every_gradient_are_hugging_faces(name, t, directories):
    """From files as it writes them, in several with an index. Not vacuous: every weight is random, biases and norms
    too, and every gradient is asked for."""
    logits, loss, gradients = wanted(name, directories[name])
    answers = launch(ours, t, directories[name])
    assert (torch.cat([share for share, _, _ in answers], -1)[..., :V] - logits).abs().max() < TOLERANCE
    for _, own_loss, own_gradients in answers:
        assert abs(own_loss - loss) < TOLERANCE
        assert own_gradients.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert gradient.abs().max() > 1e-6
            torch.testing.assert_close(own_gradients[key], gradient, rtol=0, atol=TOLERANCE)


def saved(source, directory):
    save(load(source), directory)


@pytest.mark.parametrize("name", CASES)
def test_hugging_face_reads_what_four_ranks_saved_and_one_merged(name, directories, tmp_path):
    logits, _, _ = wanted(name, directories[name])
    launch(saved, 4, directories[name], tmp_path / "shards")
    merge(tmp_path / "shards", tmp_path / "merged")
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, attn_implementation="sdpa", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        assert (in_float64(model)(problem()[0]).logits - logits).abs().max() < TOLERANCE
