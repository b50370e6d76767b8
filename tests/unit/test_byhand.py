"""The layers by hand against torch's autograd, and ranks as a list against one device."""

import numpy as np
import pytest
import torch

from tpcode import byhand
from tpcode.byhand import gelu, relu, silu
from tpcode.shapes import head_groups

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


# ---- attention ------------------------------------------------------------------------------------------------------

D = 4


def attention_matrices(a, k):
    sizes = {"q": (H, a * D), "k": (H, k * D), "v": (H, k * D), "o": (a * D, H)}
    return [numbers(*size, seed=seed) for seed, size in enumerate(sizes.values(), 10)]


def attention_in_torch(a, k):
    def attention(x, w_q, w_k, w_v, w_o):
        q, key, v = ((x @ w).unflatten(-1, (-1, D)).transpose(0, 1) for w in (w_q, w_k, w_v))  # [heads, n, D]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q[None], key[None], v[None], is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1) @ w_o

    return attention


@pytest.mark.parametrize(("a", "k"), [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_autograd(a, k):
    matrices = attention_matrices(a, k)
    Y, kept = byhand.attention_forward(X, *matrices, a, k)
    ours = [Y, *byhand.attention_backward(DY, X, *matrices, kept)]
    for mine, theirs in zip(ours, by_autograd(attention_in_torch(a, k), X, *matrices), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize(
    ("a", "k", "t"), [(4, 4, 1), (4, 4, 2), (4, 4, 4), (8, 4, 2), (4, 2, 4), (4, 1, 2), (9, 3, 3), (9, 3, 9)]
)
def test_heads_on_ranks_equal_one_device(a, k, t):
    heads, matrices = head_groups(a, k, t), attention_matrices(a, k)
    Y, kept = byhand.attention_forward(X, *matrices, a, k)
    dX, *gradients = byhand.attention_backward(DY, X, *matrices, kept)

    def shards(q, key, v, o):
        return [
            byhand.split_heads(q, heads),
            *(byhand.split_heads(w, heads, kv=True) for w in (key, v)),
            byhand.split_rows(o, t),
        ]

    Xs, Ws = byhand.replicate(X, t), shards(*matrices)
    Ys, kepts = byhand.parallel_attention_forward(Xs, *Ws, heads)
    dXs, *by_rank = byhand.parallel_attention_backward(byhand.replicate(DY, t), Xs, *Ws, kepts, heads)
    close(same_on_all(Ys), Y)
    close(same_on_all(dXs), dX)
    for mine, wanted in zip(by_rank, shards(*gradients), strict=True):
        assert len(mine) == t
        for part, whole in zip(mine, wanted, strict=True):
            close(part, whole)


def test_replicas_hold_parts_until_they_are_summed():
    """Not vacuous: with 2 KV heads on 4 ranks no rank's own part of dW_k is near the sum."""
    heads, matrices = head_groups(4, 2, 4), attention_matrices(4, 2)
    _, kept = byhand.attention_forward(X, *matrices, 4, 2)
    _, _, dW_k, _, _ = byhand.attention_backward(DY, X, *matrices, kept)
    W_q, W_k, W_v, W_o = matrices
    Ws = [byhand.split_heads(W_q, heads), *(byhand.split_heads(w, heads, kv=True) for w in (W_k, W_v))]
    parts = []
    for W_q_r, W_k_r, W_v_r, W_o_r in zip(*Ws, byhand.split_rows(W_o, 4)):
        _, kept = byhand.attention_forward(X, W_q_r, W_k_r, W_v_r, W_o_r, 1)
        parts.append(byhand.attention_backward(DY, X, W_q_r, W_k_r, W_v_r, W_o_r, kept)[2])
    whole = byhand.split_heads(dW_k, heads, kv=True)
    assert all(np.abs(part - of_head).max() > 0.1 for part, of_head in zip(parts, whole))
    for summed, of_head in zip(byhand.sum_replicas(parts, heads), whole, strict=True):
        close(summed, of_head)


def test_no_query_reads_a_later_token():
    matrices = attention_matrices(4, 4)
    later = np.copy(X)
    later[4:] += 1
    before, after = (byhand.attention_forward(tokens, *matrices, 4)[0] for tokens in (X, later))
    np.testing.assert_array_equal(before[:4], after[:4])
    assert np.abs(before[4:] - after[4:]).max() > 0.1


# ---- vocabulary -----------------------------------------------------------------------------------------------------

V = 12
LOGITS, TARGETS, DLOSS = numbers(N, V, seed=20), np.array([0, 11, 5, 6, 3, 3, 8]), numbers(N, seed=21)


def test_cross_entropy_equals_autograd():
    leaf = torch.tensor(LOGITS, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(leaf, torch.tensor(TARGETS), reduction="none")
    theirs.backward(torch.tensor(DLOSS))
    loss, P = byhand.cross_entropy_forward(LOGITS, TARGETS)
    close(loss, theirs.detach())
    close(byhand.cross_entropy_backward(DLOSS, TARGETS, P), leaf.grad)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_cross_entropy_over_ranks_equals_one_device(t):
    loss, P = byhand.cross_entropy_forward(LOGITS, TARGETS)
    losses, Ps = byhand.parallel_cross_entropy_forward(byhand.split_columns(LOGITS, t), TARGETS)
    close(same_on_all(losses), loss)
    close(np.concatenate(Ps, 1), P)
    dlogits = byhand.parallel_cross_entropy_backward(byhand.replicate(DLOSS, t), TARGETS, Ps)
    close(np.concatenate(dlogits, 1), byhand.cross_entropy_backward(DLOSS, TARGETS, P))


def test_large_logits_stay_finite():
    """The largest of all logits is taken off, not each rank's own. Not vacuous: e¹⁰⁰⁰ is infinite."""
    with np.errstate(all="raise", under="ignore"):
        logits = [np.array([[1000.0, 0.0]]), np.array([[-1000.0, 998.0]])]
        loss, _ = byhand.parallel_cross_entropy_forward(logits, np.array([3]))
        close(loss[0], [2 + np.log1p(np.exp(-2))])


def test_cross_entropy_on_paper():
    """Logits of base 2, so that the numbers come out whole: [1, 3 | 2, 0], target 2. The sums are 1.25 and 0.625."""
    logits = [np.log(2) * np.array([[1.0, 3.0]]), np.log(2) * np.array([[2.0, 0.0]])]
    loss, P = byhand.parallel_cross_entropy_forward(logits, np.array([2]))
    close(loss[0] / np.log(2), [np.log2(15) - 2])
    close(np.concatenate(P, 1) * 15, [[2, 8, 4, 1]])


@pytest.mark.parametrize("t", [1, 2, 4])
def test_embedding_rows_come_from_their_rank(t):
    """Rules out: an id of another rank that wraps around to a row of one's own. Every id is looked up."""
    table, ids = numbers(V, H, seed=22), np.arange(V)[::-1]
    close(same_on_all(byhand.parallel_embedding(ids, byhand.split_rows(table, t))), table[::-1])
