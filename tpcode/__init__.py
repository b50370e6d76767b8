"""Tensor parallelism you can read: the package behind the book.

The public names are handed on lazily, so that `import tpcode.cost` loads no torch and `tpcode --help` answers at once.
"""

from importlib import import_module

_HOMES = {
    "ModelConfig": "tpcode.config",
    "Layout": "tpcode.config",
    "ParallelTransformer": "tpcode.model",
    "launch": "tpcode.runtime",
    "RankPool": "tpcode.runtime",
    "init_from_env": "tpcode.runtime",
    "RankError": "tpcode.runtime",
    "RankTimeout": "tpcode.runtime",
    "CollectiveMismatch": "tpcode.runtime",
    "record": "tpcode.comm",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tpcode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
