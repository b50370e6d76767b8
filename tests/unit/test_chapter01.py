"""Chapter 1's worked integers tell the right gradients from the wrong ones that its exercise lists."""

import numpy as np
import pytest
from notebook_reading import cells_of, defined_by


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the cells of the worked example define."""
    return defined_by(cells_of(1), "forward", "backward")


def test_no_matrix_is_square(page):
    assert all(len(set(page[name].shape)) == 2 for name in ("X", "A", "B", "dY", "H"))


def test_each_wrong_gradient_is_another(page):
    X, A, Z, H, dY, dZ, dH = (page[name] for name in ("X", "A", "Z", "H", "dY", "dZ", "dH"))
    wrong = {
        "dA": [*page["dA_of_token"], page["dA"] / 2, X.T @ dZ, X.T @ (dZ * Z)],
        "dB": [*(np.outer(z, dy) for z, dy in zip(Z, dY, strict=True)), page["dB"] / 2, H.T @ dY],
        "dX": [dZ @ A.T, (dZ * Z) @ A.T],
    }
    for name, variants in wrong.items():
        values = [page[name].tolist(), *(variant.tolist() for variant in variants)]
        assert all(np.shape(value) == page[name].shape for value in values)
        assert all(values.count(value) == 1 for value in values), name


def test_relu_is_nowhere_at_its_corner_and_each_token_loses_other_features(page):
    H = page["H"]
    assert (H != 0).all()
    assert ((H > 0).sum(0) >= 1).all() and ((H > 0).all(0)).sum() == 1  # the text: only column 1 is positive for both
