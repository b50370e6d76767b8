"""A step's time: operations one by one, and how stages, replicas and overlap put them together."""

from dataclasses import replace

import pytest

from tpcode import Layout, ModelConfig
from tpcode.cost import communication, flops, step_time
from tpcode.cost.hardware import CARDS, GB
from tpcode.cost.step_time import Collective, Efficiencies, Gemm, Kernel, Machine, efficiencies_of
from tpcode.cost.workload import Workload

FULL = Machine(CARDS["a100"], Efficiencies(1.0, 1.0, 1.0))
HALF = Machine(CARDS["a100"], Efficiencies(0.5, 0.25, 0.125))
GPT = replace(ModelConfig.preset("k22-22b"), dropout=0.1)
LLAMA = ModelConfig.preset("llama-3-8b")
ONE = Workload(batch=4, microbatch=4, sequence=2048)


def operations(config=GPT, layout=None, **options):
    return step_time.layer_operations(config, layout or Layout(tp=8), replace(ONE, **options))


# ---- operations -----------------------------------------------------------------------------------------------------


def test_a_gemm_takes_whole_waves_of_tiles_and_then_its_output():
    """[2048, 4608]: 8 x 36 tiles of 256 x 128 are 288, on 108 SMs three waves, 324 tiles' time."""
    gemm = Gemm("QKV", "forward", 2048, 4608, 12_288)
    assert gemm.flops == 2 * 2048 * 4608 * 12_288
    assert gemm.tiled_flops(108) == pytest.approx(gemm.flops * 324 / 288)
    multiplying, writing = gemm.flops * 324 / 288 / 312e12, 2 * 2048 * 4608 / (2039 * GB)
    assert gemm.seconds(FULL) == pytest.approx(multiplying + writing)
    assert gemm.seconds(HALF) == pytest.approx(2 * multiplying + 4 * writing)
    added = replace(gemm, output_bytes=8).seconds(FULL)
    assert added == pytest.approx(multiplying + 4 * writing)


def test_a_thin_gemm_waits_for_its_input():
    """Scores times V of one head: 128 multiplications for each score that is read, and the card could do 153."""
    gemm = Gemm("scores times V", "forward", 2048, 128, 2048, count=108 * 64)
    reading = 2 * 108 * 64 * 2048 * (2048 + 128) / (2039 * GB)
    assert gemm.seconds(FULL) == pytest.approx(reading + 2 * 108 * 64 * 2048 * 128 / (2039 * GB))


def test_a_collective_hides_behind_a_product():
    product = Gemm("dW", "backward", 4096, 4096, 8192)
    alone = Collective("dX", "backward", "all_reduce", 2**27, 8)
    assert alone.whole_seconds(FULL) == pytest.approx(communication.collective_seconds("all_reduce", 2**27, 8, "a100"))
    behind = replace(alone, behind=product)
    assert behind.seconds(FULL) == max(0, alone.seconds(FULL) - product.seconds(FULL)) < alone.seconds(FULL)
    assert replace(behind, payload_bytes=8).seconds(FULL) == 0
    assert replace(alone, ranks=1).seconds(FULL) == 0
    assert Kernel("norm", "forward", 2039 * GB).seconds(FULL) == pytest.approx(1)


# ---- a layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", flops.RECOMPUTE)
@pytest.mark.parametrize("config", [GPT, replace(ModelConfig.preset("llama-3-70b"), dropout=0.1)], ids=["gpt", "llama"])
def test_products_of_all_ranks_are_the_layers_flops(config, recompute):
    """Forward, backward and what is run again: t ranks' together are what `flops` counts."""
    t, tokens = 8, (4, 2048)
    done = t * sum(one.flops for one in operations(config, Layout(tp=t), recompute=recompute) if isinstance(one, Gemm))
    again = {
        "none": 0,
        "selective": flops.core_flops(config, *tokens),
        "full": flops.layer_flops(config, *tokens),
    }
    assert done == 3 * flops.layer_flops(config, *tokens) + again[recompute]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_collectives_are_those_that_communication_counts(sp, recompute):
    layout = Layout(tp=8, sequence_parallel=sp)
    timed = [one for one in operations(layout=layout, recompute=recompute) if isinstance(one, Collective)]
    counted = communication.tp_layer(GPT, layout, microbatch=4, sequence=2048, recompute=recompute)
    for phase in ("forward", "recompute", "backward"):
        for op in ("all_reduce", "all_gather", "reduce_scatter"):
            found = [one.payload_bytes for one in timed if (one.op, one.phase) == (op, phase)]
            assert (len(found), sum(found)) == (counted.count(op, phase), counted.payload_bytes(op, phase))
    hidden = sorted(one.op for one in timed if one.behind is not None)
    assert hidden == (["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"] if sp else ["all_reduce"] * 2)
    products = {f"{layer}: {gradient}" for layer in ("QKV", "FFN in") for gradient in ("dX", "dW")}
    assert {one.behind.name for one in timed if one.behind} <= products


def test_bytes_of_the_kernels_that_tensor_parallelism_leaves_whole():
    """E27: per token and h, forward, 4 for each norm and 7 for each bias, dropout and add. SP divides them by t."""
    whole = {"norm 1", "norm 2", "attention: bias, dropout, add", "FFN: bias, dropout, add"}
    moved = {
        sp: sum(
            one.moved_bytes
            for one in operations(layout=Layout(tp=8, sequence_parallel=sp))
            if one.phase == "forward" and one.name in whole
        )
        for sp in (False, True)
    }
    assert moved[False] == 22 * 4 * 2048 * GPT.hidden == 8 * moved[True]


def test_the_fused_core_writes_no_scores():
    plain, fused = (operations(LLAMA, Layout(tp=4), core=core) for core in ("explicit", "sdpa"))
    assert {"scores", "scale, mask, softmax"} < {one.name for one in plain} - {one.name for one in fused}
    core = [one for one in fused if one.name == "attention core"]
    tokens = (4, 2048)
    assert [4 * one.flops for one in core] == [flops.core_flops(LLAMA, *tokens) * part // 4 for part in (2, 5)]
    assert step_time.seconds(fused, FULL) < step_time.seconds(plain, FULL)
    again = operations(LLAMA, Layout(tp=4), core="sdpa", recompute="selective")
    assert again == fused  # it computes its scores again every time
    assert [one.name for one in operations() if one.name.startswith("rotary")] == []


def test_without_dropout_there_is_no_mask():
    names = {one.name for one in operations(replace(GPT, dropout=0.0), core="explicit")}
    assert "dropout of scores" not in names
    assert {one.name for one in operations()} - names == {"dropout of scores"}


# ---- a step ---------------------------------------------------------------------------------------------------------


def timed(config=GPT, layout=None, on="a100", **options):
    return step_time.step_time(config, layout or Layout(tp=8), replace(ONE, **options), on)


def test_parts_add_up_and_utilization_follows():
    step = timed()
    parts = (step.gemm, step.memory, step.tp, step.pp, step.bubble, step.dp, step.update)
    assert step.seconds == pytest.approx(sum(parts)) and all(part >= 0 for part in parts)
    assert (step.pp, step.bubble, step.dp) == (0, 0, 0)
    assert step.mfu == pytest.approx(flops.model_flops(GPT, 4, 2048) / (step.seconds * 8 * 312e12))
    assert step.mfu == step.hfu
    again = timed(recompute="full")
    assert again.mfu < step.mfu and again.mfu < again.hfu
    assert step.tokens_per_second_per_gpu == pytest.approx(4 * 2048 / step.seconds / 8)


def test_a_pipeline_waits_as_the_formula_says():
    """Of p equal stages each waits (p-1)/v microbatches' time: here the stages differ by their ends alone."""
    layout = Layout(tp=8, pp=4)
    plain, cut = (timed(layout=layout, batch=64, interleave=v) for v in (1, 3))
    working = plain.gemm + plain.memory + plain.tp + plain.pp
    ideal = communication.bubble_fraction(4, 16)
    assert 0.8 * ideal < plain.bubble / working < ideal  # the slowest stage has the head besides
    assert cut.bubble < plain.bubble / 2 and cut.pp > 2 * plain.pp
    assert timed(layout=layout, batch=256).bubble == pytest.approx(plain.bubble)


def test_gradients_hide_behind_the_backward_as_far_as_it_goes():
    layout = Layout(tp=8, dp=8)
    shown, hidden = (timed(layout=layout, batch=32, overlap_gradients=over) for over in (False, True))
    own = flops.rank_parameters(GPT, layout).elements
    wire = 4 * own * 2 * 7 / 8 / (25 * GB * efficiencies_of("a100").link)
    assert shown.dp == pytest.approx(wire, rel=0.01)
    assert 0 <= hidden.dp < shown.dp
    shared = timed(layout=layout, batch=32, distributed_optimizer=True)
    assert shared.update < hidden.update


def test_more_bytes_and_slower_links_take_longer():
    """Within a node, across nodes; a card's own efficiencies, and those given."""
    inside, across = timed(layout=Layout(tp=8)), timed(layout=Layout(tp=16))
    assert across.tp > 1.2 * inside.tp
    assert timed(on="h100").seconds < inside.seconds
    slow = step_time.step_time(GPT, Layout(tp=8), ONE, "a100", Efficiencies(0.4, 0.4, 0.4))
    assert slow.seconds > 1.5 * inside.seconds


def test_efficiencies_of_cards():
    """An H100's are an A100's, times how single operations compare; those of other cards are an A100's."""
    a100, h100 = efficiencies_of("a100"), efficiencies_of("h100")
    assert a100 == step_time.FITTED == efficiencies_of("v100")
    assert h100.gemm / a100.gemm == pytest.approx((794.5 / 989) / (271.2 / 312))
    assert h100.memory == pytest.approx(a100.memory)
    own = replace(CARDS["h100"], name="mine", network_bytes_per_second=1 * GB)
    assert efficiencies_of(own) == step_time.FITTED


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: timed(layout=Layout(tp=8, cp=2)), "this layout has cp = 2"),
        (lambda: timed(layout=Layout(tp=8, pp=5)), "pp = 5 stages do not hold 48 layers evenly; pp that work: 1, 2, 3"),
        (lambda: timed(layout=Layout(tp=8, dp=3)), "a batch of 4 sequences is not cut evenly"),
        (lambda: timed(layout=Layout(tp=7)), "query heads = 64 and KV heads = 64 do not split over t = 7"),
        (lambda: timed(layout=Layout(tp=8, sequence_parallel=True), sequence=2049), "sequence = 2049 does not divide"),
        (lambda: timed(on="b200"), "no card 'b200'; there are"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
