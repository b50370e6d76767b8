"""Matrices cut and multiplied: the numbers in the tiles, computed here a second time, and what is refused."""

import re
from itertools import chain

import numpy as np
import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode.figures.marks import number
from tpcode.figures.matrices import cut, multiply, pieces, product

X = np.array([[1, 2], [3, -1]])
A = np.array([[1, 1, 3, 0], [0, 1, 1, 1]])
B = np.array([[1, 0], [2, 1], [0, 1], [1, 3]])

PICTURES = {
    "columns": lambda: cut(A, 2, 1),
    "rows": lambda: cut(B, 4, 0, "B"),
    "index pairs": lambda: cut(A, 2, 1, indices=True),
    "column product": lambda: product(X, A, 1, 4),
    "row product of 4": lambda: product(A, B, 0, 4, ("dY", "Aᵀ", "dX")),
    "narrow product": lambda: product([[1, 2, 3, 4]], [[1], [2], [3], [4]], 0, 4),
    "row product": lambda: product(A, B, 0, 2, ("Y", "B", "Z")),
}


def shown(matrix) -> list[str]:
    return [number(value) for value in np.asarray(matrix).flat]


def times(left, right) -> list[list[int]]:
    """A matrix product, by the definition."""
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*right)] for row in left]


# ---- the SVG --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_nothing_of_this_machine(make):
    require_steady(make)


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_texts_lie_inside_and_apart(make):
    assert badly_placed(make()) == []


# ---- the cut --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [2, 4])
def test_parts_by_columns_are_columns_and_by_rows_rows(t):
    columns, rows = pieces(A, t, 1), pieces(B, t, 0)
    for r in range(t):
        size = 4 // t
        assert columns[r].tolist() == [row[r * size : (r + 1) * size] for row in A.tolist()]
        assert rows[r].tolist() == B.tolist()[r * size : (r + 1) * size]


def test_a_cut_shows_the_whole_and_each_rank_its_part():
    texts = drawn(cut(A, 2, 1))
    assert texts[0] == "A  [2, 4]"
    values = [text for text in texts if re.fullmatch(r"−?\d+", text)]
    assert values == shown(A) + shown(A[:, :2]) + shown(A[:, 2:])
    assert [text for text in texts if text in ("rank 0", "A₀", "rank 1", "A₁")] == ["rank 0", "A₀", "rank 1", "A₁"]


def test_a_cut_by_rows_shows_rows():
    values = [text for text in drawn(cut(B, 2, 0, "B")) if re.fullmatch(r"\d+", text)]
    assert values == shown(B) + shown(B[:2]) + shown(B[2:])


def test_index_pairs_are_those_of_the_whole_matrix():
    pairs = [text for text in drawn(cut(A, 2, 1, indices=True)) if re.fullmatch(r"\d, \d", text)]
    assert pairs[8:12] == ["0, 0", "0, 1", "1, 0", "1, 1"]
    assert pairs[12:] == ["0, 2", "0, 3", "1, 2", "1, 3"]


# ---- the product ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [2, 4])
def test_column_products_side_by_side_are_the_product(t):
    made = multiply(X, A, 1, t)
    rows = [list(chain.from_iterable(parts)) for parts in zip(*(out.tolist() for out in made.out))]
    assert rows == times(X.tolist(), A.tolist()) == made.whole.tolist()
    assert all(np.array_equal(left, X) for left in made.left)
    assert made.kinds == ("replicated", "sharded", "sharded")


@pytest.mark.parametrize("t", [2, 4])
def test_row_products_add_up_to_the_product(t):
    made = multiply(A, B, 0, t)
    assert sum(made.out).tolist() == times(A.tolist(), B.tolist()) == made.whole.tolist()
    assert not any(out.tolist() == made.whole.tolist() for out in made.out)  # a part is not the sum
    assert made.kinds == ("sharded", "sharded", "partial")


def test_a_product_shows_what_each_rank_computes():
    texts = drawn(product([[1, 2]], A))
    values = [text for text in texts if re.fullmatch(r"\d+", text)]
    assert values == ["1", "2", "1", "1", "0", "1", "1", "3"] + ["1", "2", "3", "0", "1", "1", "5", "2"] + list("1352")
    assert texts[:3] == ["replicated", "sharded", "sharded"]
    assert "side by side the results are Y; nothing is sent" in texts
    assert "#d1242f" not in product([[1, 2]], A).svg  # no collective


def test_the_backward_of_a_column_split_is_the_row_product():
    picture = product([[3, 2, 1, 3]], A.T, 0, 2, ("dY", "Aᵀ", "dX"))
    texts = drawn(picture)
    assert texts[:3] == ["sharded", "sharded", "partial"]
    values = [text for text in texts if re.fullmatch(r"\d+", text)]
    assert values[6:8] == ["5", "2"] and values[14:16] == ["3", "4"] and values[16:] == ["8", "6"]
    assert "all-reduce: dX₀ + dX₁" in texts and texts.count("+") == 1
    assert "#d1242f" in picture.svg


def test_the_words_have_the_numbers():
    alt = product([[3, 2, 1, 3]], A.T, 0, 2, ("dY", "Aᵀ", "dX")).alt
    assert "Rank 0: [[3, 2]] times A₀ᵀ = [[1, 0], [1, 1]] is [[5, 2]]." in alt
    assert "every rank has [[8, 6]]" in alt
    assert "rank 1 holds A₁ = [[3, 0], [1, 1]]" in cut(A).alt


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cut(A, 3, 1), "columns = 4 does not divide by t = 3"),
        (lambda: cut(A, 5, 1), "2 to 4 ranks, and there are 5"),
        (lambda: cut(A, 2, 2), "dim must be 0 .* and is 2"),
        (lambda: cut([1, 2]), r"A must be a matrix .* shape is \[2\]"),
        (lambda: cut([[100000, 1]]), "room for 5 characters, and '100000' has 6"),
        (lambda: cut(np.ones((2, 12), int)), r"A \[2, 12\], cut by columns, would be 382 points wide, and 344 fit"),
        (lambda: cut(np.ones((2, 6), int), 2, 0), r"A \[2, 6\], cut by rows, would be 470 points wide"),
        (lambda: product(X, B), r"X \[2, 2\] has 2 columns and A \[4, 2\] has 4 rows"),
        (lambda: product([[1]], np.ones((1, 12), int), 1, 4), r"Y \[1, 12\] would be 360 points wide"),
        (lambda: product(np.ones((1, 6), int), np.ones((6, 8), int)), "X · A over 2 ranks would be 508 points wide"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_words_are_no_numbers():
    with pytest.raises(TypeError, match="A must hold numbers"):
        cut([["a", "b"]])
