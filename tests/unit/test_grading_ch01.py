"""Exercises 1.1 to 1.4: right answers in several styles pass, each wrong one hears what is wrong with it."""

import numpy as np
import pytest
import torch
from checking import refused

from tpcode import byhand
from tpcode.dense import FFN
from tpcode.grading import ch01, check

X, A, B, DY = (np.array(matrix) for matrix in (ch01.X, ch01.A, ch01.B, ch01.DY))
_, HIDDEN, Z = byhand.ffn_forward(X, A, B)
DX, DA, DB = byhand.ffn_backward(DY, X, A, B, HIDDEN, Z)
DZ = DY @ B.T
DH = DZ * (HIDDEN > 0)


# ---- 1.1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [np.ndarray.tolist, np.asarray, torch.from_numpy, lambda m: m.astype(float).tolist()])
def test_gradients_pass(typed, capsys):
    check("1.1", typed(DA), typed(DB), typed(DX))
    assert capsys.readouterr().out.startswith("1.1 right: dA, dB and dX")


def of_tokens(left, right):
    """For each token the product of its column of leftᵀ and its row of right."""
    return np.stack([np.outer(a, b) for a, b in zip(left, right, strict=True)])


WRONG_GRADIENTS = [
    ({"dA": of_tokens(X, DH)}, "the tokens' gradients one by one"),
    ({"dB": of_tokens(Z, DY)}, "the tokens' gradients one by one"),
    ({"dA": of_tokens(X, DH)[0]}, "from token 0 alone"),
    ({"dA": of_tokens(X, DH)[1]}, "from token 1 alone"),
    ({"dB": of_tokens(Z, DY)[0]}, "from token 0 alone"),
    ({"dB": of_tokens(Z, DY)[1]}, "from token 1 alone"),
    ({"dA": DA / 2}, "the mean over the tokens"),
    ({"dB": DB / 2}, "the mean over the tokens"),
    ({"dA": DA.T}, "It may be transposed"),
    ({"dB": DB.T}, "It may be transposed"),
    ({"dX": DX.T}, "It may be transposed"),
    ({"dB": Z @ DY}, "This is Z dY"),
    ({"dB": HIDDEN.T @ DY}, "This is Hᵀ dY"),
    ({"dA": X.T @ DZ}, "relu's mask is missing"),
    ({"dX": DZ @ A.T}, "relu's mask is missing"),
    ({"dA": X.T @ (DZ * Z)}, "where H > 0, not H."),
    ({"dX": (DZ * Z) @ A.T}, "where H > 0, not H."),
    ({"dA": X.T @ DH.T}, "dH is transposed"),
    ({"dX": DH.T @ A.T}, "dH is transposed"),
    ({"dA": -DA}, "wrong sign"),
    ({"dA": "seven"}, "should be a tensor or numbers"),
]


@pytest.mark.parametrize("wrong, said", WRONG_GRADIENTS)
def test_wrong_gradients_hear_why(wrong, said):
    answers = {"dA": DA, "dB": DB, "dX": DX} | wrong
    message = str(refused(said, "1.1", answers["dA"], answers["dB"], answers["dX"]))
    assert message.startswith(f"1.1 not yet right: {next(iter(wrong))}")


def test_each_wrong_gradient_differs_from_the_right_one_and_from_the_others():
    for name, right in (("dA", DA), ("dB", DB), ("dX", DX)):
        values = [right, *(np.asarray(wrong[name]) for wrong, _ in WRONG_GRADIENTS if name in wrong)]
        texts = [str(value.tolist()) for value in values]
        assert len(set(texts)) == len(texts)


def test_gradients_not_yet_typed():
    refused("1.1 is not filled in yet: replace None in dA and dX.", "1.1", None, DB, None)
    refused("replace None in dB", "1.1", DA, [None, [1, 2, 3]], DX)


# ---- 1.2 ------------------------------------------------------------------------------------------------------------


def count(h, F, gated):
    return (3 if gated else 2) * h * F


def n_bytes(h, F, gated):
    return 2 * count(h, F, gated)


def bytes_of_tensors(h, F, gated):
    shapes = [(h, F), (F, h)] + [(h, F)] * gated
    matrices = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes]
    return sum(matrix.nbytes for matrix in matrices)


def flops(tokens, h, F, gated):
    return 2 * tokens * count(h, F, gated)


def flops_in_torch(tokens, h, F, gated):
    return torch.tensor(2.0 * tokens * count(h, F, gated), dtype=torch.float64)


def mib(size):
    return size / 1024 / 1024


def mib_by_shift(size):
    return size >> 20


@pytest.mark.parametrize(
    "answers", [(n_bytes, flops, mib), (bytes_of_tensors, flops_in_torch, mib_by_shift), (n_bytes, flops, mib_by_shift)]
)
def test_bytes_and_flops_pass(answers, capsys):
    check("1.2", *answers)
    assert capsys.readouterr().out.startswith("1.2 right")


@pytest.mark.parametrize(
    "ffn_bytes, said",
    [
        (count, "That is the number of parameters"),
        (lambda h, F, gated: 2 * h * F, "That is one matrix; this FFN has 3. The 2 in 2·h·F is bytes, not matrices."),
        (lambda h, F, gated: 2 * 2 * h * F, "A gated FFN has three"),
        (lambda h, F, gated: 2 * 3 * h * F, "Without a gate there are two"),
        (lambda h, F, gated: 4 * count(h, F, gated), "16 bits are 2 bytes"),
        (lambda h, F, gated: 16 * count(h, F, gated), "8 of them are a byte"),
        (lambda h, F, gated: n_bytes(h, F, gated) / 1e6, "That is MB; bytes are asked for"),
        (lambda h, F, gated: n_bytes(h, F, gated) / 2**20, "That is MiB; bytes are asked for"),
        (lambda h, F, gated: "many", "should return one number"),
        (lambda h, F, gated: True, "should return one number"),
    ],
)
def test_wrong_bytes_hear_why(ffn_bytes, said):
    refused(said, "1.2", ffn_bytes, flops, mib)


@pytest.mark.parametrize(
    "ffn_flops, said",
    [
        (lambda n, h, F, gated: 2 * n * h * F * 3, "Without a gate there are two"),
        (lambda n, h, F, gated: 2 * n * h * F * 2, "A gated FFN has three"),
        (lambda n, h, F, gated: 2 * n * h * F, "That is one of the 3 products"),
        (lambda n, h, F, gated: n * count(h, F, gated), "counts a multiply-add as one"),
        (lambda n, h, F, gated: 2 * flops(n, h, F, gated), "backward's count"),
        (lambda n, h, F, gated: 3 * flops(n, h, F, gated), "forward and backward together"),
        (lambda n, h, F, gated: flops(1, h, F, gated), "for one token"),
    ],
)
def test_wrong_flops_hear_why(ffn_flops, said):
    refused(said, "1.2", n_bytes, ffn_flops, mib)


@pytest.mark.parametrize(
    "in_mib, said",
    [
        (lambda size: size / 1e6, "That is MB, of 10⁶ bytes"),
        (lambda size: size / 2**30, "That is GiB"),
        (lambda size: size / 1024 / 1000, "not 1000 · 1024"),
        (lambda size: size * 2**20, "is a division"),
    ],
)
def test_wrong_mib_hear_why(in_mib, said):
    refused(said, "1.2", n_bytes, flops, in_mib)


# ---- 1.3 ------------------------------------------------------------------------------------------------------------

FP32 = {"weights": 4, "gradients": 4, "exp_avg": 4, "exp_avg_sq": 4}
MIXED = {"weights": 2, "gradients": 2, "master_weights": 4, "exp_avg": 4, "exp_avg_sq": 4}


def answering(fp32, mixed):
    """A state_bytes that multiplies these terms by n."""

    def state_bytes(n, recipe):
        return {name: n * size for name, size in {"fp32": fp32, "mixed": mixed}[recipe].items()}

    return state_bytes


def measured(n, recipe):
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    weights = torch.empty(n, dtype=dtype, device="meta")
    master = weights if recipe == "fp32" else weights.float()
    sizes = {"weights": weights.nbytes, "gradients": torch.empty_like(weights).nbytes}
    if master is not weights:
        sizes["master_weights"] = master.nbytes
    return sizes | {name: torch.empty_like(master).nbytes for name in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(
    "state_bytes", [answering(FP32, MIXED), answering(FP32 | {"master_weights": 0}, MIXED), measured]
)
def test_terms_pass(state_bytes, capsys):
    check("1.3", state_bytes)
    assert capsys.readouterr().out.startswith("1.3 right")


@pytest.mark.parametrize(
    "fp32, mixed, said",
    [
        (FP32, FP32, "both recipes have the same terms"),
        (MIXED, MIXED, "both recipes have the same terms"),
        (MIXED, FP32, "recipes are exchanged"),
        (FP32 | {"master_weights": 4}, MIXED, "their own master copy"),
        (FP32, MIXED | {"weights": 4}, "forward and backward use are in 16 bits"),
        (FP32, MIXED | {"gradients": 4}, "gradients are in 16 bits"),
        (FP32, MIXED | {"master_weights": 0}, "a copy of the weights in fp32"),
        (FP32, MIXED | {"exp_avg": 2}, "averages stay in fp32"),
        (FP32, MIXED | {"exp_avg_sq": 2}, "averages stay in fp32"),
        (FP32 | {"gradients": 0}, MIXED, "16 bytes include the gradient"),
        (FP32 | {"exp_avg": 8, "exp_avg_sq": 0}, MIXED, "two averages, exp_avg and exp_avg_sq"),
        (FP32 | {"exp_avg_sq": 0}, MIXED, "of the gradient, and of its square"),
        (FP32 | {"momentum": 4}, MIXED, "a term 'momentum'"),
    ],
)
def test_wrong_terms_hear_why(fp32, mixed, said):
    refused(said, "1.3", answering(fp32, mixed))


def test_a_total_and_one_parameter_are_told_apart():
    refused("It is the total", "1.3", lambda n, recipe: 16 * n)
    refused("should return a dict", "1.3", lambda n, recipe: 17 * n)
    refused("multiply by n", "1.3", lambda n, recipe: FP32 if recipe == "fp32" else MIXED)


# ---- 1.4 ------------------------------------------------------------------------------------------------------------


def stack(state=16, kept=lambda h, F: h + 2 * F, matrices=2):
    """A most_layers with these bytes a parameter and numbers kept a token."""

    def most_layers(tokens, h, F, card_bytes):
        return card_bytes // (state * matrices * h * F + 2 * tokens * kept(h, F))

    return most_layers


def counting_up(tokens, h, F, card_bytes):
    layers = 0
    while (layers + 1) * (32 * h * F + 2 * tokens * (h + 2 * F)) <= card_bytes:
        layers += 1
    return layers


def unrounded(tokens, h, F, card_bytes):
    return card_bytes / (32 * h * F + 2 * tokens * (h + 2 * F))


@pytest.mark.parametrize("most_layers", [stack(), counting_up, unrounded])
def test_numbers_of_layers_pass(most_layers, capsys):
    check("1.4", most_layers)
    assert capsys.readouterr().out == (
        "1.4 right: 37 layers by their state alone, 29 with the activations of 8192 tokens.\n"
    )


def test_every_slip_shows_in_other_numbers_than_every_other():
    right = [ch01._most(*case) for case in ch01.CASES]
    shown = {tuple(ch01._most(*case, **options) for case in ch01.CASES): text for options, text in ch01.SLIPS}
    assert len(shown) == len(ch01.SLIPS) and tuple(right) not in shown


@pytest.mark.parametrize(
    "most_layers, said",
    [
        (stack(state=2), "room for their weights"),
        (stack(state=2, kept=lambda h, F: 0), "room for their weights"),
        (stack(state=14), "The gradients are missing"),
        (stack(state=32), "16 for each parameter"),
        (stack(matrices=1), "one matrix a layer"),
        (stack(kept=lambda h, F: 0), "That is the state alone"),
        (stack(kept=lambda h, F: h + F), "H or Z is missing"),
        (stack(kept=lambda h, F: 2 * F), "X is missing"),
        (stack(kept=lambda h, F: 2 * h + 2 * F), "Y is not kept"),
        (stack(kept=lambda h, F: (h + 2 * F) / 2), "16 bits here: 2 bytes."),
        (stack(kept=lambda h, F: 2 * (h + 2 * F)), "2 bytes, not 4"),
        (stack(kept=lambda h, F: 8 * (h + 2 * F)), "16 bytes are for a parameter"),
        (lambda tokens, h, F, card: stack()(tokens, h, F, card * 2**30 // 10**9), "card_bytes is in bytes already"),
        (
            lambda tokens, h, F, card: (card - 2 * tokens * (h + 2 * F)) // (32 * h * F),
            "the activations of one layer",
        ),
        (lambda *sizes: float("nan"), "yours says nan"),
        (lambda *sizes: float("inf"), "yours says inf"),
        (lambda *sizes: "all", "should return one number"),
    ],
)
def test_wrong_numbers_of_layers_hear_why(most_layers, said):
    refused(said, "1.4", most_layers)


def test_what_a_layer_keeps_is_what_autograd_saves():
    """X, H and Z in 2 bytes, and no more: the activations that exercise 1.4 counts."""
    h, F, tokens = 8, 24, 5
    ffn = FFN(h, F, bias=False, dtype=torch.bfloat16)
    weights = {weight.data_ptr() for weight in ffn.parameters()}
    saved = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ffn(torch.randn(tokens, h, dtype=torch.bfloat16, requires_grad=True))
    assert sum(tensor.nbytes for tensor in saved.values()) == 2 * tokens * (h + 2 * F)


# ---- stubs ----------------------------------------------------------------------------------------------------------


def hole(*sizes):
    value = None
    return value


def unwritten(*sizes): ...


def forgot_to_return(*sizes):
    value = 7  # noqa: F841


@pytest.mark.parametrize(
    "id, answers, said",
    [
        ("1.2", (hole, flops, mib), "replace None in ffn_bytes"),
        ("1.2", (n_bytes, hole, mib), "replace None in ffn_flops"),
        ("1.2", (n_bytes, flops, hole), "replace None in in_mib"),
        ("1.3", (unwritten,), "replace ... in state_bytes"),
        ("1.4", (unwritten,), "replace ... in most_layers"),
    ],
)
def test_stubs_are_recognised(id, answers, said):
    refused(f"{id} is not filled in yet: {said}", id, *answers)


def test_a_missing_return_is_no_stub():
    assert "not filled in" not in str(refused("Is there a return?", "1.4", forgot_to_return))
