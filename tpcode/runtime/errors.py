"""What `launch` raises when ranks fail: one exception that names the rank and says what to do."""

from __future__ import annotations


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

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.traceback, self.exception)


class CollectiveMismatch(RankError):
    """Ranks of one group made different collective calls, or not the same number of them."""


class RankTimeout(RankError):
    """A rank waited in a collective for too long, ran on after another had returned, or passed the job's limit."""
