"""The FFN by hand against torch's autograd, and ranks as a list against one device."""

import numpy as np
import pytest
import torch

from tpcode import byhand
from tpcode.byhand import gelu, relu, silu

N, H, F = 7, 5, 12
TORCH = {
    relu: torch.relu,
    gelu: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    silu: torch.nn.functional.silu,
}


def numbers(*shape, seed):
    """Distinct per element."""
    return np.random.default_rng(seed).standard_normal(shape)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


X, A, U, B = numbers(N, H, seed=1), numbers(H, F, seed=2), numbers(H, F, seed=3), numbers(F, H, seed=4)
DY = numbers(N, H, seed=5)


def by_autograd(function, *matrices):
    """Y and the gradients, with DY coming back."""
    leaves = [torch.tensor(m, requires_grad=True) for m in matrices]
    out = function(*leaves)
    out.backward(torch.tensor(DY))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("act", [relu, gelu, silu])
def test_ffn_equals_autograd(act):
    Y, H_, Z = byhand.ffn_forward(X, A, B, act)
    ours = [Y, *byhand.ffn_backward(DY, X, A, B, H_, Z, act)]
    for mine, theirs in zip(ours, by_autograd(lambda x, a, b: TORCH[act](x @ a) @ b, X, A, B), strict=True):
        close(mine, theirs)


def test_swiglu_equals_autograd():
    Y, G, U_, Z = byhand.swiglu_forward(X, A, U, B)
    ours = [Y, *byhand.swiglu_backward(DY, X, A, U, B, G, U_, Z)]
    theirs = by_autograd(lambda x, a, u, b: (TORCH[silu](x @ a) * (x @ u)) @ b, X, A, U, B)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other)


def test_activations_far_from_zero_stay_finite():
    far = np.array([-1e3, 1e3])
    with np.errstate(all="raise", under="ignore"):
        close(silu(far), [0, 1e3])
        close(byhand.d_silu(far), [0, 1])
        close(gelu(far), [0, 1e3])
        close(byhand.d_gelu(far), [0, 1])


def same_on_all(parts):
    """The one value that every rank holds."""
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0])
    return parts[0]


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("act", [relu, gelu])
def test_column_then_row_equals_one_device(act, t):
    Y, H_, Z = byhand.ffn_forward(X, A, B, act)
    dX, dA, dB = byhand.ffn_backward(DY, X, A, B, H_, Z, act)

    Xs, As, Bs = byhand.replicate(X, t), byhand.split_columns(A, t), byhand.split_rows(B, t)
    Ys, Hs, Zs = byhand.parallel_ffn_forward(Xs, As, Bs, act)
    dXs, dAs, dBs = byhand.parallel_ffn_backward(byhand.replicate(DY, t), Xs, As, Bs, Hs, Zs, act)

    close(same_on_all(Ys), Y)
    close(same_on_all(dXs), dX)
    close(np.concatenate(dAs, 1), dA)
    close(np.concatenate(dBs, 0), dB)
    assert len(Ys) == len(dXs) == len(dAs) == len(dBs) == t


@pytest.mark.parametrize("t", [1, 2, 4])
def test_split_swiglu_equals_one_device(t):
    Y, G, U_, Z = byhand.swiglu_forward(X, A, U, B)
    dX, dA, dU, dB = byhand.swiglu_backward(DY, X, A, U, B, G, U_, Z)

    sharded = byhand.replicate(X, t), byhand.split_columns(A, t), byhand.split_columns(U, t), byhand.split_rows(B, t)
    Ys, Gs, Us, Zs = byhand.parallel_swiglu_forward(*sharded)
    dXs, dAs, dUs, dBs = byhand.parallel_swiglu_backward(byhand.replicate(DY, t), *sharded, Gs, Us, Zs)

    close(same_on_all(Ys), Y)
    close(same_on_all(dXs), dX)
    close(np.concatenate(dAs, 1), dA)
    close(np.concatenate(dUs, 1), dU)
    close(np.concatenate(dBs, 0), dB)


def test_column_split_on_paper():
    """The worked integers: each listed wrong variant gives another answer."""
    X, A = np.array([[1, 2]]), np.array([[1, 1, 3, 0], [0, 1, 1, 1]])
    dY = [np.array([[3, 2]]), np.array([[1, 3]])]
    Xs, As = byhand.replicate(X, 2), byhand.split_columns(A, 2)
    assert [Y.tolist() for Y in byhand.column_forward(Xs, As)] == [[[1, 3]], [[5, 2]]]
    dX, dA = byhand.column_backward(dY, Xs, As)
    assert [part.tolist() for part in dX] == [[[8, 6]], [[8, 6]]]
    assert [part.tolist() for part in dA] == [[[3, 2], [6, 4]], [[1, 3], [2, 6]]]


def test_row_bias_is_added_once():
    """Rules out: a bias added on every rank before the sum. Not vacuous: the bias is far from zero in each entry."""
    bias = np.arange(1.0, H + 1)
    Zs, Bs = byhand.split_columns(numbers(N, F, seed=6), 4), byhand.split_rows(B, 4)
    with_bias, without = byhand.row_forward(Zs, Bs, bias), byhand.row_forward(Zs, Bs)
    for mine, bare in zip(with_bias, without):
        close((mine - bare) / bias, np.ones((N, H)))


def test_gathered_columns_are_the_dense_product():
    Ys = byhand.column_forward(byhand.replicate(X, 4), byhand.split_columns(A, 4))
    close(same_on_all(byhand.all_gather(Ys)), X @ A)


def test_uneven_splits_are_refused():
    with pytest.raises(ValueError, match="columns = 12 does not divide by t = 5; t that work: 1, 2, 3, 4, 6, 12"):
        byhand.split_columns(A, 5)
    with pytest.raises(ValueError, match="rows = 12 does not divide by t = 8"):
        byhand.split_rows(B, 8)
