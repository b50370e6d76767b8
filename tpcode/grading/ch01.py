"""Chapter 1, the FFN on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tpcode.config import PRESETS
from tpcode.grading.answers import blanks
from tpcode.grading.compare import Symptom, as_tensor, compare_one, looks_like
from tpcode.grading.failures import Wrong
from tpcode.grading.numbers import called, number, require_number
from tpcode.grading.registry import exercise

# ---- 1.1 ------------------------------------------------------------------------------------------------------------

# Two tokens, h = 3, F = 2. Feature 0 is active for both tokens, feature 1 for token 1 only, so both the sum over tokens
# and the mask of relu show in the result. No listed wrong variant gives a right matrix.
X = ((-1, 4, 0), (1, -1, -1))
A = ((2, 2), (1, 0), (-2, -2))
B = ((0, -1, 2), (3, 3, -2))
DY = ((-1, 0, -1), (-1, 1, 3))

PER_TOKEN = "These are the tokens' gradients one by one. A weight is used by every token, so its gradient is their sum."
ONE_TOKEN = "This is the gradient from token {token} alone. A weight's gradient sums over the tokens."
MEAN = "This is the mean over the tokens. A weight's gradient is their sum."


@exercise("1.1")
def ffn_gradients_by_hand(dA, dB, dX) -> str:
    """`dA` [3, 2], `dB` [2, 3] and `dX` [2, 3] as nested lists, arrays or tensors."""
    x, a, b, dy = (torch.tensor(matrix, dtype=torch.float64) for matrix in (X, A, B, DY))
    right = _autograd(x, a, b, dy)
    symptoms = _gradient_symptoms(x, a, b, dy)
    # dB first: it needs nothing but Z and dY; dX last, for it needs dH.
    for name, got in (("dB", dB), ("dA", dA), ("dX", dX)):
        if name != "dX":
            _refuse_one_gradient_per_token(name, got, right[name].shape)
        compare_one(name, got, right[name], symptoms=symptoms, reveal=False)
    return "dA, dB and dX are autograd's, to the last integer."


def _autograd(x: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, a, b = (matrix.clone().requires_grad_() for matrix in (x, a, b))
    (torch.relu(x @ a) @ b).backward(dy)
    return {"dX": x.grad, "dA": a.grad, "dB": b.grad}


def _refuse_one_gradient_per_token(name: str, got, shape: torch.Size) -> None:
    if not blanks(got):
        try:
            given = as_tensor(got)
        except (TypeError, ValueError, RuntimeError):
            return  # compare_one says what is wrong with it
        if given.dim() == 3 and given.shape[0] == len(X) and given.shape[1:] in (shape, shape[::-1]):
            raise Wrong(f"{name} has shape {list(given.shape)}, not {list(shape)}.\n{PER_TOKEN}")


def _gradient_symptoms(x: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> list[Symptom]:
    h = x @ a  # [2, 3] [3, 2] -> [2, 2]
    z, dz = torch.relu(h), dy @ b.T  # [2, 2], [2, 3] [3, 2] -> [2, 2]
    dh = dz * (h > 0)
    right = {"dB": z.T @ dy, "dA": x.T @ dh}
    each = [{"dB": z[[i]].T @ dy[[i]], "dA": x[[i]].T @ dh[[i]]} for i in range(len(x))]
    return [
        *(looks_like(one, ONE_TOKEN.format(token=token)) for token, one in enumerate(each)),
        looks_like({name: sum_ / len(x) for name, sum_ in right.items()}, MEAN),
        looks_like({"dB": z @ dy}, "This is Z dY. The sum has to run over the tokens, Z's rows: Zᵀ dY."),
        looks_like({"dB": h.T @ dy}, "This is Hᵀ dY. What met B was Z = relu(H)."),
        looks_like({"dA": x.T @ dz, "dX": dz @ a.T}, "relu's mask is missing: dH is dZ where H > 0, and 0 elsewhere."),
        looks_like({"dA": x.T @ (dz * z), "dX": (dz * z) @ a.T}, "relu's derivative is 1 where H > 0, not H."),
        looks_like({"dA": x.T @ dh.T, "dX": dh.T @ a.T}, "dH is transposed here: its rows are the tokens."),
    ]


# ---- 1.2 ------------------------------------------------------------------------------------------------------------

# The gated one first: with three matrices, one of them and half of the total are not the same.
MODELS = ("smollm2-135m", "gpt3-175b")
TOKENS = 1000
MIB = 2**20


@exercise("1.2")
def bytes_and_flops(ffn_bytes: Callable, ffn_flops: Callable, in_mib: Callable) -> str:
    """`ffn_bytes(h, F, gated)`, `ffn_flops(tokens, h, F, gated)`, `in_mib(n_bytes)`, each a number."""
    for name in MODELS:
        sizes = PRESETS[name]
        h, F, gated = sizes.hidden, sizes.ffn, sizes.gated
        matrices = 3 if gated else 2
        require_number(
            "ffn_bytes", ffn_bytes, (h, F, gated), 2 * matrices * h * F, name, _bytes_that_are_wrong(h, F, matrices)
        )
        require_number(
            "ffn_flops",
            ffn_flops,
            (TOKENS, h, F, gated),
            2 * TOKENS * matrices * h * F,
            name,
            _flops_that_are_wrong(h, F, matrices),
        )
    right = 128.0
    wrong = {
        right * MIB / 1e6: "That is MB, of 10⁶ bytes. A MiB is 2²⁰ bytes, 5% more.",
        right * MIB / 2**30: "That is GiB. A MiB is 2²⁰ bytes.",
        right * MIB / 1000 / 1024: "A MiB is 1024 · 1024 bytes, not 1000 · 1024.",
        right * MIB * MIB: "Bytes to MiB is a division: a MiB is many bytes.",
    }
    require_number("in_mib", in_mib, (128 * MIB,), right, "one 16-bit matrix of 4096 by 16384", wrong)
    return "bytes and FLOPs of GPT-3's and SmolLM2's FFN, and MiB."


def _bytes_that_are_wrong(h: int, F: int, matrices: int) -> dict[float, str]:
    right, one = 2 * matrices * h * F, 2 * h * F
    return {
        one: f"That is one matrix; this FFN has {matrices}. The 2 in 2·h·F is bytes, not matrices.",
        **_wrong_count(one, matrices),
        matrices * h * F: "That is the number of parameters. In 16 bits each has 2 bytes.",
        2 * right: "That is 4 bytes a parameter; 16 bits are 2 bytes.",
        8 * right: "That is bits: 8 of them are a byte.",
        right / 1e6: "That is MB; bytes are asked for.",
        right / MIB: "That is MiB; bytes are asked for.",
    }


def _flops_that_are_wrong(h: int, F: int, matrices: int) -> dict[float, str]:
    right, one = 2 * TOKENS * matrices * h * F, 2 * TOKENS * h * F
    return {
        right / 2: "That counts a multiply-add as one. It is a multiplication and an addition: 2 FLOPs.",
        one: f"That is one of the {matrices} products.",
        **_wrong_count(one, matrices),
        2 * right: "That is backward's count. Forward is half of it.",
        3 * right: "That is forward and backward together. Forward is a third of it.",
        right / TOKENS: "That is for one token.",
    }


def _wrong_count(one: int, matrices: int) -> dict[float, str]:
    """With two matrices counted as three, or three as two."""
    if matrices == 3:
        return {2 * one: "That is two matrices. A gated FFN has three: gate, up and down."}
    return {3 * one: "That is three matrices. Without a gate there are two."}


# ---- 1.3 ------------------------------------------------------------------------------------------------------------

BYTES_EACH = {
    "fp32": {"weights": 4, "gradients": 4, "exp_avg": 4, "exp_avg_sq": 4},
    "mixed": {"weights": 2, "gradients": 2, "master_weights": 4, "exp_avg": 4, "exp_avg_sq": 4},
}
COUNT = 1_000_003  # parameters; odd and prime, so that no rounding to a block goes unseen

TERM_HINTS = {
    ("fp32", "master_weights"): "In fp32 the weights are their own master copy: there is no second one.",
    ("mixed", "weights"): "The weights that forward and backward use are in 16 bits: 2 bytes.",
    ("mixed", "gradients"): "In this recipe the gradients are in 16 bits like the weights: 2 bytes.",
    ("mixed", "master_weights"): "Adam updates a copy of the weights in fp32: 4 bytes.",
    ("mixed", "exp_avg"): "Adam's averages stay in fp32: 4 bytes.",
    ("mixed", "exp_avg_sq"): "Adam's averages stay in fp32: 4 bytes.",
}


@exercise("1.3")
def state_term_by_term(state_bytes: Callable) -> str:
    """`state_bytes(n, recipe)` for recipe "fp32" or "mixed": a dict from the term's name to bytes."""
    answers = {recipe: called("state_bytes", state_bytes, (COUNT, recipe)) for recipe in BYTES_EACH}
    for recipe, answer in answers.items():
        _require_dict(recipe, answer)
    if answers["fp32"] == answers["mixed"]:
        raise Wrong(
            "both recipes have the same terms in your answer. They have the same total, 16 bytes a parameter, but not "
            "the same terms: mixed precision has 16-bit weights and gradients, and an fp32 copy of the weights."
        )
    if _in_bytes("fp32") == answers["mixed"] and _in_bytes("mixed") == answers["fp32"]:
        raise Wrong('the two recipes are exchanged: "mixed" is the one with master weights.')
    for recipe, answer in answers.items():
        _require_terms(recipe, answer)
    return "every term of both recipes."


def _in_bytes(recipe: str) -> dict[str, int]:
    return {name: COUNT * each for name, each in BYTES_EACH[recipe].items()}


def _require_dict(recipe: str, answer) -> None:
    if isinstance(answer, Mapping):
        return
    hint = " It is the total; the terms are asked for, by name." if answer == 16 * COUNT else ""
    raise Wrong(f'state_bytes({COUNT}, "{recipe}") returned {answer!r:.60}; it should return a dict.{hint}')


def _require_terms(recipe: str, answer: Mapping) -> None:
    call, right = f'state_bytes({COUNT}, "{recipe}")', BYTES_EACH[recipe]
    if strange := [name for name in answer if name not in BYTES_EACH["mixed"]]:
        raise Wrong(f"{call} has a term {strange[0]!r}; the names are {', '.join(BYTES_EACH['mixed'])}.")
    terms = {name: answer.get(name, 0) for name in BYTES_EACH["mixed"]}
    if terms == right | {"master_weights": right.get("master_weights", 0)}:
        raise Wrong(f"{call} is right for one parameter; multiply by n.")
    for name, got in terms.items():
        wanted = right.get(name, 0) * COUNT
        if got != wanted:
            raise Wrong(
                f"{call}: {name} is {wanted:,} bytes, yours is {got:,}.\n{_term_hint(recipe, name, got)}".rstrip()
            )


def _term_hint(recipe: str, name: str, got: float) -> str:
    if name == "gradients" and got == 0:
        return "The 16 bytes include the gradient: it is there when the optimizer steps."
    if name == "exp_avg" and got == 8 * COUNT:
        return "Adam keeps two averages, exp_avg and exp_avg_sq, of 4 bytes each."
    if name == "exp_avg_sq" and got == 0:
        return "Adam keeps two averages: of the gradient, and of its square."
    return TERM_HINTS.get((recipe, name), "")


# ---- 1.4 ------------------------------------------------------------------------------------------------------------

H, WIDTH = 4096, 16_384
CARD, NODE = 80 * 10**9, 640 * 10**9
# In the memory of eight cards a forgotten small term, such as X, is more than one layer.
CASES = ((0, CARD), (8192, CARD), (8192, NODE))


@exercise("1.4")
def layers_that_train(most_layers: Callable) -> str:
    """`most_layers(tokens, h, F, card_bytes)`: how many FFNs train, an integer; tokens = 0 is the state alone."""
    answers = [number("most_layers", most_layers, (tokens, H, WIDTH, card)) for tokens, card in CASES]
    for (tokens, card), got in zip(CASES, answers, strict=True):
        right = _most(tokens, card)
        if not abs(got - right) <= 1:  # also for nan
            what = f"the activations of {tokens} tokens" if tokens else "the state alone"
            text = f"with {what}, {right} layers fit in {card / 1e9:g} GB, and yours says {got:g}."
            raise Wrong(f"{text}\n{_layers_hint(answers)}".rstrip())
    return f"{_most(0, CARD)} layers by their state alone, {_most(8192, CARD)} with the activations of 8192 tokens."


def _most(
    tokens: int,
    card: int,
    *,
    bytes_each: int = 16,
    kept: int = H + 2 * WIDTH,
    width: int = 2,
    once: bool = False,
    matrices: int = 2,
) -> int:
    """Layers that fit: state at `bytes_each` a parameter, `kept` numbers of `width` bytes a token, in every layer or
    `once`."""
    state, activations = bytes_each * matrices * H * WIDTH, width * tokens * kept
    return (card - activations) // state if once else card // (state + activations)


WEIGHTS_ONLY = (
    "That is as many as have room for their weights. Training also keeps gradients, master weights and Adam's "
    "averages: 16 bytes a parameter, not 2."
)
# Slips, as they show in all cases together: in one case alone two of them can give the same number of layers.
SLIPS = (
    ({"bytes_each": 2, "kept": 0}, WEIGHTS_ONLY),
    ({"bytes_each": 2}, WEIGHTS_ONLY),
    ({"bytes_each": 14}, "The gradients are missing: 2 of the 16 bytes."),
    ({"matrices": 1}, "That is one matrix a layer; an FFN has two."),
    ({"bytes_each": 32}, "That is 16 times the bytes of the weights; it is 16 for each parameter."),
    ({"kept": 0}, "That is the state alone. Every layer also keeps X, H and Z until its backward."),
    ({"once": True}, "That is the activations of one layer. Every layer keeps its own."),
    ({"kept": H + WIDTH}, "H or Z is missing: GeLU's backward needs H, B's gradient needs Z."),
    ({"kept": 2 * WIDTH}, "X is missing: A's gradient needs it."),
    ({"kept": 2 * H + 2 * WIDTH}, "Y is not kept by this layer: none of its gradients needs it."),
    ({"width": 1}, "An activation has 16 bits here: 2 bytes."),
    ({"width": 4}, "An activation has 16 bits here: 2 bytes, not 4."),
    ({"width": 16}, "16 bytes are for a parameter. An activation is one 16-bit number."),
)


def _layers_hint(answers: list[float]) -> str:
    def fits(options: dict) -> bool:
        wrong = [_most(*case, **options) for case in CASES]
        return all(value <= got < value + 1 for value, got in zip(wrong, answers, strict=True))

    def in_gib(got: float, case: tuple[int, int]) -> bool:
        value = _most(case[0], round(case[1] * 2**30 / 1e9))
        return value <= got < value + 1

    if all(map(in_gib, answers, CASES)):
        return "card_bytes is in bytes already: 80 GB are 80 · 10⁹."
    return next((text for options, text in SLIPS if fits(options)), "")
