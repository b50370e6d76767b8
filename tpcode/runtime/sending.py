"""How functions and results travel between processes: cloudpickle, keeping the name of the file that code came from."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import ChainMap

import cloudpickle

loads = pickle.loads


def dumps(value) -> bytes:
    """Bytes from which another process makes the same value; functions and classes of `__main__` travel by value."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code_with_file(code: types.CodeType):
    """As cloudpickle, which renames the file to <dynamic-code>: tracebacks are to point into the learner's cell."""
    make, arguments = _reduce_code(code)
    return _make_code, (make, arguments, code.co_filename)


def _make_code(make, arguments, file: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


def _reduce_async(tensor):
    """A functional collective hands out its tensor before the result is there: wait for it first."""
    return _same, (tensor.wait(),)


def _same(value):
    return value


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({types.CodeType: _reduce_code_with_file}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file):
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None:
            self.dispatch_table = self.dispatch_table.new_child({functional.AsyncCollectiveTensor: _reduce_async})
        super().__init__(file)  # which reads the table
