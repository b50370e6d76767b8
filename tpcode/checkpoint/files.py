"""Hugging Face directories: config.json, and weights in safetensors files of which a slice can be read alone.

Nothing is believed before it is checked: all names and shapes are compared with what the config promises, from the
files' headers, before the first weight is read. Pickled weights are never read: loading them runs code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from re import search
from shutil import rmtree

import torch
from torch import Tensor

from tpcode.config import ModelConfig
from tpcode.dense import MODELS

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BUFFERS = r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$"  # constants that older files hold besides weights
_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or of something else; the message names the file and the tensor."""


class SafeFile:
    """One safetensors file: what its header says, and slices of its tensors.

    Raises:
        CheckpointError: it is missing or damaged.
        ModuleNotFoundError: the package that reads it is not installed.
    """

    def __init__(self, path: Path):
        _require_safetensors()
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            self._file = safe_open(path, framework="pt")
            self.metadata = self._file.metadata() or {}
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        self.path = path
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self._dtypes = {name: part.get_dtype() for name, part in slices.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor.

        Raises:
            CheckpointError: it is none that a model computes in.
        """
        if self._dtypes[name] not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} is {self._dtypes[name]}, and no float of {', '.join(_DTYPES)}")
        return _DTYPES[self._dtypes[name]]

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries start to stop along dim, and no others."""
        part = self._file.get_slice(name)
        return part[start:stop] if dim == 0 else part[:, start:stop]


class HuggingFaceFiles:
    """The dense parameters of a directory as Hugging Face writes it, in one file or several.

    Hugging Face's GPT-2 keeps the weights of its linear layers as [in, out]: they are turned here, in both directions.
    Files of the model without its head leave out the first word of each name; they are read as well.

    Attributes:
        config, bias: what config.json says.
        bytes_read: so far.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is missing, foreign, or not of the config's shape.
    """

    def __init__(self, directory: Path):
        self.config, self.bias = read_config(directory)
        self.directory, self.bytes_read = directory, 0
        stored = {name: file for file in self._files() for name in file.shapes}
        self.shapes = dense_shapes(self.config, self.bias)
        self._where = {name: self._find(name, stored) for name in self.shapes}
        used = {own for own, _ in self._where.values()}
        for name, file in stored.items():
            if name not in used and not search(_BUFFERS, name) and not self._repeats_the_embedding(name, file):
                raise CheckpointError(f"{file.path}: a {self.config.family} of this config has no tensor {name}")

    def dtype(self, name: str) -> torch.dtype:
        """Of a dense parameter."""
        own, file = self._where[name]
        return file.dtype(own)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries start to stop along dim of a dense parameter."""
        own, file = self._where[name]
        if not is_turned(name, self.config.family):
            found = file.read(own, dim, start, stop)
        else:
            found = file.read(own, 1 - dim, start, stop).T  # [in, out] -> [out, in]
        self.bytes_read += found.nbytes
        return found

    def _files(self) -> list[SafeFile]:
        index = self.directory / INDEX
        if index.is_file():
            weight_map = _json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index} has no weight_map")
            files = [SafeFile(self.directory / name) for name in sorted(set(weight_map.values()))]
            held = {name: file.path.name for file in files for name in file.shapes}
            for name, file in weight_map.items():
                if held.get(name) != file:
                    raise CheckpointError(f"{self.directory / file}: {name} is not in it, and {INDEX} says it is")
            return files
        if not (self.directory / SINGLE).is_file():
            pickled = sorted(path.name for path in self.directory.glob("*.bin"))
            instead = f"; {pickled[0]} is pickled, and loading a pickle runs code: convert it first" if pickled else ""
            raise CheckpointError(f"{self.directory} has neither {SINGLE} nor {INDEX}{instead}")
        return [SafeFile(self.directory / SINGLE)]

    def _find(self, name: str, stored: dict[str, SafeFile]) -> tuple[str, SafeFile]:
        """Under which name, in which file, a dense parameter lies."""
        own = name if name in stored else name.partition(".")[2]
        if own not in stored:
            raise CheckpointError(f"{self.directory}: no file has the tensor {name}")
        file, shape = stored[own], self.shapes[name]
        shape = shape[::-1] if is_turned(name, self.config.family) else shape
        if file.shapes[own] != shape:
            found, wanted = list(file.shapes[own]), list(shape)
            raise CheckpointError(f"{file.path}: {own} is {found}, and must be {wanted} by config.json")
        file.dtype(own)
        return own, file

    def _repeats_the_embedding(self, name: str, file: SafeFile) -> bool:
        """Whether this is the head of a tied model, written a second time; refused if it has come apart."""
        if name != "lm_head.weight" or not self.config.tied:
            return False
        table, where = self._where[MODELS[self.config.family].names["embedding"] + ".weight"]
        if file.shapes[name] != where.shapes[table] or not torch.equal(
            file.read(name, 0, 0, self.config.vocab), where.read(table, 0, 0, self.config.vocab)
        ):
            raise CheckpointError(
                f"{file.path}: {name} differs from {table}, and by config.json they are tied; set tie_word_embeddings "
                f"to false if they have been trained apart"
            )
        return True


def is_turned(name: str, family: str) -> bool:
    """Whether Hugging Face's file has this dense parameter the other way round."""
    return family == "gpt2" and name.endswith(_CONV1D)


def dense_shapes(config: ModelConfig, bias: bool) -> dict[str, tuple[int, ...]]:
    """Every dense parameter's shape by name."""
    dense = MODELS[config.family](config, bias=bias, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in dense.named_parameters()}


def write_huggingface(reader, directory: Path, max_file_bytes: int) -> None:
    """Every dense parameter that `reader` has, as Hugging Face's own: one file, or several with an index. One file's
    tensors are in memory at a time.

    Raises:
        CheckpointError: Hugging Face has no such model.
    """
    from safetensors.torch import save_file

    if reader.config.family == "gpt2" and not reader.bias:
        raise CheckpointError("Hugging Face's GPT-2 has biases everywhere, and this model has none")
    family, files = reader.config.family, _by_files(reader, max_file_bytes)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    for file, held in zip(names, files):
        tensors = {}
        for name in held:
            whole = reader.read(name, 0, 0, reader.shapes[name][0])
            tensors[name] = (whole.T if is_turned(name, family) else whole).contiguous()
        save_file(tensors, directory / file, {"format": "pt"})
    if len(files) > 1:
        total = sum(_nbytes(reader, name) for name in reader.shapes)
        weight_map = {name: file for file, held in zip(names, files) for name in held}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    first = next(iter(reader.shapes))
    write_config(reader.config, reader.bias, directory, reader.dtype(first))


def _by_files(reader, max_file_bytes: int) -> list[list[str]]:
    """Names in order, so many to a file that it is not larger than that, but one at least."""
    files, size = [[]], 0
    for name in reader.shapes:
        size += _nbytes(reader, name)
        if files[-1] and size > max_file_bytes:
            files.append([])
            size = _nbytes(reader, name)
        files[-1].append(name)
    return files


def _nbytes(reader, name: str) -> int:
    return torch.Size(reader.shapes[name]).numel() * reader.dtype(name).itemsize


# ---- config.json ----------------------------------------------------------------------------------------------------

_GPT2 = {
    "hidden": "n_embd",
    "heads": "n_head",
    "layers": "n_layer",
    "vocab": "vocab_size",
    "max_seq": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
_LLAMA = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "max_seq": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_FIXED = {  # options of which the models here have one value, and Hugging Face's default
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu",), "rope_scaling": (None,)},
}


def read_config(directory: Path) -> tuple[ModelConfig, bool]:
    """The sizes in a directory's config.json, and whether linear layers have a bias.

    Raises:
        CheckpointError: there is none, it is damaged, or of a model that is not built here; the message says which
            option has which value.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing" if directory.is_dir() else f"{directory} is no directory")
    stored = _json(path)
    family = stored.get("model_type")
    if family not in _FIXED:
        raise CheckpointError(f"{path}: model_type is {family!r}, and {', '.join(_FIXED)} are supported")
    for option, values in _FIXED[family].items():
        if (value := stored.get(option, values[0])) not in values:
            raise CheckpointError(f"{path}: {option} is {value!r}, and only {values[0]!r} is supported")
    try:
        sizes, bias = (_gpt2_sizes if family == "gpt2" else _llama_sizes)(stored)
        return ModelConfig(family=family, **sizes), bias
    except KeyError as error:
        raise CheckpointError(f"{path} does not say {error.args[0]}") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _gpt2_sizes(stored: dict) -> tuple[dict, bool]:
    dropouts = {option: stored.get(option, 0.1) for option in _DROPOUTS}
    if len(set(dropouts.values())) > 1:
        raise ValueError(f"dropout must be one number everywhere, and is {dropouts}")
    sizes = {ours: stored[theirs] for ours, theirs in _GPT2.items()}
    sizes["ffn"] = stored.get("n_inner") or 4 * sizes["hidden"]
    sizes |= {"dropout": dropouts["attn_pdrop"], "tied": stored.get("tie_word_embeddings", True)}
    return sizes, stored.get("bias", True)  # Hugging Face's has no such option, and always a bias


def _llama_sizes(stored: dict) -> tuple[dict, bool]:
    biases = {option: stored.get(option, False) for option in ("attention_bias", "mlp_bias")}
    if len(set(biases.values())) > 1:
        raise ValueError(f"all linear layers have a bias or none has, and here {biases}")
    rope = stored.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type is {rope['rope_type']!r}, and only 'default' is supported")
    sizes = {ours: stored[theirs] for ours, theirs in _LLAMA.items()}
    optional = {
        "kv_heads": stored.get("num_key_value_heads"),
        "head_dim": stored.get("head_dim"),
        "rope_theta": float(rope.get("rope_theta", stored.get("rope_theta", 10_000.0))),
        "dropout": stored.get("attention_dropout", 0.0),
        "tied": stored.get("tie_word_embeddings", False),
    }
    return {**sizes, **optional}, biases["mlp_bias"]


def write_config(config: ModelConfig, bias: bool, directory: Path, dtype: torch.dtype) -> None:
    """config.json, as Hugging Face has it; for a GPT-2 without biases, which it has not, with one option more."""
    stored = {"model_type": config.family, "tie_word_embeddings": config.tied, "dtype": str(dtype).split(".")[1]}
    if config.family == "gpt2":
        stored |= {} if bias else {"bias": False}
        stored |= {theirs: getattr(config, ours) for ours, theirs in _GPT2.items()}
        stored |= dict.fromkeys(_DROPOUTS, config.dropout)
        stored |= {"architectures": ["GPT2LMHeadModel"], "n_inner": config.ffn, "activation_function": "gelu_new"}
    else:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        stored |= {theirs: getattr(config, ours) for ours, theirs in _LLAMA.items()}
        stored |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "hidden_act": "silu"}
        stored |= {"architectures": ["LlamaForCausalLM"], "attention_bias": bias, "mlp_bias": bias}
        stored |= {"attention_dropout": config.dropout, "rope_theta": config.rope_theta, "rope_parameters": rope}
    _write_json(directory / "config.json", stored)


# ---- writing, or not at all -----------------------------------------------------------------------------------------


def partial_name(target: Path) -> Path:
    """Where a directory is written before it has its name."""
    return target.with_name(f".{target.name}.partial")


def begin_directory(target: Path) -> Path:
    """An empty directory beside the target, under another name. What a run left there that was killed is removed.

    Raises:
        FileExistsError: the target exists.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it, or choose another name")
    partial = partial_name(target)
    rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to write into, which gets its name when all is written, and is removed if anything fails."""
    partial = begin_directory(target)
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        rmtree(partial, ignore_errors=True)
        raise


def copy_companions(source: Path, target: Path, names: Sequence[str] = COMPANIONS) -> None:
    """The tokenizer's files, where there are any."""
    for name in names:
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())


def _json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object")
    return content


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _require_safetensors() -> None:
    if find_spec("safetensors") is None:
        raise ModuleNotFoundError("checkpoints need the package safetensors: pip install 'tpcode[hf]'")
