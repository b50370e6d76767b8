"""Chapter 8, a whole transformer."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tpcode.comm import copy_to_tp, group_rank, group_size, record, reduce_from_tp
from tpcode.config import ModelConfig
from tpcode.dense import GPT2, explicit_attention, gelu_tanh
from tpcode.grading.answers import blanks, stub_in
from tpcode.grading.compare import Difference, compare, compare_one, looks_like
from tpcode.grading.failures import Unfilled, Wrong
from tpcode.grading.ranks import SIZES, on_ranks, require_calls, require_output, require_returned
from tpcode.grading.registry import exercise
from tpcode.model import ParallelTransformer
from tpcode.runtime import RankError
from tpcode.runtime.notes import watch


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


# ---- 8.1 ------------------------------------------------------------------------------------------------------------

STEP = {"b": 2, "s": 5, "h": 16, "L": 2, "t": 4, "V": 24}  # and 4-byte floats
COUNTS = ("forward_large", "forward_small", "backward_large", "backward_small", "recompute_large")

LAYERS_ONLY = "These are the layers alone. {end}"
EMBEDDING = "In front of them the embedding adds the ranks' rows, and that is one more."
HEAD = "Backward begins at the head: every rank used X, with its own columns, and the parts of dX are added."
ONE_A_LAYER = "A layer is two blocks, attention and FFN, and each has one each way. {end}"
ONLY_BOTH_ENDS = "One all-reduce for each layer is missing: a layer is two blocks."
BOTH_TOGETHER = "That is forward and backward together."
NO_LOSS = "The loss needs numbers from all ranks in forward: a maximum and two sums."
TWO_SUMS = "You have the two sums of the loss. The largest logit of all ranks comes before them."
LOSS_IS_SILENT = "Backward through the loss is silent: forward has brought each rank all that it needs."
BOTH_ENDS = "The embedding's backward is silent: a rank has all of dX, and keeps what concerns its own rows."
NOT_THE_END = (
    "Only the layers are run again. What recomputation keeps of them is the first layer's input, and it is there."
)
AGAIN_ONE = "Each layer runs its whole forward again, attention and FFN."
AGAIN_ALL = "This is what a layer's step sends in all. Asked for is what is sent once more."
ELEMENTS = "That is elements. A 32-bit float has 4 bytes."
NO_SMALL = "The three small ones are missing: b·s numbers each."
SMALL_AS_LARGE = "The small ones are [b, s], without h."
LAYERS_BYTES = "These are the bytes of 4L all-reduces. The two ends are missing."
LARGE_4L = "The embedding's and the head's all-reduce are missing."
DOUBLED = "That is twice the payload, what many ranks send. On 4 ranks it is 2·3/4 of it."
ONE_PASS = "That is (t - 1)/t of the payload. An all-reduce is two passes, a reduce-scatter and an all-gather."
PAYLOAD_AS_WIRE = "This is the payload. On a ring of 4 ranks each rank sends 2(t - 1)/t of it."
WIRE_AS_PAYLOAD = "This is the wire. The payload is the size of what is summed."
ALL_RANKS = "That is what all four ranks send together. It is asked for one."
OTHER_DTYPE = "That is with 8-byte floats. Here they have 4 bytes."


@exercise("8.1")
def ledger_of_a_step(
    forward_large, forward_small, backward_large, backward_small, recompute_large, payload_bytes, wire_bytes
) -> str:
    """Single numbers: calls of one step by phase and shape, [b, s, h] or [b, s]; bytes of a step without recomputation,
    the wire's for one rank."""
    typed = dict(zip(COUNTS, (forward_large, forward_small, backward_large, backward_small, recompute_large)))
    typed |= {"payload_bytes": payload_bytes, "wire_bytes": wire_bytes}
    right, symptoms = step_by_ledger(), _step_symptoms()
    for name, want in right.items():
        compare_one(name, typed[name], want, symptoms=symptoms, tolerance=1e-9, reveal=False)
    return "10 large and 3 small, 4 more with recomputation, and the ledger of four ranks has the same bytes."


@cache
def step_by_ledger() -> dict[str, float]:
    """What a step of a model of `STEP`'s sizes sends, as rank 0 of four ranks has noted it."""
    plain, again = on_ranks(lambda: [_step_of_a_model(recompute) for recompute in (False, True)], STEP["t"])[0]
    large, small = (STEP["b"], STEP["s"], STEP["h"]), (STEP["b"], STEP["s"])

    def calls(ledger, phase: str, shape: tuple[int, ...]) -> int:
        return sum(event.phase == phase and event.shape == shape for event in ledger.events)

    return {
        "forward_large": calls(plain, "forward", large),
        "forward_small": calls(plain, "forward", small),
        "backward_large": calls(plain, "backward", large),
        "backward_small": calls(plain, "backward", small),
        "recompute_large": calls(again, "recompute", large),
        "payload_bytes": plain.payload_bytes(),
        "wire_bytes": float(plain.wire_bytes()),
    }


def _step_of_a_model(recompute: bool):
    config = _config(STEP["h"], STEP["L"], STEP["V"], STEP["s"])
    model = ParallelTransformer(config, recompute=recompute)
    ids = torch.zeros(STEP["b"], STEP["s"], dtype=torch.long)
    with record() as ledger:
        model.loss(ids, ids).backward()
    return ledger


def _step_symptoms() -> list:
    b, s, h, L, t = (STEP[name] for name in "bshLt")
    large, small = 4 * b * s * h, 4 * b * s
    payload = (4 * L + 2) * large + 3 * small
    wrong = [
        ("forward_large", 2 * L, LAYERS_ONLY.format(end=EMBEDDING)),
        ("forward_large", L, ONE_A_LAYER.format(end=EMBEDDING)),
        ("forward_large", L + 1, ONLY_BOTH_ENDS),
        ("forward_large", 2 * (2 * L + 1), BOTH_TOGETHER),
        ("forward_large", 4 * L, BOTH_TOGETHER),
        ("forward_small", 0, NO_LOSS),
        ("forward_small", 2, TWO_SUMS),
        ("backward_large", 2 * L, LAYERS_ONLY.format(end=HEAD)),
        ("backward_large", L, ONE_A_LAYER.format(end=HEAD)),
        ("backward_large", L + 1, ONLY_BOTH_ENDS),
        ("backward_large", 2 * L + 2, BOTH_ENDS),
        ("backward_small", 3, LOSS_IS_SILENT),
        ("backward_small", 2, LOSS_IS_SILENT),
        ("backward_small", 1, LOSS_IS_SILENT),
        ("recompute_large", 2 * L + 1, NOT_THE_END),
        ("recompute_large", L, AGAIN_ONE),
        ("recompute_large", 6 * L, AGAIN_ALL),
        ("recompute_large", 6 * L + 2, AGAIN_ALL),
        ("payload_bytes", payload // 4, ELEMENTS),
        ("payload_bytes", payload - 3 * small, NO_SMALL),
        ("payload_bytes", (4 * L + 5) * large, SMALL_AS_LARGE),
        ("payload_bytes", 4 * L * large, LAYERS_BYTES),
        ("payload_bytes", 4 * L * large + 3 * small, LARGE_4L),
        ("payload_bytes", 2 * payload, OTHER_DTYPE),
        ("payload_bytes", payload * 3 / 2, WIRE_AS_PAYLOAD),
        ("wire_bytes", payload, PAYLOAD_AS_WIRE),
        ("wire_bytes", 2 * payload, DOUBLED),
        ("wire_bytes", float(payload * Fraction(t - 1, t)), ONE_PASS),
        ("wire_bytes", t * payload * 3 / 2, ALL_RANKS),
        ("wire_bytes", payload * 3, OTHER_DTYPE),
    ]
    return [looks_like({name: value}, sentence) for name, value, sentence in wrong]


def _config(h: int, L: int, V: int, s: int) -> ModelConfig:
    return ModelConfig(family="gpt2", hidden=h, ffn=4 * h, heads=4, layers=L, vocab=V, max_seq=s, tied=False)


# ---- 8.2 ------------------------------------------------------------------------------------------------------------


class _Part(nn.Module):
    """One rank's part of a block, with no collective: [b, s, h] -> a summand of the output, [b, s, h].

    `bias` is the row layer's: whole, on every rank, and not yet added.
    """

    def __init__(self, column: Tensor, column_bias: Tensor, row: Tensor, bias: Tensor):
        super().__init__()
        shards = (column, column_bias, row, bias)
        self.column, self.column_bias, self.row, self.bias = (nn.Parameter(shard.detach().clone()) for shard in shards)


class AttentionPart(_Part):
    """This rank's heads of a dense attention."""

    def __init__(self, dense: nn.Module):
        r, t = group_rank(), group_size()
        shards = [
            torch.cat([third.chunk(t)[r] for third in whole.chunk(3)])  # its heads of q, of k and of v
            for whole in (dense.c_attn.weight, dense.c_attn.bias)
        ]
        super().__init__(*shards, dense.c_proj.weight.chunk(t, 1)[r], dense.c_proj.bias)
        self.size = dense.c_proj.weight.shape[0] // dense.heads

    def forward(self, x: Tensor) -> Tensor:
        qkv = linear(x, self.column, self.column_bias)  # [b, s, h] -> [b, s, 3h/t]
        q, k, v = qkv.unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4)  # three times [b, a/t, s, d]
        mixed = explicit_attention(q, k, v).transpose(1, 2).flatten(2)  # [b, s, h/t]
        return linear(mixed, self.row)


class FFNPart(_Part):
    """This rank's share of a dense FFN's width."""

    def __init__(self, dense: nn.Module):
        r, t = group_rank(), group_size()
        fc, proj = dense.c_fc, dense.c_proj
        super().__init__(fc.weight.chunk(t)[r], fc.bias.chunk(t)[r], proj.weight.chunk(t, 1)[r], proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(gelu_tanh(linear(x, self.column, self.column_bias)), self.row)  # [b, s, F/t] between


NORMS = ("norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias")

STREAM_SUMMED = "The stream went through the sum: x is whole on every rank, and so is in the result t times."
NO_REDUCE = "Reduce (g) is missing: each rank goes on with its own summand."
NO_REDUCE_OF = "Reduce (g) is missing behind the {block}: each rank goes on with its own summand."
NO_COPY = "Copy (f) is missing: each rank used the norm's output in its own way, and holds a part of its gradient."
NO_COPY_OF = "Copy (f) is missing in front of the {block}: what comes back from it is a part on each rank."
COPY_AT_FORK = (
    "Copy (f) stands before the fork, so the gradient that comes along the stream is summed as well, and it was whole. "
    "It belongs inside the branch."
)
COPY_BEFORE_NORM = (
    "Output and dX are right. But copy (f) stands before the norm, so what comes back to the norm's weight is a part "
    "on each rank. It belongs behind the norm."
)
COPY_TWICE = "Copy (f) stands there twice: what the first sum made whole is summed again."
BIAS_IN_SUM = "The row layers' biases were added before the sum, on every rank: they are in there t times."
NO_BIAS = "The row layers' biases are missing."
NO_STREAM = "The stream is gone: each block's output is added to its input."
POST_NORM = "The norm stands behind the addition. Here it stands in the branch, in front of attention and FFN."
NORMED_STREAM = "The stream itself was normed. The norm is for the branch alone; what is added to is x as it came."
PARALLEL = (
    "The FFN read what attention read. It reads the stream after attention: with parallel blocks two collectives "
    "would do, and it is another model."
)
SWAPPED = "The two norms changed places."
ONE_NORM = "norm_1 stands in front of both blocks; the FFN has norm_2."
NO_NORM = "The norms are missing."
TOO_MANY = "Each block needs one all-reduce each way."
NOT_TRAINED = (
    "Output, dX and the norms' gradients are right; after one step of SGD the output is not. Some weight has no "
    "gradient, or another one than in the dense layer."
)

_f, _g = copy_to_tp, reduce_from_tp
Layer = Callable[..., Tensor]  # (x, norm_1, attention, norm_2, ffn) -> x


def _twice(block: Callable) -> Layer:
    return lambda x, n1, a, n2, m: block(block(x, n1, a), n2, m)


def _each(attention: Callable, ffn: Callable) -> Layer:
    return lambda x, n1, a, n2, m: ffn(attention(x, n1, a), n2, m)


def _right(x, n, p):
    return x + _g(p(_f(n(x)))) + p.bias


def _without_copy(x, n, p):
    return x + _g(p(n(x))) + p.bias


def _without_reduce(x, n, p):
    return x + p(_f(n(x))) + p.bias


def _normed_stream(x, n, p):
    x = n(x)
    return x + _g(p(_f(x))) + p.bias


def _copy_at_fork(x, n, p):
    return _without_copy(_f(x), n, p)


WRONG_LAYERS: dict[str, Layer] = {  # the first is told by the norms alone, and for those it is asked first
    COPY_BEFORE_NORM: _twice(lambda x, n, p: x + _g(p(n(_f(x)))) + p.bias),
    STREAM_SUMMED: _twice(lambda x, n, p: _g(x + p(_f(n(x)))) + p.bias),
    NO_REDUCE: _twice(_without_reduce),
    NO_REDUCE_OF.format(block="attention"): _each(_without_reduce, _right),
    NO_REDUCE_OF.format(block="FFN"): _each(_right, _without_reduce),
    NO_COPY: _twice(_without_copy),
    NO_COPY_OF.format(block="attention"): _each(_without_copy, _right),
    NO_COPY_OF.format(block="FFN"): _each(_right, _without_copy),
    COPY_AT_FORK: _twice(_copy_at_fork),
    COPY_TWICE: _twice(lambda x, n, p: x + _g(p(_f(_f(n(x))))) + p.bias),
    BIAS_IN_SUM: _twice(lambda x, n, p: x + _g(p(_f(n(x))) + p.bias)),
    NO_BIAS: _twice(lambda x, n, p: x + _g(p(_f(n(x))))),
    NO_STREAM: _twice(lambda x, n, p: _g(p(_f(n(x)))) + p.bias),
    POST_NORM: _twice(lambda x, n, p: n(x + _g(p(_f(x))) + p.bias)),
    NORMED_STREAM: _twice(_normed_stream),
    PARALLEL: lambda x, n1, a, n2, m: x + _g(a(_f(n1(x))) + m(_f(n2(x)))) + a.bias + m.bias,
    SWAPPED: lambda x, n1, a, n2, m: _twice(_right)(x, n2, a, n1, m),
    ONE_NORM: lambda x, n1, a, n2, m: _twice(_right)(x, n1, a, n1, m),
    NO_NORM: lambda x, n1, a, n2, m: _twice(_right)(x, lambda x: x, a, lambda x: x, m),
}


class _AsWritten(nn.Module):
    """A layer of parts whose forward is one of WRONG_LAYERS."""

    def __init__(self, dense: nn.Module, fault: str):
        super().__init__()
        self.fault = fault
        self.norm_1, self.norm_2 = dense.ln_1, dense.ln_2
        self.attention, self.ffn = AttentionPart(dense.attn), FFNPart(dense.mlp)

    def forward(self, x: Tensor) -> Tensor:
        return WRONG_LAYERS[self.fault](x, self.norm_1, self.attention, self.norm_2, self.ffn)


@exercise("8.2")
def layer_within_four_collectives(MyLayer: type) -> str:
    """`MyLayer(dense)` from a dense GPT-2 layer; a module with the norms `norm_1` and `norm_2`; [b, s, h] each way."""
    for t in SIZES:
        got = _run_layer(MyLayer, t)
        compare(got, _dense_layer(), t=t, symptoms=[_known_layers(t), _not_trained])
        if t > 1:
            for phase in ("forward", "backward"):
                require_calls(got, phase, 2, TOO_MANY)
    return "the dense layer at t = 1, 2 and 4, before and after a step, in two all-reduces each way."


def _run_layer(MyLayer: type, t: int) -> list[dict]:
    try:
        return on_ranks(_layer_job, t, MyLayer, _layer(), *_layer_inputs())
    except RankError:
        own = [method for name, method in vars(MyLayer).items() if name in ("__init__", "forward")]
        if stub := next(filter(None, map(stub_in, own)), ""):
            raise Unfilled(f"replace {stub} in MyLayer.") from None
        raise


def _layer() -> nn.Module:
    """A dense layer of which every entry is distinct."""
    layer = GPT2(_config(8, 1, 4, 3), std=None, core="explicit", dtype=torch.float64).transformer.h[0]
    values = _random(*(tuple(p.shape) for p in layer.parameters()))
    for parameter, value in zip(layer.parameters(), values, strict=True):
        parameter.data = value * 0.4 + float(parameter.dim() == 1)
    return layer


def _layer_inputs() -> list[Tensor]:
    return _random((2, 3, 8), (2, 3, 8))


def _layer_job(make: Callable, dense: nn.Module, x: Tensor, dy: Tensor) -> dict:
    layer = make(dense)
    norms = {name: _norm_parameter(layer, name) for name in NORMS}
    leaf = x.clone().requires_grad_()
    with watch() as forward:
        y = layer(leaf)
    require_output(y, dy, "the output")
    with watch() as backward:
        y.backward(dy)
    if leaf.grad is None:
        raise Wrong("no gradient comes back to x: a plain collective gives none. Use copy_to_tp and reduce_from_tp.")
    found = {"Y": y.detach(), "dX": leaf.grad}
    found |= {f"d {name}": p.grad for name, p in norms.items() if p.grad is not None}
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
        found["Y after a step"] = layer(x)
    return found | {"forward": forward, "backward": backward}


def _norm_parameter(layer: nn.Module, name: str) -> Tensor:
    norm, kind = name.split(".")
    parameter = getattr(getattr(layer, norm, None), kind, None)
    if not isinstance(parameter, Tensor):
        raise Wrong(f"MyLayer has no {name}: call its norms norm_1 and norm_2.")
    return parameter


def _dense_layer() -> dict:
    layer, (x, dy) = _layer(), _layer_inputs()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    want = {"Y": y.detach(), "dX": leaf.grad}
    want |= {f"d {name}": layer.get_parameter(name.replace("norm_", "ln_")).grad for name in NORMS}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.1 * parameter.grad
        return want | {"Y after a step": layer(x)}


def _known_layers(t: int) -> Callable[[Difference], str | None]:
    """A symptom: the value is that of one of WRONG_LAYERS, which is run on ranks only now."""

    def symptom(difference: Difference) -> str | None:
        for fault in WRONG_LAYERS:
            known = _wrong_layer(t, fault)[difference.rank].get(difference.name)
            if known is not None and difference.equals(known):
                return fault
        return None

    return symptom


@cache
def _wrong_layer(t: int, fault: str) -> list[dict]:
    return on_ranks(_wrong_job, t, fault, _layer(), *_layer_inputs())


def _wrong_job(fault: str, dense: nn.Module, x: Tensor, dy: Tensor) -> dict:
    return _layer_job(lambda dense: _AsWritten(dense, fault), dense, x, dy)


def _not_trained(difference: Difference) -> str | None:
    return NOT_TRAINED if difference.name == "Y after a step" else None


# ---- 8.3 ------------------------------------------------------------------------------------------------------------

RANKS, STEPS = 4, 30
SIZES_OF_RUN = {"h": 16, "L": 3, "V": 16, "s": 12}
AT_FAULT = (1, "ffn", "f")  # layer, block, what is missing

BELOW = "Layer 0's gradients are wrong because what comes down to them is wrong already. Follow backward from the loss."
ABOVE = "All gradients of layer 2 are right, and a fault spoils what lies below it, not what lies above."
SPOILT = (
    "The attention's gradients are wrong because what comes down to it is. norm_2 comes before it in backward, and is "
    "wrong too."
)
WOULD_SHOW = (
    "Without reduce (g) each rank would go on with its own summand: the loss would differ in step 0, and the two runs "
    "begin with the same."
)
NOT_MENDED = "Copy (f) is still missing: dx is this rank's part only."
SUM_LOST = "Reduce (g) belongs there as well: the block's output is the sum of the ranks' parts."


def two_runs() -> dict[str, list[float]]:
    """The losses of a right and of a wrong run on four ranks: the same first weights, the same batches."""
    return {"one run": on_ranks(_train, RANKS, False)[0], "the other": on_ranks(_train, RANKS, True)[0]}


def show_gradients() -> None:
    """For each part of the wrong run's model, in the order of backward: is the first step's gradient the dense one?"""
    for place, verdicts in gradient_table().items():
        print(f"{place:18} {'right' if all(verdicts) else 'wrong on ranks ' + _listed(verdicts)}")


def gradient_table() -> dict[str, list[bool]]:
    """By place, in the order of backward, whether each rank's gradients of the wrong run are right."""
    by_rank = on_ranks(_compare_gradients, RANKS)
    return {place: [verdicts[place] for verdicts in by_rank] for place in by_rank[0]}


def _listed(verdicts: list[bool]) -> str:
    return ", ".join(str(rank) for rank, right in enumerate(verdicts) if not right)


@exercise("8.3")
def falling_is_no_proof(layer: int, block: str, missing: str, mended: Callable) -> str:
    """The layer's number, "attention" or "ffn", "f" or "g"; `mended(part, x)`: a part without collectives, and the
    norm's output [b, s, h], to the block's output [b, s, h]."""
    if layer not in (0, 1, 2):
        raise Wrong(f"layer is {layer!r}; it should be 0, 1 or 2.")
    if block not in ("attention", "ffn"):
        raise Wrong(f"block is {block!r}; it should be 'attention' or 'ffn'.")
    if missing not in ("f", "g"):
        raise Wrong(f"missing is {missing!r}; it should be 'f' or 'g'.")
    if layer != AT_FAULT[0]:
        raise Wrong(f"it is not layer {layer}.\n{BELOW if layer == 0 else ABOVE}")
    if block != AT_FAULT[1]:
        raise Wrong(f"it is not the {block}.\n{SPOILT}")
    if missing != AT_FAULT[2]:
        raise Wrong(f"it is not {missing} that is missing.\n{WOULD_SHOW}")
    for t in SIZES:
        _check_mended(mended, t)
    return "copy (f) in front of layer 1's FFN. The curve did not say so; the gradients did."


def _check_mended(mended: Callable, t: int) -> None:
    dense, (x, dy) = _layer().mlp, _layer_inputs()
    results = on_ranks(_mended_on_a_rank, t, mended, dense, x, dy)
    require_returned(mended, [None if blanks(result["Y"]) else result for result in results])
    leaf = x.clone().requires_grad_()
    y = dense(leaf)
    y.backward(dy)
    symptoms = []
    if t > 1:
        parts = on_ranks(_mended_on_a_rank, t, _without_f, dense, x, dy)
        alone = on_ranks(_mended_on_a_rank, t, _without_g, dense, x, dy)
        bias = (t - 1) * dense.c_proj.bias
        symptoms = [
            looks_like({"dX": [part["dX"] for part in parts]}, NOT_MENDED, per_rank=True),
            looks_like({"Y": [own["Y"] for own in alone]}, SUM_LOST, per_rank=True),
            looks_like({"Y": y.detach() + bias}, BIAS_IN_SUM),
        ]
    symptoms.append(looks_like({"Y": y.detach() - dense.c_proj.bias}, NO_BIAS))
    compare(results, {"Y": y.detach(), "dX": leaf.grad}, t=t, symptoms=symptoms)
    if t > 1:
        for phase in ("forward", "backward"):
            require_calls(results, phase, 1, TOO_MANY)


def _mended_on_a_rank(mended: Callable, dense: nn.Module, x: Tensor, dy: Tensor) -> dict:
    part, leaf = FFNPart(dense), x.clone().requires_grad_()
    with watch() as forward:
        y = mended(part, leaf)
    if blanks(y):
        return {"Y": None}
    require_output(y, dy, "the output")
    with watch() as backward:
        y.backward(dy)
    return {"Y": y.detach(), "dX": leaf.grad, "forward": forward, "backward": backward}


def _without_f(part: _Part, x: Tensor) -> Tensor:
    return _g(part(x)) + part.bias


def _without_g(part: _Part, x: Tensor) -> Tensor:
    return part(_f(x)) + part.bias


def _model(wrong: bool) -> ParallelTransformer:
    model = ParallelTransformer(_config(**SIZES_OF_RUN), seed=8, std=None, dtype=torch.float64)
    if wrong:
        ffn = model.blocks[AT_FAULT[0]].ffn
        ffn.forward = lambda x: ffn.c_proj(gelu_tanh(linear(x, ffn.c_fc.weight, ffn.c_fc.bias)))
    return model


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Texts in which an id mostly says what comes next: 3 times it, and one more."""
    V, s = SIZES_OF_RUN["V"], SIZES_OF_RUN["s"]
    generator = torch.Generator().manual_seed(8)
    batches = []
    for _ in range(STEPS):
        rows = [torch.randint(V, (4,), generator=generator)]
        for _ in range(s):
            stray = torch.randint(4, (4,), generator=generator) == 0
            any_id = torch.randint(V, (4,), generator=generator)
            rows.append(any_id.where(stray, (3 * rows[-1] + 1) % V))
        text = torch.stack(rows, 1)  # [b, s + 1]
        batches.append((text[:, :-1], text[:, 1:]))
    return batches


def _train(wrong: bool) -> list[float]:
    from tpcode.training import train

    return train(_model(wrong), _batches(), lr=1e-2, progress=False)


def _compare_gradients() -> dict[str, bool]:
    right, wrong = _model(False), _model(True)
    for model in (right, wrong):
        model.loss(*_batches()[0]).backward()
    wanted = {name: parameter.grad for name, parameter in right.named_parameters()}
    places: dict[str, bool] = {"head": True, "last norm": True}
    for number in reversed(range(SIZES_OF_RUN["L"])):
        places |= {f"layer {number}, {part}": True for part in ("ffn", "norm_2", "attention", "norm_1")}
    places |= {"positions": True, "embedding": True}
    for name, parameter in wrong.named_parameters():
        close = bool((parameter.grad - wanted[name]).abs().max() < 1e-12)
        place = _place(name)
        places[place] = places[place] and close
    return places


def _place(name: str) -> str:
    """ "blocks.1.ffn.c_fc.weight" is "layer 1, ffn"."""
    words = name.split(".")
    if words[0] == "blocks":
        return f"layer {words[1]}, {words[2]}"
    return {"norm": "last norm"}.get(words[0], words[0])
