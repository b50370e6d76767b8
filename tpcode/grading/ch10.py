"""Chapter 10, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from tpcode.config import Layout, ModelConfig
from tpcode.cost.memory import Plan, fits, kept_tensors, plan, pytorch_extras
from tpcode.grading.answers import stub_in
from tpcode.grading.compare import compare_one, looks_like
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.numbers import called, number
from tpcode.grading.ranks import SIZES, on_ranks
from tpcode.grading.registry import exercise
from tpcode.meter import saved_for_backward
from tpcode.model import ParallelTransformer

# ---- 10.1 -----------------------------------------------------------------------------------------------------------

# Bytes of each tensor of a layer for each of its s·b·h (or a·s²·b) numbers; 0: it is not kept.
STREAM = {
    "X": 2,
    "N": 2,
    "Q": 2,
    "K": 2,
    "V": 2,
    "M": 2,
    "O": 0,
    "mask of O": 1,
    "X2": 2,
    "N2": 2,
    "H": 8,
    "Z": 8,
    "Y": 0,
    "mask of Y": 1,
}
SCORES = {"S": 0, "P": 2, "mask of P": 1, "P2": 2}

OUTPUT = (
    "{name} is the result of a product. The product's backward needs its input and its weight; dropout needs its mask, "
    "and an addition nothing. Nobody asks for {name} again."
)
STREAM_IS_KEPT = "The addition that made {name} keeps nothing, but {name} is the norm's input, and a norm needs that."
PRODUCTS_INPUT = "{name} goes into a product with a weight, and the weight's gradient is {name}ᵀ times what comes back."
TWO_ACTIVATIONS = "This product has no weight: both factors are activations, and each one's gradient needs the other."
SCORES_ARE_NOT = "Softmax's backward needs its output alone, and scaling keeps nothing."
SOFTMAX = "Softmax's backward needs what softmax gave."
LEFT = "The product with V has two factors: dV needs what dropout left of P."
NO_MASK = "Backward has to drop what forward dropped: the mask is kept."
MASK_IS_A_BYTE = "A mask says yes or no: one byte for each entry, whatever the floats have."
GELU = "GeLU's slope depends on where it is taken, so its backward needs its input H."
NARROW = "{name} has F = 4h features for each token, and each has two bytes."
ELEMENTS = "These are numbers of values. A 16-bit float has two bytes."
IN_FP32 = "These are bytes of 32-bit floats. Here a float has two bytes."
ONE_ENTRY = "{name} has one float for each of its entries, of two bytes."

MASKS = ("mask of O", "mask of Y", "mask of P")


@exercise("10.1")
def thirty_four(sbh: Mapping, scores: Mapping) -> str:
    """Two dicts from a tensor's name to bytes: for each of s·b·h numbers, and for each of a·s²·b."""
    for name, typed, right in (("sbh", sbh, STREAM), ("scores", scores, SCORES)):
        _require_names(name, typed, right)
    typed, right = {**sbh, **scores}, {**STREAM, **SCORES}
    kept = {name: size for name, size in right.items() if size and name not in MASKS}
    for factor, sentence in ((0.5, ELEMENTS), (2, IN_FP32)):
        if all(typed[name] == factor * size for name, size in kept.items()):
            raise Wrong(sentence)
    for name, size in right.items():
        compare_one(name, typed[name], size, symptoms=_of_a_tensor(name), reveal=False)
    return "11 of attention, 19 of the FFN and 4 of the norms are 34, and 5 for each score."


def _require_names(name: str, typed, right: Mapping) -> None:
    if not isinstance(typed, Mapping) or set(typed) != set(right):
        raise Wrong(f"{name} should be a dict with the names {', '.join(right)}.")


def _of_a_tensor(name: str) -> list:
    wrong: dict[float, str] = {}
    if name in ("O", "Y"):
        wrong = dict.fromkeys((1, 2, 8), OUTPUT)
    elif name in ("X", "X2"):
        wrong = {0: STREAM_IS_KEPT}
    elif name in ("N", "N2", "M", "Z"):
        wrong = {0: PRODUCTS_INPUT}
    elif name in ("Q", "K", "V"):
        wrong = {0: TWO_ACTIVATIONS}
    elif name == "S":
        wrong = dict.fromkeys((1, 2), SCORES_ARE_NOT)
    elif name == "P":
        wrong = {0: SOFTMAX}
    elif name == "P2":
        wrong = {0: LEFT}
    elif name == "H":
        wrong = {0: GELU}
    elif name in MASKS:
        wrong = {0: NO_MASK, 2: MASK_IS_A_BYTE, 4: MASK_IS_A_BYTE}
    if name in ("H", "Z"):
        wrong |= dict.fromkeys((2, 4), NARROW)
    elif {**STREAM, **SCORES}[name] == 2:
        wrong |= dict.fromkeys((1, 4, 8), ONE_ENTRY)
    return [looks_like({name: value}, sentence.format(name=name)) for value, sentence in wrong.items()]


# ---- 10.2 -----------------------------------------------------------------------------------------------------------

FFN_SIZES = {"b": 3, "s": 8, "h": 16, "F": 64, "out": 10}  # 10 features come out: else X and Y would be alike

WEIGHTS = "The weights are counted. They are there whether backward comes or not; meant is what forward leaves behind."
H_OR_Z = "H or Z is missing: GeLU's backward needs H, the second product's needs Z."
NO_X = "X is missing: the first weight's gradient is Xᵀ dH."
WITH_Y = "Y is counted: nothing in here needs the output again."
OUTPUTS = "These are the outputs H, Z and Y. Kept is what backward needs: the inputs X, H and Z."
IN_ELEMENTS = "That is numbers. In bf16 each has two bytes."
IN_FOUR_BYTES = "That is with four bytes for each number. bf16 has two."
ONE_SEQUENCE = "That is one sequence. There are {b} of them."
ONE_TOKEN = "That is one token. There are b·s of them."
TWICE = (
    "Two layers read one input, and it is counted twice. It is in memory once: tell tensors apart by their storage's "
    "address, tensor.untyped_storage().data_ptr()."
)
COUNTS_WEIGHTS = "The module's parameters are in it. Leave out what has the address of a parameter's storage."
COUNTS_ELEMENTS = "It counts numbers, not bytes: storage.nbytes()."
COUNTS_TENSORS = "It counts tensors; asked for are their bytes."
LAST_ONLY = "Only the last tensor is in it: each needs a place of its own in `kept`."
PACK_RETURNS = "pack must return the tensor: what it returns is what backward gets, and backward failed."


class _TwoReaders(nn.Module):
    """Two layers of one input, and the output of its last forward."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 9)
        self.output: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.output = torch.cat([self.left(x), self.right(x)], -1)  # [n, 6] -> [n, 13]
        return self.output


@exercise("10.2")
def ffn_to_the_byte(predicted, bytes_kept: Callable) -> str:
    """`predicted`: bytes that the exercise's FFN keeps in bf16; `bytes_kept(module, x)`: the same, measured."""
    right = 2 * FFN_SIZES["b"] * FFN_SIZES["s"] * (FFN_SIZES["h"] + 2 * FFN_SIZES["F"])
    symptoms = [looks_like({"predicted": value}, text) for value, text in _wrong_predictions().items()]
    compare_one("predicted", predicted, right, symptoms=symptoms, reveal=False)
    if stub := stub_in(bytes_kept):
        raise Unfilled(f"replace {stub} in bytes_kept.")
    for dtype in (torch.bfloat16, torch.float32):
        _require_measured(bytes_kept, _ffn(dtype), _input_of_ffn(dtype), f"the FFN in {dtype}")
    readers = _TwoReaders()
    _require_measured(bytes_kept, readers, torch.randn(5, 6), "a module of two layers that read one input")
    _require_backward(readers)
    return f"{right:,} bytes predicted and measured, and no more for two layers that read the same."


def _ffn(dtype: torch.dtype) -> nn.Module:
    h, F, out = (FFN_SIZES[name] for name in ("h", "F", "out"))
    return nn.Sequential(nn.Linear(h, F, dtype=dtype), nn.GELU(), nn.Linear(F, out, dtype=dtype))


def _input_of_ffn(dtype: torch.dtype) -> Tensor:
    return torch.randn(FFN_SIZES["b"], FFN_SIZES["s"], FFN_SIZES["h"], dtype=dtype)


def _wrong_predictions() -> dict[float, str]:
    b, s, h, F, out = FFN_SIZES.values()
    n, weights = b * s, h * F + F * out
    right, biases = 2 * n * (h + 2 * F), F + out
    return {
        right + 2 * weights: WEIGHTS,
        right + 2 * (weights + biases): WEIGHTS,
        2 * n * (h + F): H_OR_Z,
        2 * n * (h + F + out): H_OR_Z,
        2 * n * 2 * F: NO_X,
        2 * n * (h + 2 * F + out): WITH_Y,
        2 * n * (2 * F + out): OUTPUTS,
        right / 2: IN_ELEMENTS,
        2 * right: IN_FOUR_BYTES,
        right / b: ONE_SEQUENCE.format(b=b),
        right / n: ONE_TOKEN,
    }


def _require_measured(bytes_kept: Callable, module: nn.Module, x: Tensor, where: str) -> None:
    with saved_for_backward(module) as meter:
        module(x)
    got, right, size = number("bytes_kept", bytes_kept, (module, x)), meter.nbytes, x.element_size()
    if got == right:
        return
    matrices = [p.nbytes for p in module.parameters() if p.dim() == 2]
    # torch does not keep the first matrix: no gradient of the input is wanted.
    wrong = {
        right + sum(matrices): COUNTS_WEIGHTS,
        right + matrices[-1]: COUNTS_WEIGHTS,
        right + x.nbytes: TWICE,
        right / size: COUNTS_ELEMENTS,
        len(meter.saved): COUNTS_TENSORS,
        meter.saved[-1].nbytes: LAST_ONLY,
    }
    raise Wrong(f"bytes_kept of {where} is {right:,}, yours is {got:,}.\n{wrong.get(got, '')}".rstrip())


def _require_backward(module: _TwoReaders) -> None:
    try:
        module.output.sum().backward()
    except Exception as error:
        raise Wrong(f"{PACK_RETURNS} ({type(error).__name__})") from None


# ---- 10.3 -----------------------------------------------------------------------------------------------------------

BLOCK = {"b": 2, "s": 12, "h": 32, "a": 8}  # two heads a rank at t = 4: with one K is a view, and keeps more
KEPT_NAMES = ("X", "N", "Q", "K", "V", "P", "mask of P", "P2", "M", "mask of O", "X2", "N2", "H", "Z", "mask of Y")

EVERYTHING = (
    "Everything is divided by t. But between blocks every rank has the whole residual stream, and what a norm, a "
    "column split or dropout keeps of it is whole as well."
)
NOTHING = "Nothing is divided. A rank has a/t heads and F/t features between a column and a row split."
NORMS = "{name} is a norm's input. A norm needs all h features of a token, and every rank norms every token."
COLUMNS = "{name} goes into a column split: every rank multiplies all of it with columns of its own."
ROW_MASKS = (
    "{name} belongs to dropout after the sum of a row split: the sum is on every rank, and all of them drop the same."
)
HEADS = "{name} is of single heads, and a rank has a/t of them."
WIDTH = "{name} lies between the column and the row split: a rank has F/t features of it."
WHY_WHOLE = dict.fromkeys(("X", "X2"), NORMS)
WHY_WHOLE |= dict.fromkeys(("N", "N2"), COLUMNS)
WHY_WHOLE |= dict.fromkeys(("mask of O", "mask of Y"), ROW_MASKS)
TIMES_T = "{name} is multiplied by t."


@exercise("10.3")
def what_stays_whole(on_a_rank: Callable) -> str:
    """`on_a_rank(kept, t)`: a dict of bytes on one device to one of bytes on each of t ranks."""
    whole = on_one_device()
    answers = {t: called("on_a_rank", on_a_rank, (dict(whole), t)) for t in SIZES}
    for t, answer in answers.items():
        if not isinstance(answer, Mapping) or set(answer) != set(whole):
            raise Wrong(f"on_a_rank(kept, {t}) should return a dict with the names of kept.")
    for t, answer in answers.items():
        _require_shares(answer, whole, t)
    measured = {t: on_ranks(_measured, t) for t in SIZES}
    same = all(kept == sum(answers[t].values()) for t, ranks in measured.items() for kept in ranks)
    meter = (
        "the meter says the same on 1, 2 and 4 ranks" if same else "this torch keeps other bytes on 1, 2 and 4 ranks"
    )
    return f"10 stay whole, 24 and the scores are divided; {meter}."


def on_one_device() -> dict[str, int]:
    """What the layer of exercise 10.3 keeps on one device, in bytes by name."""
    return _kept(1)


def _kept(t: int) -> dict[str, int]:
    kept = kept_tensors(_block(), BLOCK["b"], BLOCK["s"], Layout(tp=t))
    return {name: tensor.nbytes for name, tensor in zip(KEPT_NAMES, kept, strict=True)}


def _block() -> ModelConfig:
    sizes = {"hidden": BLOCK["h"], "ffn": 4 * BLOCK["h"], "heads": BLOCK["a"], "max_seq": BLOCK["s"]}
    return ModelConfig(family="gpt2", layers=1, vocab=8, dropout=0.1, **sizes)


def _measured() -> int:
    """What a layer of that size keeps on this rank, without the norms' statistics and the causal mask."""
    config, b, s = _block(), BLOCK["b"], BLOCK["s"]
    block = ParallelTransformer(config, core="explicit", dtype=torch.bfloat16).blocks[0]
    with saved_for_backward(block) as meter:
        block(torch.ones(b, s, BLOCK["h"], dtype=torch.bfloat16, requires_grad=True))
    return meter.nbytes - sum(pytorch_extras(config, b, s).values())


def _require_shares(answer: Mapping, whole: Mapping, t: int) -> None:
    right = _kept(t)
    if all(answer[name] == right[name] for name in right):
        return
    if t > 1 and all(answer[name] == whole[name] / t for name in whole):
        raise Wrong(f"at t = {t}: {EVERYTHING}")
    if t > 1 and all(answer[name] == whole[name] for name in whole):
        raise Wrong(f"at t = {t}: {NOTHING}")
    for name, size in right.items():
        why = WHY_WHOLE.get(name, WIDTH if name in ("H", "Z") else HEADS)
        symptoms = [
            looks_like({name: whole[name] / t if name in WHY_WHOLE else whole[name]}, why.format(name=name)),
            looks_like({name: whole[name] * t}, TIMES_T.format(name=name)),
        ]
        compare_one(name, answer[name], size, where=f"at t = {t}", symptoms=symptoms)


# ---- 10.4 -----------------------------------------------------------------------------------------------------------

SEQUENCE = 2048
SIZES_TO_TRY = (1, 2, 4, 8)
GB = 10**9
# By card and b, chosen so that no answer hangs on what "about 16 bytes" leaves out.
CASES = ((80, 4), (80, 1), (80, 5), (80, 16), (141, 4), (141, 1), (141, 8), (141, 16), (48, 1), (40, 1), (80, 128))
NOTHING_FITS = "nothing"

FULL_FIRST = (
    "Wherever recomputation is needed you take full. It is the last resort: selective recomputation drops the scores, "
    "which are most of what is kept, and runs {selective:.1%} of the FLOPs again; full runs {full:.0%} again."
)
CARDS_FIRST = "You take the smallest t that fits, and pay in FLOPs. Fewest FLOPs come first, then the smallest t."
ALL_DIVIDES = "You divide all activations by t. Of the 34 bytes 10 stay whole on every rank."
STATE_ALONE = "That is what fits by its state alone. Activations come on top."
NO_STATE = "The model's state is missing: 16 bytes a parameter, divided by t."
STATE_WHOLE = "The state is divided by t too: each rank holds about 16 bytes · parameters / t."
ONE_LAYER = "The activations of one layer are counted. Each of the {L} layers keeps its own until its backward."
ONE_SEQ = "That is for one sequence. The activations are b times as much."
WEIGHTS_ALONE = "With 2 bytes a parameter you have room for the weights, not for training them: that takes 16."
IN_GIB = "A card of 80 GB has 80 · 10⁹ bytes, not 80 · 2³⁰."
LARGEST = "You take the largest t throughout. A smaller one that fits without more recomputation takes fewer cards."
TOO_LARGE = "It needs {total:.1f} GB: {state:.1f} of state and {rest:.1f} of activations."
CHEAPER = "It fits, but {cheaper} fits as well, and runs {less:.1%} of the FLOPs again instead of {more:.1%}."
FEWER = "It fits, but {cheaper} runs no more FLOPs again, and takes {t} cards instead of {cards}."
NONE_AT_ALL = (
    "Nothing fits here: at t = 8 the state alone takes {state:.1f} GB, and with full recomputation it is {total:.1f}."
)
SOMETHING = "Something fits here."


def model_22b() -> ModelConfig:
    """The 22B model of K22, table 3, with dropout as in its formulas."""
    return replace(ModelConfig.preset("k22-22b"), dropout=0.1)


@exercise("10.4")
def cheapest_that_fits(cheapest: Callable) -> str:
    """`cheapest(card_bytes, b)`: a pair (t, recompute), or "nothing"."""
    answers = [_as_choice(called("cheapest", cheapest, (card * GB, b)), card, b) for card, b in CASES]
    right = [_planned(card * GB, b) for card, b in CASES]
    if answers == right:
        return "the planner takes the same, on cards of 40 to 141 GB."
    (card, b), got, want = next(case for case in zip(CASES, answers, right) if case[1] != case[2])
    where = f"cheapest({card} * 10**9, b={b}): {_said(got)} is not right."
    raise Wrong(f"{where}\n{_slip(answers) or _hint(card, b, got, want)}")


def _as_choice(answer, card: int, b: int) -> tuple | str:
    if isinstance(answer, str) and answer == NOTHING_FITS:
        return NOTHING_FITS
    if isinstance(answer, tuple | list) and len(answer) == 2:
        t, recompute = answer
        if t in SIZES_TO_TRY and recompute in ("none", "selective", "full"):
            return int(t), recompute
    raise Wrong(
        f'cheapest({card} * 10**9, b={b}) returned {answer!r:.60}; it should return a pair such as (4, "selective"), '
        f'with t among {", ".join(map(str, SIZES_TO_TRY))} and "none", "selective" or "full"; or "nothing".'
    )


def _said(choice: tuple | str) -> str:
    return f'"{choice}"' if isinstance(choice, str) else f't = {choice[0]} with recomputation "{choice[1]}"'


def _planned(card_bytes: int, b: int) -> tuple | str:
    found = fits(model_22b(), card_bytes, b, SEQUENCE, tp_sizes=SIZES_TO_TRY)
    return (found[0].layout.tp, found[0].recompute) if found else NOTHING_FITS


def _plan(t: int, recompute: str, b: int) -> Plan:
    return plan(model_22b(), b, SEQUENCE, Layout(tp=t), recompute=recompute)


def _hint(card: int, b: int, got: tuple | str, want: tuple | str) -> str:
    if want == NOTHING_FITS:
        least = _plan(8, "full", b)
        return NONE_AT_ALL.format(state=least.state.total / GB, total=least.total / GB)
    if got == NOTHING_FITS:
        return SOMETHING
    mine, cheaper = _plan(*got, b), _plan(*want, b)
    if mine.total > card * GB:
        state = mine.state.total / GB
        return TOO_LARGE.format(total=mine.total / GB, state=state, rest=mine.total / GB - state)
    if mine.extra_flops > cheaper.extra_flops:
        return CHEAPER.format(cheaper=_said(want), less=cheaper.extra_flops, more=mine.extra_flops)
    return FEWER.format(cheaper=_said(want), t=want[0], cards=got[0])


# ---- how a learner may go wrong, all cases together -----------------------------------------------------------------


def estimate(
    t: int,
    recompute: str,
    b: int,
    *,
    each: int = 16,
    whole: int = 10,
    layers: int | None = None,
    state_over: bool = True,
    rebuilt: bool = True,
) -> float:
    """State and activations by the chapter's formulas, without what "about" leaves out. The options are slips."""
    config = model_22b()
    h, L = config.hidden, config.layers if layers is None else layers
    sbh, scores = SEQUENCE * b * h, 5 * config.heads * SEQUENCE**2 * b / t
    layer = sbh * (whole + (34 - whole) / t) + scores
    kept = {"none": layer, "selective": layer - scores, "full": 2 * sbh}[recompute]
    again = layer - kept if rebuilt and L else 0
    return each * config.num_parameters / (t if state_over else 1) + L * kept + again


def chosen(card_bytes: float, b: int, order: str = "flops", recomputes=("none", "selective", "full"), **slips):
    """The first that fits, in an order: "flops" first, "cards" first, or "largest" t first."""
    ways = [(t, recompute) for recompute in recomputes for t in SIZES_TO_TRY]
    orders = {
        "flops": lambda way: (recomputes.index(way[1]), way[0]),
        "cards": lambda way: (way[0], recomputes.index(way[1])),
        "largest": lambda way: (recomputes.index(way[1]), -way[0]),
    }
    for t, recompute in sorted(ways, key=orders[order]):
        if estimate(t, recompute, b, **slips) <= card_bytes:
            return t, recompute
    return NOTHING_FITS


SLIPS: tuple[tuple[dict, str], ...] = (
    ({"recomputes": ("none", "full")}, FULL_FIRST),
    ({"recomputes": ("full", "selective", "none")}, FULL_FIRST),
    ({"order": "cards"}, CARDS_FIRST),
    ({"order": "largest"}, LARGEST),
    ({"whole": 0}, ALL_DIVIDES),
    ({"layers": 0}, STATE_ALONE),
    ({"each": 0}, NO_STATE),
    ({"each": 2}, WEIGHTS_ALONE),
    ({"state_over": False}, STATE_WHOLE),
    ({"layers": 1}, ONE_LAYER),
    ({"gib": True}, IN_GIB),
    ({"one": True}, ONE_SEQ),
)


def _slip(answers: list) -> str:
    for options, text in SLIPS:
        if answers == slipped(**options):
            config = model_22b()
            selective, full = (_plan(8, recompute, 4).extra_flops for recompute in ("selective", "full"))
            return text.format(L=config.layers, selective=selective, full=full)
    return ""


def slipped(*, gib: bool = False, one: bool = False, **options) -> list:
    """The answers to all cases with one slip."""
    unit = 2**30 if gib else GB
    return [chosen(card * unit, 1 if one else b, **options) for card, b in CASES]
