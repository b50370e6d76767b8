"""Chapter 7's worked integers tell the right rows, losses and gradients from the wrong ones that its exercises list."""

import numpy as np
import pytest
import torch
from notebook_reading import cells_of, defined_by


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the cells of the worked examples define."""
    worked = ("lookup-figure", "lookup", "lookup-gradient", "head-figure", "loss-by-hand", "backward-by-hand")
    return defined_by(cells_of(7), *worked, torch=torch)


def rows(*matrices):
    return [np.asarray(matrix).tolist() for matrix in matrices]


def test_each_wrong_lookup_is_another(page):
    ids, E, E_of = page["ids"], page["E"], page["E_of"]
    local = [ids - 2 * r for r in range(2)]
    wrapped = sum(E_r[at % 2] for E_r, at in zip(E_of, local, strict=True))  # -2 and 2 both come back as 0
    clamped = sum(E_r[at.clip(0, 1)] for E_r, at in zip(E_of, local, strict=True))
    assert np.array_equal(sum(page["parts"]), E[ids])
    values = rows(E[ids], *page["parts"], wrapped, clamped, sum(page["parts"]) / 2)
    assert values.count(values[0]) == 1


def test_a_row_that_is_looked_up_twice_adds_its_gradients(page):
    O, dX = page["O"], page["dX"]
    dE = O.T @ dX
    overwritten = np.zeros_like(dE)
    overwritten[page["ids"]] = dX  # the last one wins
    averaged = dE / np.maximum(O.sum(0), 1)[:, None]
    values = rows(dE, overwritten, averaged, 2 * dE)
    assert values.count(values[0]) == 1


def test_each_wrong_loss_is_another(page):
    z_of, y = page["z_of"], page["target"]
    z = np.concatenate(z_of)
    right = np.log2((2.0**z).sum()) - z[y]
    m = z.max()
    own = [(2.0 ** (z_r - z_r.max())).sum() for z_r in z_of]
    wrong = {
        "sums over own maxima": np.log2(sum(own)) + m - z[y],
        "maximum not added back": np.log2((2.0 ** (z - m)).sum()) - z[y],
        "rank 0 alone": np.log2((2.0 ** z_of[0]).sum()) - z[y],
        "mean of the ranks' own": np.mean([np.log2((2.0**z_r).sum()) - z_r[y % 2] for z_r in z_of]),
        "local index on both ranks": np.log2((2.0**z).sum()) - z_of[0][1] - z_of[1][1],
        "no target": np.log2((2.0**z).sum()),
        "natural logarithm": np.log((2.0**z).sum()) - z[y],
    }
    assert np.isclose(right, 3.5236, atol=1e-4)
    assert all(abs(value - right) > 0.01 for value in wrong.values())


def test_each_wrong_gradient_is_another(page):
    z_of, A_of, parts = page["z_of"], page["A_of"], page["dX_of"]
    one_hots = [np.arange(2) == page["target"] - 2 * r for r in range(2)]
    dz = [(2**z_r - 23 * hit)[None] for z_r, hit in zip(z_of, one_hots, strict=True)]
    right = sum(parts)
    assert right.tolist() == [[21, 9]]
    transposed = [dz_r @ A_r for dz_r, A_r in zip(dz, A_of, strict=True)]
    no_target = sum(2 ** z_r[None] @ A_r.T for z_r, A_r in zip(z_of, A_of, strict=True))
    hit_on_both = sum((2**z_r - 23 * one_hots[0])[None] @ A_r.T for z_r, A_r in zip(z_of, A_of, strict=True))
    values = rows(*parts, right, *transposed, sum(transposed), no_target, hit_on_both, 2 * right, right / 2)
    assert all(values.count(value) == 1 for value in values[:3])
