"""The layers by hand, in NumPy: forward and backward written out, first on one device, then with ranks as a list.

A list `[rank 0's, rank 1's, …]` holds what each rank holds, and an all-reduce is a visible `sum` over it. Nothing is
hidden, nothing is fast. Real ranks do the same in `tpcode.layers`; tests compare the two.

Matrices are the Megatron paper's: Y = act(X A) B with X [n, h], A [h, F], B [F, h] and n = b·s tokens; in attention
they are those of one sequence. Torch stores W = Aᵀ. `dX` stands for the gradient of the loss by X, and has X's shape.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from tpcode.shapes import HeadGroups, divide, head_groups

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


def softmax(scores):
    """Over the last axis; the largest score is taken off first, so that no exponential overflows."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def head_forward(Q, K, V):
    """One head: M = softmax(Q Kᵀ / √d) V, no query reading a later key. Also returns P, the probabilities."""
    scores = Q @ K.T / np.sqrt(Q.shape[1])  # [n, d] [d, n] -> [n, n]
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    P = softmax(scores)
    return P @ V, P  # [n, n] [n, d] -> [n, d]


def head_backward(dM, Q, K, V, P):
    """The gradients dQ, dK, dV. A softmax's outputs sum to 1, and so what one gains the others lose."""
    dV = P.T @ dM  # [n, n] [n, d] -> [n, d]
    dP = dM @ V.T  # [n, d] [d, n] -> [n, n]
    dS = P * (dP - (dP * P).sum(-1, keepdims=True)) / np.sqrt(Q.shape[1])
    return dS @ K, dS.T @ Q, dV  # each [n, n] [n, d] -> [n, d]


def attention_forward(X, W_q, W_k, W_v, W_o, a, k=None):
    """Y = [M_0 M_1 …] W_o, head i reading KV head i // (a/k). Also returns what backward needs, head by head.

    W_q is [h, a·d], W_k and W_v are [h, k·d], W_o is [a·d, h]. k KV heads; None is one for each query head.
    """
    k = a if k is None else k
    head_groups(a, k, 1)  # k must divide a
    Q, K, V = np.split(X @ W_q, a, 1), np.split(X @ W_k, k, 1), np.split(X @ W_v, k, 1)  # lists of [n, d]
    M, P = zip(*(head_forward(Q[i], K[i * k // a], V[i * k // a]) for i in range(a)))
    return np.concatenate(M, 1) @ W_o, (Q, K, V, P, M)  # [n, a·d] [a·d, h] -> [n, h]


def attention_backward(dY, X, W_q, W_k, W_v, W_o, kept):
    """The gradients dX, dW_q, dW_k, dW_v, dW_o. A KV head hears from each query head that reads it."""
    Q, K, V, P, M = kept
    a, k = len(Q), len(K)
    dW_o = np.concatenate(M, 1).T @ dY  # [a·d, n] [n, h] -> [a·d, h]
    dM = np.split(dY @ W_o.T, a, 1)  # [n, h] [h, a·d] -> a of [n, d]
    dQ, dK, dV = [], [0] * k, [0] * k
    for i in range(a):
        j = i * k // a
        dQ_i, dK_i, dV_i = head_backward(dM[i], Q[i], K[j], V[j], P[i])
        dQ.append(dQ_i)
        dK[j] = dK[j] + dK_i
        dV[j] = dV[j] + dV_i
    dQ, dK, dV = (np.concatenate(heads, 1) for heads in (dQ, dK, dV))  # [n, a·d], twice [n, k·d]
    dX = dQ @ W_q.T + dK @ W_k.T + dV @ W_v.T  # X is used three times
    return dX, X.T @ dQ, X.T @ dK, X.T @ dV, dW_o


def cross_entropy_forward(logits, targets):
    """Each token's loss, -log softmax(logits)[target]: [n, V] and [n] -> [n]. Also returns the probabilities."""
    largest = logits.max(-1)  # [n]
    exponentials = np.exp(logits - largest[:, None])  # [n, V]
    total = exponentials.sum(-1)  # [n]
    of_target = logits[np.arange(len(targets)), targets]  # [n]
    return np.log(total) + largest - of_target, exponentials / total[:, None]


def cross_entropy_backward(dloss, targets, P):
    """dlogits = (P - one-hot of the target) dloss: [n, V]."""
    dlogits = np.copy(P)
    dlogits[np.arange(len(targets)), targets] -= 1
    return dlogits * dloss[:, None]


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


def split_heads(W: ndarray, heads: HeadGroups, kv: bool = False) -> list[ndarray]:
    """W [h, heads·d] cut by heads: rank r holds the columns of its query heads, or of the KV heads that these read."""
    d = divide(W.shape[1], heads.kv_heads if kv else heads.heads, "columns")
    held = [heads.kv_heads_of(r) if kv else heads.heads_of(r) for r in range(heads.t)]
    return [np.copy(W[:, of_r.start * d : of_r.stop * d]) for of_r in held]


def sum_replicas(parts: list[ndarray], heads: HeadGroups) -> list[ndarray]:
    """Every rank gets the sum over the ranks that hold the same KV heads: itself alone, unless k < t."""
    return [np.copy(sum(parts[peer] for peer in heads.replicas_of(r))) for r in range(heads.t)]


def parallel_attention_forward(X, W_q, W_k, W_v, W_o, heads):
    """Each rank is an attention of fewer heads, and their outputs are added (g): the heads are columns, W_o is rows."""
    a, k = heads.heads_per_rank, heads.kv_heads_per_rank
    parts, kept = zip(*(attention_forward(*of_r, a, k) for of_r in zip(X, W_q, W_k, W_v, W_o)))
    return all_reduce(parts), kept


def parallel_attention_backward(dY, X, W_q, W_k, W_v, W_o, kept, heads):
    """The parts of dX are added (f); with replicas, those of dW_k and dW_v too, over the ranks that hold the head."""
    by_rank = [attention_backward(*of_r) for of_r in zip(dY, X, W_q, W_k, W_v, W_o, kept)]
    dX, dW_q, dW_k, dW_v, dW_o = (list(gradients) for gradients in zip(*by_rank))
    return all_reduce(dX), dW_q, sum_replicas(dW_k, heads), sum_replicas(dW_v, heads), dW_o


def all_max(parts: list[ndarray]) -> list[ndarray]:
    """Every rank gets the largest of what the ranks hold, entry by entry."""
    return replicate(np.max(parts, axis=0), len(parts))


def parallel_embedding(ids, E):
    """Rows of the table E [V, h], cut across: who does not hold an id's row puts zeros, and the rows are added (g)."""
    parts = []
    for r, E_r in enumerate(E):
        local = ids - r * len(E_r)
        mine = (local >= 0) & (local < len(E_r))
        parts.append(np.where(mine[:, None], E_r[np.where(mine, local, 0)], 0))  # [n, h]
    return all_reduce(parts)


def parallel_cross_entropy_forward(logits, targets):
    """Three small sums, each of [n], and nobody sees another's logits. Rank r holds the logits of V/t ids, [n, V/t]."""
    largest = all_max([z.max(-1) for z in logits])
    of_target = all_reduce([_one_or_zero(z, targets - r * z.shape[1]) for r, z in enumerate(logits)])
    exponentials = [np.exp(z - top[:, None]) for z, top in zip(logits, largest)]
    total = all_reduce([e.sum(-1) for e in exponentials])
    loss = [np.log(sum_r) + top - hit for sum_r, top, hit in zip(total, largest, of_target)]
    return loss, [e / sum_r[:, None] for e, sum_r in zip(exponentials, total)]


def parallel_cross_entropy_backward(dloss, targets, P):
    """dlogits_r = (P_r - one-hot) dloss. Each rank has the whole of the sum already: nobody is asked."""
    dlogits = []
    for r, (dloss_r, P_r) in enumerate(zip(dloss, P)):
        one_hot = np.arange(P_r.shape[1]) == (targets - r * P_r.shape[1])[:, None]  # all zero if it is not mine
        dlogits.append((P_r - one_hot) * dloss_r[:, None])
    return dlogits


def _one_or_zero(z, local):
    """Each row's entry number `local`, where there is one; else 0."""
    mine = (local >= 0) & (local < z.shape[1])
    return np.where(mine, z[np.arange(len(z)), np.where(mine, local, 0)], 0)
