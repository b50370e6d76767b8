"""Chapter 3's worked integers tell the right gradients from the wrong ones that its exercises list."""

import numpy as np
import pytest
from notebook_reading import cells_of, defined_by


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the cells of the worked example define."""
    return defined_by(cells_of(3), "product", "backward", "weights")


def rows(*matrices):
    return [np.asarray(matrix).tolist() for matrix in matrices]


def test_each_wrong_output_is_another(page):
    X, halves = page["X"], page["A_of"]
    right = [X @ A_r for A_r in halves]
    transposed = [X @ A_r.T for A_r in halves]
    every_other = [X @ page["A"][:, rank::2] for rank in range(2)]
    values = rows(*right, *transposed, sum(right), *every_other)
    assert all(values.count(value) == 1 for value in values[:2])


def test_each_wrong_gradient_is_another(page):
    parts, dX = page["dX_of"], sum(page["dX_of"])
    transposed = [dY_r @ A_r for dY_r, A_r in zip(page["dY_of"], page["A_of"], strict=True)]
    values = rows(*parts, dX, *transposed, sum(transposed), dX / 2, 2 * dX, page["X"])
    assert all(values.count(value) == 1 for value in values[:3])
    dA = page["dA_of"]
    values = rows(*dA, sum(dA), *(part.T for part in dA), sum(dA) / 2)
    assert all(values.count(value) == 1 for value in values[:2])


def test_the_parts_of_the_loss_add_up_to_it_and_each_rank_needs_the_other():
    """The text's ℓ_0 and ℓ_1: their sum is ℓ, and each has a term in the other rank's half."""
    parts = np.array([[2, 0, 1, 1], [0, 3, 3, 0]])
    assert parts.sum(0).tolist() == [2, 3, 4, 1]
    assert parts[0, 2:].any() and parts[1, :2].any()
