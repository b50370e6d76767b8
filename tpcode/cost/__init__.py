"""What splitting a model costs, worked out on paper: memory, arithmetic, communication, time. No torch here.

Every name carries its unit: `_bytes`, `_seconds`, `_flops`; a count of numbers is `_elements`. Bytes are payload (the
tensor) or wire (what one rank sends), and the name says which. Sizes come as `ModelConfig` and `Layout`.
"""

from importlib import import_module

_MODULES = (
    "communication",
    "fit",
    "flops",
    "hardware",
    "layout",
    "memory",
    "published",
    "step_time",
    "workload",
)

__all__ = list(_MODULES)


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"tpcode.cost.{name}")
    raise AttributeError(f"module 'tpcode.cost' has no attribute {name!r}; it has {', '.join(_MODULES)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
