"""Chapter 6's worked numbers tell the right attention from the wrong ones that the page and its exercises list."""

from fractions import Fraction

import numpy as np
import pytest
import yaml
from notebook_reading import CHAPTERS, cells_of, defined_by, source

from tpcode import byhand

LN2 = np.log(2)


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that the cells of the worked examples define."""
    return defined_by(cells_of(6), "inside", "wide", "forward", "backward", "replicas")


def all_differ(right, *wrong):
    arrays = [np.asarray(value, dtype=float) for value in (right, *wrong)]
    same = [a.shape == b.shape and np.allclose(a, b) for i, a in enumerate(arrays) for b in arrays[:i]]
    return not any(same)


def test_a_cut_inside_the_head_gives_other_weights_in_every_way(page):
    q, keys, values, weights_of = (page[name] for name in ("q", "keys", "values", "weights_of"))
    right, parts = page["weights"], [[q[r] * key[r] for key in keys] for r in range(2)]
    own = [weights_of(part) for part in parts]
    mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    assert right == [Fraction(2, 3), Fraction(1, 3)]
    assert own == [[Fraction(4, 5), Fraction(1, 5)], [Fraction(1, 3), Fraction(2, 3)]]
    assert all_differ(right, *own, mean, weights_of([sum(part) / 2 for part in parts]))
    assert (own[0][0] > own[0][1]) != (own[1][0] > own[1][1])  # the text: rank 0 reads mostly token 0, rank 1 token 1
    assert all_differ(page["halves"], page["scores"], [sum(p * v[j] for p, v in zip(right, values)) for j in range(2)])


def test_the_head_on_paper_is_head_1_of_the_matrices(page):
    assert page["Q_of"][1][1].tolist() == page["q"]
    assert page["K_of"][1].tolist() == page["keys"] and page["V_of"][1].tolist() == page["values"]
    assert np.allclose(page["P_of"][1][1], [2 / 3, 1 / 3]) and np.allclose(page["M_of"][1][1], [0, 2])


def test_matrices_are_no_squares_and_heads_no_copies(page):
    assert all(len(set(page[name].shape)) == 2 for name in ("X", "W_q", "W_k", "W_v", "W_o", "Y", "dY"))
    for name in "qkv":
        assert all_differ(*page["W_of"][name])
    assert all_differ(*page["P_of"]) and all_differ(*page["M_of"])


def test_each_wrong_output_is_another(page):
    Y, Y_of, M_of, W_o_of, V_of = (page[name] for name in ("Y", "Y_of", "M_of", "W_o_of", "V_of"))
    wrong = {
        "reduce (g) forgotten, rank 0": Y_of[0],
        "reduce (g) forgotten, rank 1": Y_of[1],
        "summed twice": 2 * Y,
        "rows of W_o exchanged": M_of[0] @ W_o_of[1] + M_of[1] @ W_o_of[0],
        "M_r summed": sum(M_of) @ sum(W_o_of),
        "no softmax": sum(V_r @ W_o_r for V_r, W_o_r in zip(V_of, W_o_of, strict=True)),
        "every other column a head": output(page, lambda W: [W[:, ::2], W[:, 1::2]]),
        "cut inside the heads": cut_inside(page),
    }
    assert all_differ(Y, *wrong.values())


def output(page, cut):
    """Y with the columns of W_q, W_k and W_v given to two heads by `cut`, and the rows of W_o as they are."""
    of = {name: [page["X"] @ part for part in cut(page[f"W_{name}"])] for name in "qkv"}
    mixed = [page["head_forward"](*(of[name][i] for name in "qkv"))[0] for i in range(2)]
    return sum(m @ w for m, w in zip(mixed, page["W_o_of"], strict=True))


def cut_inside(page):
    """Y where rank r has feature r of each head, and runs softmax on it."""
    total = 0
    for r in range(2):
        for head in range(2):
            columns = [page["X"] @ page[f"W_{name}"][:, [2 * head + r]] for name in "qkv"]
            total = total + page["head_forward"](*columns)[0] @ page["W_o"][[2 * head + r]]
    return total


def test_by_hand_agrees_with_the_packages_attention(page):
    """Powers of 2 without √d are powers of e with √d if queries are scaled by ln 2 · √2."""
    scale = LN2 * np.sqrt(2)
    weights = page["W_q"] * scale, page["W_k"], page["W_v"], page["W_o"]
    Y, kept = byhand.attention_forward(page["X"], *weights, a=2)
    dX, dW_q, dW_k, dW_v, dW_o = byhand.attention_backward(page["dY"], page["X"], *weights, kept)
    assert np.allclose(Y, page["Y"]) and np.allclose(dX, page["dX"])
    for name, right in {"q": dW_q * scale, "k": dW_k, "v": dW_v}.items():
        assert np.allclose(np.concatenate(page["dW_of"][name], 1), right)
    assert np.allclose(np.concatenate(page["dW_o_of"]), dW_o)


def test_each_wrong_gradient_is_another(page):
    dX, dX_of = page["dX"], page["dX_of"]
    one_term = [sum(page[f"d{n}_of"][r] @ page["W_of"][n.lower()][r].T for r in range(2)) for n in "QKV"]
    assert all_differ(dX, *dX_of, 2 * dX, dX / 2, *one_term)
    for name in "qkv":
        assert all_differ(*page["dW_of"][name], sum(page["dW_of"][name]))


def test_replicas_have_unequal_parts_and_their_sum_is_the_dense_gradient(page):
    scale = LN2 * np.sqrt(2)
    weights = page["W_q"] * scale, page["W_k_one"], page["W_v_one"], page["W_o"]
    _, kept = byhand.attention_forward(page["X"], *weights, a=2, k=1)
    _, _, dW_k, dW_v, _ = byhand.attention_backward(page["dY"], page["X"], *weights, kept)
    for right, parts in ((dW_k, page["dW_k_of"]), (dW_v, page["dW_v_of"])):
        assert np.allclose(sum(parts), right)
        assert all_differ(right, *parts, right / 2, 2 * parts[0], 2 * parts[1])


def test_statement_4_of_chapter_0_is_settled_here():
    pretest = yaml.safe_load((CHAPTERS / "00_pretest.yaml").read_text(encoding="utf-8"))
    assert pretest[3]["chapter"] == 6 and pretest[3]["verdict"] == "wrong"
    assert "Statement 4 of chapter 0 was false." in source(cells_of(6)["layers-answer"])
