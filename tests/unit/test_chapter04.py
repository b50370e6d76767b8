"""Chapter 4's worked integers tell the right parts and gradients from the wrong ones that its exercises list."""

import numpy as np
import pytest
from notebook_reading import cells_of, defined_by


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the cells of the worked example define."""
    return defined_by(cells_of(4), "product", "backward")


def rows(*matrices):
    return [np.asarray(matrix).tolist() for matrix in matrices]


def test_each_wrong_output_is_another(page):
    Z_of, B_of = page["Z_of"], page["B_of"]
    parts = [Z_r @ B_r for Z_r, B_r in zip(Z_of, B_of, strict=True)]
    transposed = [Z_r @ B_r.T for Z_r, B_r in zip(Z_of, B_of, strict=True)]
    crossed = [Z_of[0] @ B_of[1], Z_of[1] @ B_of[0]]
    right = [*parts, sum(parts)]
    assert np.array_equal(right[2], page["Z"] @ page["B"])
    values = rows(*right, *transposed, sum(transposed), *crossed, right[2] / 2, *Z_of)
    assert all(values.count(value) == 1 for value in values[:3])


def test_each_wrong_gradient_is_another(page):
    dZ, dB, dY = page["dZ_of"], page["dB_of"], page["dY"]
    values = rows(*dZ, sum(dZ), *(2 * part for part in dZ), *(dY @ B_r for B_r in page["B_of"]), dY)
    assert all(values.count(value) == 1 for value in values[:2])
    values = rows(*dB, sum(dB), *(2 * part for part in dB), *(part.T for part in dB))
    assert all(values.count(value) == 1 for value in values[:2])


def test_the_bias_shows_how_often_it_was_added(page):
    dense = page["Z"] @ page["B"]
    bias = np.array([10, 20])
    values = rows(*(dense + times * bias for times in (0, 0.25, 0.5, 1, 2, 4)))
    assert all(values.count(value) == 1 for value in values)
