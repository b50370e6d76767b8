"""Small matrices, cut over ranks and multiplied: `cut` shows the cut, `product` what each rank makes of its pieces.

Every number in a tile is computed here, by NumPy and the lists of `tpcode.byhand`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from numpy import ndarray

from tpcode import byhand
from tpcode.figures.marks import MARGIN, SMALL, WIDTH, arrow, line, number, of_rank, outline, require_ranks, say
from tpcode.figures.style import INK, RED, Picture, canvas, render, tile

_CUTS = {0: (byhand.split_rows, "rows"), 1: (byhand.split_columns, "columns")}
_MOST_RANKS = 4
_CELL, _HIGH, _SIGN, _NAME = 30.0, 22.0, 22.0, 15.0  # a cell's width and height; room for a sign, for a name
_TOP, _RANK = 12.0, 44.0  # room for the placements' names, for a rank's


@dataclass(frozen=True)
class Product:
    """One product cut over ranks. Lists are `[rank 0's, rank 1's, …]`.

    Attributes:
        left, right, out: what each rank holds; `kinds` are their placements.
        whole: the product on one device, which the pieces of `out` make up: side by side, or added.
    """

    left: list[ndarray]
    right: list[ndarray]
    out: list[ndarray]
    whole: ndarray
    kinds: tuple[str, str, str]


def pieces(matrix, t: int, dim: int, name: str = "A") -> list[ndarray]:
    """The matrix cut over t ranks: by columns (dim=1), or by rows (dim=0).

    Raises:
        ValueError: it is no matrix, it has no such dimension, or t does not divide it.
    """
    matrix = _matrix(matrix, name)
    return _way(dim)[0](matrix, t)


def multiply(left, right, dim: int, t: int = 2, names: tuple[str, str, str] = ("X", "A", "Y")) -> Product:
    """left · right with right cut by columns (dim=1), or by rows (dim=0) and left by columns to match.

    Raises:
        ValueError: the inner sizes differ, or t does not divide what is cut.
    """
    left, right = _matrix(left, names[0]), _matrix(right, names[1])
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"{names[0]} {list(left.shape)} has {left.shape[1]} columns and {names[1]} {list(right.shape)} has "
            f"{right.shape[0]} rows: a product needs as many"
        )
    rights = pieces(right, t, dim, names[1])
    if dim == 1:
        lefts, kinds = byhand.replicate(left, t), ("replicated", "sharded", "sharded")
    else:
        lefts, kinds = pieces(left, t, 1, names[0]), ("sharded", "sharded", "partial")
    return Product(lefts, rights, byhand.column_forward(lefts, rights), left @ right, kinds)


def cut(matrix, t: int = 2, dim: int = 1, name: str = "A", *, indices: bool = False) -> Picture:
    """A matrix whole, and cut over t ranks: by columns (dim=1) or by rows (dim=0).

    Args:
        indices: show in each tile its (row, column) in the whole matrix, in place of its value.

    Raises:
        ValueError: t does not divide what is cut, or the picture would be wider than a phone.
    """
    matrix = _matrix(matrix, name)
    parts = pieces(matrix, require_ranks(t, _MOST_RANKS), dim, name)
    labels = _index_pairs(matrix) if indices else _values(matrix)
    draw = _draw_columns if dim else _draw_rows
    with canvas(WIDTH, _cut_height(matrix, t, dim)) as (figure, axes):
        draw(axes, name, labels, t)
        return render(figure, "cut", _cut_in_words(name, matrix, parts, dim))


def product(left, right, dim: int = 1, t: int = 2, names: tuple[str, str, str] = ("X", "A", "Y")) -> Picture:
    """What each of t ranks multiplies, and what becomes of the results.

    dim=1 cuts `right` by columns: results stand side by side. dim=0 cuts it by rows, and `left` by columns: results
    are parts, which an all-reduce adds. So the backward of a column split is `product(dY, A.T, 0, t, ("dY", "Aᵀ",
    "dX"))`.

    Raises:
        ValueError: sizes that do not fit, that t does not divide, or that are wider than a phone.
    """
    made = multiply(left, right, dim, require_ranks(t, _MOST_RANKS), names)
    widths = [matrix[0].shape[1] * _CELL for matrix in (made.left, made.right, made.out)]
    width = _fit(_RANK + sum(widths) + 2 * _SIGN, f"{names[0]} · {names[1]} over {t} ranks")
    _fit(made.whole.shape[1] * _CELL, f"{names[2]} {_shape(made.whole)}")
    start = (WIDTH - width) / 2 + _RANK
    lefts = [start, start + widths[0] + _SIGN, start + widths[0] + widths[1] + 2 * _SIGN]
    lane = max(made.left[0].shape[0], made.right[0].shape[0]) * _HIGH + _NAME + 16
    foot = made.whole.shape[0] * _HIGH + _NAME + 54
    with canvas(WIDTH, _TOP + t * lane + foot) as (figure, axes):
        for x, wide, kind in zip(lefts, widths, made.kinds):
            say(axes, x + wide / 2, 10, kind, ha="center", size=SMALL)
        for rank in range(t):
            middle = _TOP + rank * lane + (lane + _NAME) / 2
            say(axes, start - _RANK, middle, f"rank {rank}", weight="bold")
            _draw_lane(axes, lefts, middle, made, rank, names)
        draw = _draw_sum if made.kinds[2] == "partial" else _draw_side_by_side
        draw(axes, made, names[2], lefts[2] + widths[2] / 2, lane)
        return render(figure, "product", _product_in_words(made, names, dim))


# ---- words ----------------------------------------------------------------------------------------------------------


def _written(matrix: ndarray) -> str:
    return "[" + ", ".join("[" + ", ".join(map(number, row)) + "]" for row in matrix) + "]"


def _cut_in_words(name: str, matrix: ndarray, parts: list[ndarray], dim: int) -> str:
    held = "; ".join(f"rank {rank} holds {of_rank(name, rank)} = {_written(part)}" for rank, part in enumerate(parts))
    return f"The matrix {name} = {_written(matrix)}, cut by {_way(dim)[1]} over {len(parts)} ranks: {held}."


def _product_in_words(made: Product, names: tuple[str, str, str], dim: int) -> str:
    left, right, out = names
    given = f"{left} = {_written(made.left[0])} on every rank" if dim else f"{left} cut by columns to match"
    sentences = [f"{left} · {right} over {len(made.out)} ranks, {right} cut by {_way(dim)[1]}, {given}."]
    for rank, (x, a, y) in enumerate(zip(made.left, made.right, made.out)):
        sentences.append(f"Rank {rank}: {_written(x)} times {of_rank(right, rank)} = {_written(a)} is {_written(y)}.")
    if dim:
        sentences.append(f"Side by side the results are {out} = {_written(made.whole)}; nothing is sent.")
    else:
        sentences.append(f"Each result is a part; an all-reduce adds them, and every rank has {_written(made.whole)}.")
    return " ".join(sentences)


# ---- drawing, in points ---------------------------------------------------------------------------------------------


def _cut_height(matrix: ndarray, t: int, dim: int) -> float:
    high = matrix.shape[0] * _HIGH
    return 2 * high + 3 * _NAME + 38 if dim else high + (2 * t - 1) * _NAME + 16


def _draw_columns(axes: Axes, name: str, labels: ndarray, t: int) -> None:
    """The whole above, its columns pulled apart below."""
    wide, high = labels.shape[1] * _CELL, labels.shape[0] * _HIGH
    width = _fit(wide + (t - 1) * _SIGN, f"{name} {_shape(labels)}, cut by columns,")
    _draw_whole(axes, (WIDTH - wide) / 2, 8 + _NAME, name, labels, t, 1)
    x, y = (WIDTH - width) / 2, high + 3 * _NAME + 28
    for rank, part in enumerate(np.split(labels, t, axis=1)):
        across = part.shape[1] * _CELL
        say(axes, x + across / 2, y - _NAME - 8, f"rank {rank}", ha="center", size=SMALL)
        _block(axes, x, y, of_rank(name, rank), "sharded", part)
        x += across + _SIGN


def _draw_rows(axes: Axes, name: str, labels: ndarray, t: int) -> None:
    """The whole at the left, its rows pulled apart at the right."""
    wide = labels.shape[1] * _CELL
    width = _fit(2 * wide + 5 * _SIGN, f"{name} {_shape(labels)}, cut by rows,")
    x, y = (WIDTH - width) / 2, 8 + _NAME
    _draw_whole(axes, x, y, name, labels, t, 0)
    x += wide + 2 * _SIGN
    for rank, part in enumerate(np.split(labels, t, axis=0)):
        _block(axes, x, y, of_rank(name, rank), "sharded", part)
        say(axes, x + wide + 10, y + part.shape[0] * _HIGH / 2, f"rank {rank}", size=SMALL)
        y += part.shape[0] * _HIGH + 2 * _NAME


def _draw_whole(axes: Axes, x: float, y: float, name: str, labels: ndarray, t: int, dim: int) -> None:
    """A matrix that no rank holds: outlines, with a line where it is cut."""
    say(axes, x, y - 9, f"{name}  {_shape(labels)}")
    _block(axes, x, y, "", "", labels)
    high, wide = labels.shape[0] * _HIGH, labels.shape[1] * _CELL
    for rank in range(1, t):
        if dim:
            at = x + wide * rank / t - 0.5
            line(axes, (at, y - 4), (at, y + high + 3), INK, 1.8)
        else:
            at = y + high * rank / t - 0.5
            line(axes, (x - 5, at), (x + wide + 4, at), INK, 1.8)


def _block(axes: Axes, x: float, y: float, name: str, kind: str, labels: ndarray) -> None:
    """A matrix whose upper left corner is (x, y), its name above it: a tile an entry, or outlines where no kind is."""
    say(axes, x + labels.shape[1] * _CELL / 2, y - 8, name, ha="center")
    for (i, j), label in np.ndenumerate(labels):
        corner = x + j * _CELL, y + i * _HIGH
        if kind:
            tile(axes, *corner, _CELL - 1, _HIGH - 1, kind, label)
        else:
            outline(axes, *corner, _CELL - 1, _HIGH - 1, label)


def _draw_lane(
    axes: Axes, lefts: list[float], middle: float, made: Product, rank: int, names: tuple[str, str, str]
) -> None:
    """rank's left × right = out, each from its left edge on and around the height `middle`."""
    held = (made.left[rank], made.right[rank], made.out[rank])
    for x, name, kind, matrix, sign in zip(lefts, names, made.kinds, held, ("", "×", "=")):
        shown = name if kind == "replicated" else of_rank(name, rank)
        _block(axes, x, middle - matrix.shape[0] * _HIGH / 2, shown, kind, _values(matrix))
        say(axes, x - _SIGN / 2 - 0.5, middle, sign, ha="center", size=11)


def _draw_sum(axes: Axes, made: Product, name: str, x: float, lane: float) -> None:
    """A "+" between the parts, and the sum below them, which every rank gets."""
    t = len(made.out)
    for rank in range(1, t):
        say(axes, x, _TOP + rank * lane + 2, "+", ha="center", size=12, color=RED, weight="bold")
    parts = " + ".join(of_rank(name, rank) for rank in range(t))
    top = _TOP + t * lane
    arrow(axes, (x, top + 4), (x, top + 28))
    say(axes, x - 10, top + 16, f"all-reduce: {parts}", ha="right")
    y = top + 32 + _NAME
    wide, high = made.whole.shape[1] * _CELL, made.whole.shape[0] * _HIGH
    _block(axes, x - wide / 2, y, name, "replicated", _values(made.whole))
    say(axes, x - wide / 2 - 10, y + high / 2, "replicated: the same on every rank", ha="right")


def _draw_side_by_side(axes: Axes, made: Product, name: str, _x: float, lane: float) -> None:
    """The whole result in outline, with its cuts: no rank has it, and none needs it."""
    labels, top = _values(made.whole), _TOP + len(made.out) * lane
    say(axes, WIDTH / 2, top + 12, f"side by side the results are {name}; nothing is sent", ha="center")
    x = (WIDTH - labels.shape[1] * _CELL) / 2
    _draw_whole(axes, x, top + 26 + _NAME, name, labels, len(made.out), 1)


# ---- arrays ---------------------------------------------------------------------------------------------------------


def _way(dim: int) -> tuple[Callable[[ndarray, int], list[ndarray]], str]:
    """How to cut along dim, and what that is called."""
    if dim not in _CUTS:
        raise ValueError(f"dim must be 0 (cut by rows) or 1 (cut by columns) and is {dim!r}")
    return _CUTS[dim]


def _matrix(values, name: str) -> ndarray:
    matrix = np.asarray(values)
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(f"{name} must be a matrix [rows, columns] with entries, and its shape is {list(matrix.shape)}")
    if matrix.dtype.kind not in "iuf":
        raise TypeError(f"{name} must hold numbers and holds {matrix.dtype}")
    return matrix


def _labels(matrix: ndarray, entries: Iterable[str]) -> ndarray:
    labels = np.array(list(entries), dtype=object).reshape(matrix.shape)
    longest = max(labels.flat, key=len)
    if len(longest) > 5:
        raise ValueError(f"a tile has room for 5 characters, and {longest!r} has {len(longest)}: take smaller numbers")
    return labels


def _values(matrix: ndarray) -> ndarray:
    return _labels(matrix, map(number, matrix.flat))


def _index_pairs(matrix: ndarray) -> ndarray:
    return _labels(matrix, (f"{i}, {j}" for i, j in np.ndindex(matrix.shape)))


def _shape(matrix: ndarray) -> str:
    return str(list(matrix.shape))


def _fit(width: float, what: str) -> float:
    """width, if it fits a phone."""
    most = WIDTH - 2 * MARGIN
    if width > most:
        raise ValueError(
            f"{what} would be {width:g} points wide, and {most:g} fit: columns are {_CELL:g} each, take fewer"
        )
    return width
