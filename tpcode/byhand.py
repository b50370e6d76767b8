"""The FFN by hand, in NumPy: forward and backward written out, first on one device, then with ranks as a Python list.

A list `[rank 0's, rank 1's, …]` holds what each rank holds, and an all-reduce is a visible `sum` over it. Nothing is
hidden, nothing is fast. Real ranks do the same in `tpcode.layers`; tests compare the two.

Matrices are the Megatron paper's: Y = act(X A) B with X [n, h], A [h, F], B [F, h] and n = b·s tokens. Torch stores
W = Aᵀ. `dX` stands for the gradient of the loss by X, and has X's shape.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from tpcode.shapes import divide

# ---- activations and their derivatives ------------------------------------------------------------------------------


def relu(x: ndarray) -> ndarray:
    return np.maximum(x, 0)


def d_relu(x: ndarray) -> ndarray:
    return np.where(x > 0, 1, 0)


def gelu(x: ndarray) -> ndarray:
    """GeLU in the form with tanh, as GPT-2 has it (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def d_gelu(x: ndarray) -> ndarray:
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def silu(x: ndarray) -> ndarray:
    return x * _sigmoid(x)


def d_silu(x: ndarray) -> ndarray:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


def _sigmoid(x: ndarray) -> ndarray:
    return 0.5 * (1 + np.tanh(x / 2))  # 1 / (1 + e⁻ˣ), without overflow


DERIVATIVE = {relu: d_relu, gelu: d_gelu, silu: d_silu}

# ---- one device -----------------------------------------------------------------------------------------------------


def ffn_forward(X, A, B, act=relu):
    """Y = act(X A) B. Also returns H = X A and Z = act(H), which backward needs."""
    H = X @ A  # [n, h] [h, F] -> [n, F]
    Z = act(H)  # [n, F]
    Y = Z @ B  # [n, F] [F, h] -> [n, h]
    return Y, H, Z


def ffn_backward(dY, X, A, B, H, Z, act=relu):
    """The gradients dX, dA, dB. A weight's gradient sums over the tokens: that is what its product does."""
    dB = Z.T @ dY  # [F, n] [n, h] -> [F, h]
    dZ = dY @ B.T  # [n, h] [h, F] -> [n, F]
    dH = dZ * DERIVATIVE[act](H)  # [n, F]
    dA = X.T @ dH  # [h, n] [n, F] -> [h, F]
    dX = dH @ A.T  # [n, F] [F, h] -> [n, h]
    return dX, dA, dB


def swiglu_forward(X, A_gate, A_up, B):
    """Y = (silu(X A_gate) ⊙ X A_up) B. Also returns G = X A_gate, U = X A_up and Z, which backward needs."""
    G = X @ A_gate  # [n, h] [h, F] -> [n, F]
    U = X @ A_up  # [n, F]
    Z = silu(G) * U  # [n, F]
    Y = Z @ B  # [n, F] [F, h] -> [n, h]
    return Y, G, U, Z


def swiglu_backward(dY, X, A_gate, A_up, B, G, U, Z):
    """The gradients dX, dA_gate, dA_up, dB. X is used twice, so dX has two terms."""
    dB = Z.T @ dY  # [F, n] [n, h] -> [F, h]
    dZ = dY @ B.T  # [n, h] [h, F] -> [n, F]
    dG = dZ * U * d_silu(G)  # [n, F]
    dU = dZ * silu(G)  # [n, F]
    dA_gate = X.T @ dG  # [h, n] [n, F] -> [h, F]
    dA_up = X.T @ dU
    dX = dG @ A_gate.T + dU @ A_up.T  # [n, F] [F, h] -> [n, h]
    return dX, dA_gate, dA_up, dB


# ---- ranks as a list ------------------------------------------------------------------------------------------------


def replicate(X: ndarray, t: int) -> list[ndarray]:
    """The same X on each of t ranks, each with a copy of its own."""
    return [np.copy(X) for _ in range(t)]


def split_columns(A: ndarray, t: int) -> list[ndarray]:
    """A [h, F] cut down: rank r holds A_r [h, F/t]."""
    divide(A.shape[1], t, "columns")
    return np.split(A, t, axis=1)


def split_rows(B: ndarray, t: int) -> list[ndarray]:
    """B [F, h] cut across: rank r holds B_r [F/t, h]."""
    divide(B.shape[0], t, "rows")
    return np.split(B, t, axis=0)


def all_reduce(parts: list[ndarray]) -> list[ndarray]:
    """Every rank gets the sum of what the ranks hold."""
    return replicate(sum(parts), len(parts))


def all_gather(parts: list[ndarray], axis: int = 1) -> list[ndarray]:
    """Every rank gets what the ranks hold, side by side."""
    return replicate(np.concatenate(parts, axis), len(parts))


def column_forward(X, A):
    """Y_r = X A_r: the columns of Y that belong to A_r. Nobody is asked."""
    return [X_r @ A_r for X_r, A_r in zip(X, A)]  # [n, h] [h, F/t] -> [n, F/t]


def column_backward(dY, X, A):
    """dA_r is complete where it stands. Every rank used X, so each holds a part of dX: the parts are added (f)."""
    dA = [X_r.T @ dY_r for X_r, dY_r in zip(X, dY)]  # [h, n] [n, F/t] -> [h, F/t]
    dX = all_reduce([dY_r @ A_r.T for dY_r, A_r in zip(dY, A)])  # [n, F/t] [F/t, h] -> [n, h]
    return dX, dA


def row_forward(Z, B, bias=0):
    """Y = Σ_r Z_r B_r: each rank has a part of every entry, and the parts are added (g). The bias is added once."""
    Y = all_reduce([Z_r @ B_r for Z_r, B_r in zip(Z, B)])  # [n, F/t] [F/t, h] -> [n, h]
    return [Y_r + bias for Y_r in Y]


def row_backward(dY, Z, B):
    """Every rank has all of dY already, so nobody is asked. (The bias's gradient is dY summed over the tokens.)"""
    dB = [Z_r.T @ dY_r for Z_r, dY_r in zip(Z, dY)]  # [F/t, n] [n, h] -> [F/t, h]
    dZ = [dY_r @ B_r.T for dY_r, B_r in zip(dY, B)]  # [n, h] [h, F/t] -> [n, F/t]
    return dZ, dB


def parallel_ffn_forward(X, A, B, act=relu):
    """Column, then row: Y = Σ_r act(X A_r) B_r. One all-reduce, inside `row_forward`."""
    H = column_forward(X, A)
    Z = [act(H_r) for H_r in H]
    Y = row_forward(Z, B)
    return Y, H, Z


def parallel_ffn_backward(dY, X, A, B, H, Z, act=relu):
    """Row, then column. One all-reduce, inside `column_backward`."""
    dZ, dB = row_backward(dY, Z, B)
    dH = [dZ_r * DERIVATIVE[act](H_r) for dZ_r, H_r in zip(dZ, H)]
    dX, dA = column_backward(dH, X, A)
    return dX, dA, dB


def parallel_swiglu_forward(X, A_gate, A_up, B):
    """Gate and up by columns, the same columns of both; down by rows. One all-reduce, inside `row_forward`."""
    G = column_forward(X, A_gate)
    U = column_forward(X, A_up)
    Z = [silu(G_r) * U_r for G_r, U_r in zip(G, U)]
    Y = row_forward(Z, B)
    return Y, G, U, Z


def parallel_swiglu_backward(dY, X, A_gate, A_up, B, G, U, Z):
    """Gate and up read the same X, so their parts of dX are added before the one all-reduce."""
    dZ, dB = row_backward(dY, Z, B)
    dG = [dZ_r * U_r * d_silu(G_r) for dZ_r, U_r, G_r in zip(dZ, U, G)]
    dU = [dZ_r * silu(G_r) for dZ_r, G_r in zip(dZ, G)]
    dA_gate = [X_r.T @ dG_r for X_r, dG_r in zip(X, dG)]
    dA_up = [X_r.T @ dU_r for X_r, dU_r in zip(X, dU)]
    dX = all_reduce([dG_r @ Ag_r.T + dU_r @ Au_r.T for dG_r, Ag_r, dU_r, Au_r in zip(dG, A_gate, dU, A_up)])
    return dX, dA_gate, dA_up, dB
