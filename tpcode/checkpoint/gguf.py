"""The header of a GGUF file: its metadata, and where each tensor's bytes lie, so that a rank reads those that it keeps.

(The package `gguf` reads the header in seconds, which every rank would wait for; the few lines here take a tenth of
one.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Stored:
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
class Header:
    """Metadata by name, and tensors by name."""

    metadata: dict
    tensors: dict[str, Stored]


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


def read_header(path: Path) -> Header:
    """What the file says before its tensors' bytes.

    Raises:
        ValueError: it is no GGUF file.
    """
    from gguf.constants import GGML_QUANT_SIZES

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
        name: Stored(path, shape, kind, begin + offset, *GGML_QUANT_SIZES[kind]) for name, shape, kind, offset in table
    }
    return Header(metadata, tensors)
