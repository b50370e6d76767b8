"""The memory model reproduces the published tables, and is what the meter measures on the book's own layers."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml

from tpcode.config import Layout, ModelConfig
from tpcode.cost import memory
from tpcode.cost.memory import (
    activation_bytes,
    bytes_per_parameter,
    extra_flops,
    fits,
    interleaving_factor,
    kept_tensors,
    layer_bytes,
    plan,
    pytorch_extras,
    rebuilt_bytes,
    state_bytes,
)
from tpcode.dense import GPT2, MODELS
from tpcode.meter import saved_for_backward

K22 = yaml.safe_load((Path(memory.__file__).parent / "published.yaml").read_text(encoding="utf-8"))["korthikanti2022"]
GIB = 2**30
SEQUENCE = 2048


def published(number: int) -> tuple[str, ModelConfig, Layout, int, int]:
    """A row of K22's table 3: its name, the model with the dropout that their formulas count, TP and PP, b, and m."""
    row = dict(zip(K22["table3_configs"]["cols"], K22["table3_configs"]["rows"][number]))
    config = ModelConfig.preset(f"k22-{row['name'].lower()}")
    assert (config.heads, config.hidden, config.layers) == (row["heads"], row["hidden"], row["layers"])
    m = 3 if row["name"] in ("175B", "530B") else 1  # as the table's note says
    return row["name"], replace(config, dropout=0.1), Layout(tp=row["tp"], pp=row["pp"]), row["microbatch"], m


ROWS = [published(number) for number in range(4)]
NAMES = [name for name, *_ in ROWS]
models = pytest.mark.parametrize("row", ROWS, ids=NAMES)


def evaluated(formula: str, sizes: dict[str, int]) -> Fraction:
    """A formula as the paper prints it: "sbh(10 + 24/t + 5as/(ht))"."""
    tokens = re.findall(r"\d+|[a-z]|[()+/]", formula)
    text = tokens[0]
    for before, token in zip(tokens, tokens[1:]):
        product = before not in "(+/" and token not in ")+/"
        text += ("*" if product else "") + token
    text = re.sub(r"\d+|[a-z]", lambda found: f"F({found.group()})", text)
    return eval(text, {"F": Fraction, **sizes})


# ---- published ------------------------------------------------------------------------------------------------------

TABLE_2 = {  # the paper's row: tensor-parallel, sequence-parallel, recompute
    "none": (False, False, "none"),
    "tp": (True, False, "none"),
    "tp_sp": (True, True, "none"),
    "tp_selective": (True, False, "selective"),
    "tp_sp_selective": (True, True, "selective"),
    "full": (True, False, "full"),
}


@models
@pytest.mark.parametrize("name", TABLE_2)
def test_table_2(row, name):
    _, config, layout, b, _ = row
    split, sp, recompute = TABLE_2[name]
    t = layout.tp if split else 1
    sizes = {"s": SEQUENCE, "b": b, "h": config.hidden, "a": config.heads, "t": t}
    want = evaluated(K22["table2_activation_bytes_per_layer"][name], sizes)
    got = layer_bytes(config, b, SEQUENCE, Layout(tp=t, sequence_parallel=sp), recompute=recompute)
    assert got == want


@models
def test_the_34_and_the_10(row):
    """11 + 5as/h of attention, 19 of the FFN, 4 of the norms; of these 10 stay whole."""
    _, config, layout, b, _ = row
    sbh = SEQUENCE * b * config.hidden
    kept = kept_tensors(config, b, SEQUENCE)
    outside = [tensor for tensor in kept if not tensor.core]
    by_part = {part: sum(x.nbytes for x in outside if x.part == part) / sbh for part in ("attention", "ffn", "norms")}
    assert by_part == {"attention": 11, "ffn": 19, "norms": 4}
    assert sum(x.nbytes for x in kept if x.core) == 5 * config.heads * SEQUENCE**2 * b
    assert sum(x.nbytes for x in kept if x.whole) == 10 * sbh
    on_ranks = kept_tensors(config, b, SEQUENCE, layout)
    for whole, own in zip(kept, on_ranks, strict=True):
        assert own.elements * (1 if own.whole else layout.tp) == whole.elements


@models
def test_figure_1(row):
    name, config, layout, b, m = row
    figure = K22["fig1_GiB_per_gpu"][name]
    matrices = 12 * config.layers * config.hidden**2  # the figure counts no bias, norm or embedding
    each = bytes_per_parameter("mixed, fp32 gradients")
    assert each * matrices / (layout.tp * layout.pp) == figure["params_opt"] * GIB
    present = replace(layout, sequence_parallel=True)
    tp = activation_bytes(config, b, SEQUENCE, layout, m=m)
    both = activation_bytes(config, b, SEQUENCE, present, m=m, recompute="selective")
    assert tp.layers == figure["act_tp"] * GIB
    assert both.layers == figure["act_present"] * GIB


@models
def test_figure_7(row):
    name, config, layout, b, _ = row
    sp = replace(layout, sequence_parallel=True)
    ways = {"sp": (sp, "none"), "selective": (layout, "selective"), "both": (sp, "selective"), "full": (layout, "full")}
    base = layer_bytes(config, b, SEQUENCE, layout)
    for way, (where, recompute) in ways.items():
        percent = 100 * layer_bytes(config, b, SEQUENCE, where, recompute=recompute) / base
        assert percent == pytest.approx(K22["fig7_pct_of_tp_baseline"][name][way], abs=0.2), way


@models
def test_extras_of_the_first_stage(row):
    """K22, section 4.3: sbhL/t (p/L + [p=1] (4/L)(1 + v/h)), with sequence parallelism."""
    _, config, layout, b, m = row
    sp = replace(layout, sequence_parallel=True)
    s, h, L, t, p, v = SEQUENCE, config.hidden, config.layers, layout.tp, layout.pp, config.vocab
    one_stage = Fraction(4, L) * (1 + Fraction(v, h)) if p == 1 else 0
    want = Fraction(s * b * h * L, t) * (Fraction(p, L) + one_stage)
    assert activation_bytes(config, b, s, sp, m=m).ends == want


def test_the_interleaving_factor():
    assert interleaving_factor(8, 3) == 1 + Fraction(7, 24)
    assert interleaving_factor(64) == interleaving_factor(1, 3) == 1


@pytest.mark.parametrize("name, said", [("gpt3", "k22-175b"), ("mt_nlg", "k22-530b")])
def test_what_selective_recomputation_saves(name, said):
    config = replace(ModelConfig.preset(said), dropout=0.1)
    whole = layer_bytes(config, 1, SEQUENCE)
    saved = 1 - layer_bytes(config, 1, SEQUENCE, recompute="selective") / whole
    assert round(100 * saved) == K22["selective"][name]["mem_saved_pct"]
    core = whole - layer_bytes(config, 1, SEQUENCE, recompute="selective")
    assert core == K22["selective"][name]["five_as_over_h"] * SEQUENCE * config.hidden
    # The paper's price counts the core's forward and backward; what runs again is the forward, a third of it.
    price = 3 * extra_flops(config, SEQUENCE, "selective")
    assert 100 * price == pytest.approx(K22["selective"][name]["flop_overhead_pct"], abs=0.05)


# ---- measured -------------------------------------------------------------------------------------------------------


def small(family: str, **options) -> ModelConfig:
    """Sizes that are all different: h = 48, F = 200, 6 heads, 2 KV heads in a Llama."""
    kv_heads = 6 if family == "gpt2" else 2
    sizes = {"hidden": 48, "ffn": 200, "heads": 6, "kv_heads": kv_heads, "layers": 2, "vocab": 50, "max_seq": 40}
    return ModelConfig(family=family, **sizes, **options)


CASES = [
    (small("gpt2", dropout=0.1), "explicit"),
    (small("gpt2"), "explicit"),
    (small("gpt2"), "sdpa"),
    (small("llama"), "explicit"),
    (small("llama", dropout=0.1), "explicit"),
    (small("llama"), "sdpa"),
]
B, S = 3, 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("config, core", CASES, ids=lambda x: x if isinstance(x, str) else f"{x.family}-{x.dropout}")
def test_meter_and_formula_agree_to_the_byte_on_one_device(config, core, dtype):
    block = MODELS[config.family](config, core=core, dtype=dtype).part("blocks")[0]
    with saved_for_backward(block) as meter:
        block(torch.randn(B, S, config.hidden, dtype=dtype, requires_grad=True))
    options = {"core": core, "width": dtype.itemsize}
    formula = layer_bytes(config, B, S, **options)
    extras = pytorch_extras(config, B, S, **options, fused=False)
    assert meter.nbytes == formula + sum(extras.values())
    if core == "explicit" and config.family == "gpt2":  # nothing but what the paper leaves out by name
        assert extras == {"LayerNorm's mean and 1/deviation": 4 * B * S * dtype.itemsize, "causal mask": S * S}


def measured_on_a_rank(cases, b, s, sequence_parallel):
    """Bytes that the first layer keeps for its backward, for each case."""
    from tpcode.comm import group_size
    from tpcode.meter import saved_for_backward
    from tpcode.model import ParallelTransformer

    found = []
    own = s // group_size() if sequence_parallel else s
    for config, core, dtype in cases:
        model = ParallelTransformer(config, core=core, dtype=dtype, sequence_parallel=sequence_parallel)
        with saved_for_backward(model.blocks[0]) as meter:
            model.blocks[0](torch.randn(b, own, config.hidden, dtype=dtype, requires_grad=True))
        found.append(meter.nbytes)
    return found


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp-sp"])
def test_meter_and_formula_agree_to_the_byte_on_two_ranks(pool2, sp):
    one_head = replace(small("gpt2", dropout=0.1), heads=2, kv_heads=2, head_dim=24)
    cases = [
        (config, core, dtype)
        for config, core in [*CASES, (one_head, "explicit")]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    layout = Layout(tp=2, sequence_parallel=sp)
    for found in pool2.run(measured_on_a_rank, cases, B, S, sp):
        for (config, core, dtype), got in zip(cases, found, strict=True):
            options = {"core": core, "width": dtype.itemsize}
            formula = layer_bytes(config, B, S, layout, **options)
            extras = pytorch_extras(config, B, S, layout, **options)
            assert got == formula + sum(extras.values()), (config.family, config.dropout, core, dtype)


def state_on_a_rank(configs):
    """Bytes of weights, gradients and two averages in fp32, sharded and replicated, by the placements."""
    from tpcode.model import ParallelTransformer

    found = []
    for config in configs:
        model = ParallelTransformer(config)
        sizes = {False: 0, True: 0}
        for name, parameter in model.named_parameters():
            sizes[model.placements[name].dim is None] += 16 * parameter.numel()
        found.append((sizes[False], sizes[True]))
    return found


def test_state_is_what_a_rank_holds(pool2):
    configs = [small("gpt2"), replace(small("gpt2"), vocab=51, ffn=201), small("llama", tied=False)]
    for found in pool2.run(state_on_a_rank, configs):
        for config, (sharded, replicated) in zip(configs, found, strict=True):
            state = state_bytes(config, Layout(tp=2), "fp32")
            assert (state.sharded, state.replicated) == (sharded, replicated)


def recomputed_on_a_rank(config, sequence_parallel):
    """Bytes of each tensor that a model keeps, its layers run again in backward."""
    from tpcode.meter import saved_for_backward
    from tpcode.model import ParallelTransformer

    model = ParallelTransformer(config, recompute=True, sequence_parallel=sequence_parallel)
    with saved_for_backward(model) as meter:
        model(torch.zeros(2, 10, dtype=torch.long))
    return [tensor.nbytes for tensor in meter.saved if tensor.dtype == torch.float32]


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp-sp"])
def test_full_recomputation_keeps_each_layers_input(pool2, sp):
    config = replace(small("gpt2", dropout=0.1), layers=3)
    layout = Layout(tp=2, sequence_parallel=sp)
    one = layer_bytes(config, 2, 10, layout, recompute="full", width=4)
    assert one == 4 * 2 * 10 * config.hidden // (2 if sp else 1)
    statistics = 4 * 2 * 10 // (2 if sp else 1)
    for found in pool2.run(recomputed_on_a_rank, config, sp):
        assert sorted(found) == [statistics] * 2 + [one] * (config.layers + 2)  # and the last norm's and head's input


# ---- state ----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_parameter():
    assert bytes_per_parameter("fp32") == bytes_per_parameter() == 16
    assert bytes_per_parameter("mixed, fp32 gradients") == 18
    assert bytes_per_parameter("mixed, fp32 gradients", dp=4) == 6 + Fraction(12, 4)
    assert bytes_per_parameter("mixed, fp32 gradients", dp=64) == 6 + Fraction(12, 64)


def test_replicated_parameters_do_not_shrink():
    config = ModelConfig.preset("gpt3-175b")
    one, eight = (state_bytes(config, Layout(tp=t)) for t in (1, 8))
    assert one.total == 16 * config.num_parameters
    assert eight.replicated == one.replicated > 0
    h, L = config.hidden, config.layers
    assert one.replicated == 16 * (L * (4 * h + 2 * h) + 2 * h + config.max_seq * h)  # two norms, two row biases
    over_dp = Layout(tp=8, dp=4)
    assert state_bytes(config, over_dp) == eight  # data parallelism alone saves nothing
    shared = state_bytes(config, over_dp, distributed_optimizer=True)
    assert shared.total == (4 + 12 / 4) / 16 * eight.total


# ---- what fits ------------------------------------------------------------------------------------------------------

K22_22B = ROWS[0][1]
CARD = 80 * 10**9


def test_what_fits_the_22b_model():
    """Full recomputation is not needed, but something is."""
    (cheapest, *others) = fits(K22_22B, CARD, b=4, s=SEQUENCE)
    assert (cheapest.layout.tp, cheapest.recompute) == (8, "selective")
    assert [(other.layout.tp, other.recompute) for other in others] == [(8, "full")]
    assert [(one.layout.tp, one.recompute) for one in fits(K22_22B, CARD, b=1, s=SEQUENCE)][0] == (8, "none")
    assert fits(K22_22B, 40 * 10**9, b=1, s=SEQUENCE) == []


def test_fits_is_every_plan_within_the_card_and_the_cheapest_first():
    card = 160 * 10**9
    found = fits(K22_22B, card, b=4, s=SEQUENCE, tp_sizes=(2, 4, 8))
    every = [
        plan(K22_22B, 4, SEQUENCE, Layout(tp=t), recompute=recompute)
        for t in (2, 4, 8)
        for recompute in ("none", "selective", "full")
    ]
    within = [one for one in every if one.total <= card]
    assert 0 < len(within) < len(every)
    assert len(found) == len(within) and all(one in found for one in within)
    assert [one.extra_flops for one in found] == sorted(one.extra_flops for one in found)
    assert found[0].recompute == "none" and found[-1].recompute == "full"
    prices = [one.layout.tp for one in found if one.recompute == "selective"]
    assert prices == sorted(prices)


def test_a_plan_is_the_sum_of_its_parts():
    layout = Layout(tp=8, sequence_parallel=True)
    one = plan(K22_22B, 4, SEQUENCE, layout, recompute="full", recipe="mixed, fp32 gradients")
    assert one.state == state_bytes(K22_22B, layout, "mixed, fp32 gradients")
    assert one.activations == activation_bytes(K22_22B, 4, SEQUENCE, layout, recompute="full")
    assert one.rebuilt == layer_bytes(K22_22B, 4, SEQUENCE, layout) - layer_bytes(
        K22_22B, 4, SEQUENCE, layout, recompute="full"
    )
    assert one.total == one.state.total + one.activations.total + one.rebuilt
    assert one.extra_flops == pytest.approx(1 / 3, abs=0.005)  # a third, but for the head
    assert rebuilt_bytes(K22_22B, 4, SEQUENCE, layout) == 0


def test_without_stored_scores_selective_recomputation_has_nothing_to_do():
    llama = ModelConfig.preset("llama-3-8b")
    assert layer_bytes(llama, 1, SEQUENCE, recompute="selective") == layer_bytes(llama, 1, SEQUENCE)
    assert extra_flops(llama, SEQUENCE, "selective") == 0
    assert extra_flops(llama, SEQUENCE, "selective", core="explicit") > 0


@pytest.mark.parametrize("name, factor", [("llama-3-8b", 34.0), ("llama-3-70b", 33.5)])
def test_llamas_in_units_of_sbh(name, factor):
    """sbh(12 + 4k/a) + 6sbF, by hand."""
    llama = ModelConfig.preset(name)
    k, a, F, h = llama.kv_heads, llama.heads, llama.ffn, llama.hidden
    assert layer_bytes(llama, 1, SEQUENCE) / (SEQUENCE * h) == factor == 12 + 4 * k / a + 6 * F / h
    split = layer_bytes(llama, 1, SEQUENCE, Layout(tp=4)) / (SEQUENCE * h)
    assert split == 8 + (4 + 4 * k / a) / 4 + 6 * F / h / 4


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: bytes_per_parameter("adam"), "fp32; mixed; mixed, fp32 gradients, and is 'adam'"),
        (lambda: bytes_per_parameter(dp=0), "dp must be at least 1 and is 0"),
        (lambda: layer_bytes(K22_22B, 4, SEQUENCE, recompute="half"), "none, selective, full and is 'half'"),
        (lambda: layer_bytes(K22_22B, 4, SEQUENCE, core="flash"), "'sdpa' or None and is 'flash'"),
        (lambda: layer_bytes(K22_22B, 0, SEQUENCE), "b must be at least 1 and is 0"),
        (lambda: layer_bytes(K22_22B, 4, SEQUENCE, Layout(tp=3)), "do not split over t = 3"),
        (
            lambda: layer_bytes(K22_22B, 4, 100, Layout(tp=8, sequence_parallel=True)),
            "sequence s = 100 does not divide by t = 8",
        ),
        (lambda: layer_bytes(K22_22B, 4, SEQUENCE, Layout(tp=1, cp=2)), "cp = 2"),
        (
            lambda: activation_bytes(K22_22B, 1, SEQUENCE, Layout(tp=8, pp=5)),
            "layers = 48 do not split over p·m = 5 stages · 1 chunks",
        ),
        (lambda: fits(K22_22B, CARD, 1, SEQUENCE, tp_sizes=(3, 5)), "none of the sizes t = [3, 5] splits the model"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()


def test_a_layer_of_true_size_without_its_memory():
    """The 22B model's layer, metered: 6.6 GiB of tensors that are nowhere."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = replace(K22_22B, layers=1, vocab=8)
    with FakeTensorMode():
        block = GPT2(config, core="explicit", dtype=torch.bfloat16).part("blocks")[0]
        x = torch.empty(4, SEQUENCE, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        with saved_for_backward(block) as meter:
            block(x)
    assert meter.nbytes == layer_bytes(config, 4, SEQUENCE) + sum(pytorch_extras(config, 4, SEQUENCE).values())
