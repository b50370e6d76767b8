"""Reading a learner's answer: what is still a stub, what number a thing is, what a function calls."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable


def blanks(answer) -> str:
    """The stub that `answer` still is or holds: "None", "..." or "" if it is filled in. Looks into lists and dicts."""
    if answer is None:
        return "None"
    if answer is Ellipsis:
        return "..."
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, (list, tuple)):
        return next(filter(None, map(blanks, answer)), "")
    return ""


def stub_in(function: Callable) -> str:
    """The stub that still stands in the source of `function`: "None", "...", "NotImplementedError", or "".

    Looked for: a name set to None or `...`, a returned `...`, a bare `...`, a raised NotImplementedError. "" also where
    Python does not know the source.
    """
    for node in ast.walk(_tree(function)):
        match node:
            case ast.Assign(value=ast.Constant(value=None)):
                return "None"
            # alone on its line, given a name, or returned; x[..., 0] is no stub
            case ast.Expr(value=ast.Constant(value=value)) if value is Ellipsis:
                return "..."
            case ast.Assign(value=ast.Constant(value=value)) | ast.Return(value=ast.Constant(value=value)) if (
                value is Ellipsis
            ):
                return "..."
            case ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))):
                return "NotImplementedError"
    return ""


def calls_in(function: Callable) -> set[str]:
    """What `function` calls, as written: {"all_reduce", "dist.all_reduce"}. Empty if the source is unknown."""
    return {ast.unparse(node.func) for node in ast.walk(_tree(function)) if isinstance(node, ast.Call)}


def returns_nothing(function: Callable) -> bool:
    """Whether the source of `function` is known and has no `return` with a value."""
    tree = _tree(function)
    returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return | ast.Lambda)]
    return bool(tree.body) and not any(isinstance(node, ast.Lambda) or node.value is not None for node in returns)


def _tree(function: Callable) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # defined where no source is kept, or not by def
        return ast.Module(body=[], type_ignores=[])
