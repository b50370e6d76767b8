"""Chapter 5's worked integers tell the right FFN from the wrong ones that the page and its exercises list."""

import numpy as np
import pytest
from notebook_reading import cells_of, defined_by, source

from tpcode import byhand


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(5)


@pytest.fixture(scope="module")
def page(cells) -> dict:
    """The names that the cells of the worked example define."""
    return defined_by(cells, "first-product", "forward", "backward", "by-hand-equal")


def all_differ(right, *wrong):
    values = [np.asarray(value).tolist() for value in (right, *wrong)]
    return all(values.count(value) == 1 for value in values)


def test_the_ffn_is_that_of_chapter_1(page):
    names = defined_by(cells_of(1), "forward", "backward")
    for name in ("X", "A", "B", "dY", "Y", "dX"):
        assert np.array_equal(page[name], names[name]), name


def test_no_whole_matrix_is_square_and_no_piece_is_symmetric(page):
    assert all(len(set(page[name].shape)) == 2 for name in ("X", "A", "B", "dY", "H", "Z"))
    for pieces in ("A_of", "B_of", "H_of", "Z_of"):
        for piece in page[pieces]:
            assert not np.array_equal(piece, piece.T)


def test_each_wrong_output_is_another(page):
    Y, Y_of, Z_of, B_of = (page[name] for name in ("Y", "Y_of", "Z_of", "B_of"))
    sum_of_z = sum(Z_of)
    wrong = {
        "reduce (g) forgotten, rank 0": Y_of[0],
        "reduce (g) forgotten, rank 1": Y_of[1],
        "summed twice": 2 * Y,
        "Z_r summed, then B_0": sum_of_z @ B_of[0],
        "Z_r summed, then B_1": sum_of_z @ B_of[1],
        "Z_r summed, then a sum again": sum_of_z @ sum(B_of),
        "rows of B exchanged": Z_of[0] @ B_of[1] + Z_of[1] @ B_of[0],
        "no relu": page["X"] @ page["A"] @ page["B"],
    }
    assert all_differ(Y, *wrong.values())
    assert sum_of_z.shape != Y.shape  # the text: it has not even the shape of Y


def test_each_wrong_gradient_is_another(page):
    dX, dX_of, dY, X = (page[name] for name in ("dX", "dX_of", "dY", "X"))
    no_mask = [dZ_r @ A_r.T for dZ_r, A_r in zip(page["dZ_of"], page["A_of"], strict=True)]
    assert all_differ(dX, *dX_of, 2 * dX, sum(no_mask), *no_mask)
    for name in ("dA", "dB"):
        own = page[f"{name}_of"]
        assert all_differ(sum(own), *own, *(2 * part for part in own)), name
    assert (X @ page["A"] != 0).all()  # nowhere at relu's corner


def test_columns_then_rows_is_the_only_pairing_that_needs_no_word(page):
    """A rank's two columns of Z meet two rows of B: any other two rows give another sum."""
    Z_of, B = page["Z_of"], page["B"]
    sums = {
        rows: (Z_of[0] @ B[list(rows)] + Z_of[1] @ B[[row for row in range(4) if row not in rows]]).tolist()
        for rows in [(i, j) for i in range(4) for j in range(4) if i != j]
    }
    assert [rows for rows, value in sums.items() if value == page["Y"].tolist()] == [(0, 1)]


def test_the_numbers_of_gelu_refute_and_are_told_from_relu(cells):
    names = defined_by(cells, "gelu")
    first, second = names["first"], names["second"]
    apart, together = byhand.gelu(first) + byhand.gelu(second), byhand.gelu(first + second)
    assert round(apart) == 3 and -0.1 < together < 0  # the text: 3, and a little below 0
    assert byhand.relu(first) + byhand.relu(second) != byhand.relu(first + second)


def test_plain_chunks_and_shares_of_each_segment_differ_on_every_rank(cells, capsys):
    exec(source(cells["fused-columns"]), {"np": np})
    lines = capsys.readouterr().out.splitlines()
    plain, shares = ([line.split(": ")[1].split() for line in lines[start : start + 2]] for start in (1, 4))
    for rank in range(2):
        assert {name[:-1] for name in plain[rank]} == {("gate", "up")[rank]}
        gate, up = shares[rank][:2], shares[rank][2:]
        assert [name.replace("gate", "up") for name in gate] == up  # the same columns of both
    assert sorted(plain[0] + plain[1]) == sorted(shares[0] + shares[1])
