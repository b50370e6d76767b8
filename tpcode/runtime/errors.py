"""What `launch` raises when ranks fail: one exception that names the rank and says what to do."""

from __future__ import annotations

import re


class RankError(RuntimeError):
    """A rank raised, exited or was killed. The other ranks have been stopped.

    Attributes:
        rank: the first rank to fail.
        traceback: that rank's own traceback as text; empty where the process died without one.
        exception: the exception itself where it could be sent back, else None.
    """

    def __init__(self, message: str, rank: int, traceback: str = "", exception: BaseException | None = None):
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.exception = exception

    def __str__(self) -> str:
        return f"{self.args[0]}\n\n{self.traceback.rstrip()}" if self.traceback else str(self.args[0])

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows: the message and the rank's own traceback, not how it came here."""
        return [f"{type(self).__name__}: {_with_cell_numbers(str(self))}"]

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.traceback, self.exception)


def _with_cell_numbers(text: str) -> str:
    """The text with the files that Jupyter keeps a notebook's cells in named as it names them: Cell In[3]."""
    from IPython import get_ipython

    compiler = get_ipython().compile

    def name(found: re.Match) -> str:
        known = compiler.format_code_name(found[1])
        return f"{known[0]} {known[1]}" if known else found[0]

    return re.sub(r'(?:File )?"?(\S*ipykernel_\d+\S*?\.py)"?', name, text)


class CollectiveMismatch(RankError):
    """Ranks of one group made different collective calls, or not the same number of them."""


class RankTimeout(RankError):
    """A rank waited in a collective for too long, ran on after another had returned, or passed the job's limit."""
