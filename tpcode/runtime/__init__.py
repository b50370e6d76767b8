"""Where ranks come from: `launch`, `RankPool`, and the errors that say what went wrong on which rank."""

from tpcode.runtime.env import init_from_env
from tpcode.runtime.errors import CollectiveMismatch, RankError, RankTimeout
from tpcode.runtime.pool import RankPool, launch

__all__ = ["CollectiveMismatch", "RankError", "RankPool", "RankTimeout", "init_from_env", "launch"]
