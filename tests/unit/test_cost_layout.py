"""Rank grids, the links of their axes, and the planner."""

import pytest

from tpcode import Layout, ModelConfig
from tpcode.cost import layout as layouts
from tpcode.cost import memory
from tpcode.cost.hardware import CARDS, GiB
from tpcode.cost.layout import coordinates, groups, layout_of, link, memory_use, plan
from tpcode.cost.workload import Workload

LLAMA = ModelConfig.preset("llama-3-8b")


def test_dp_is_what_the_others_leave():
    """E36, R13."""
    assert layout_of(64, tp=8, pp=4) == Layout(tp=8, pp=4, dp=2)
    with pytest.raises(ValueError, match=r"8 · 3 · 1 = 24 does not divide 64 GPUs: dp = 64 / 24 must be"):
        layout_of(64, tp=8, pp=3)
    layouts.require_world(Layout(tp=8, pp=4, dp=2), 64)
    with pytest.raises(ValueError, match=r"tp · cp · dp · pp = 8 · 1 · 2 · 4 = 64 ranks, and there are 32 GPUs"):
        layouts.require_world(Layout(tp=8, pp=4, dp=2), 32)


def test_ranks_of_64_gpus():
    """E32: tp fills the node, data-parallel peers sit on neighbouring nodes."""
    grid = Layout(tp=8, pp=4, dp=2)
    for rank in range(64):
        at = coordinates(grid, rank)
        assert rank == at["tp"] + 8 * at["dp"] + 16 * at["pp"]
    assert groups(grid, "tp")[1] == list(range(8, 16))
    assert groups(grid, "dp")[:2] == [[0, 8], [1, 9]]
    assert groups(grid, "pp")[0] == [0, 16, 32, 48]
    for axis in ("tp", "dp", "pp"):
        assert sorted(sum(groups(grid, axis), [])) == list(range(64))
    assert groups(Layout(tp=2, cp=2, dp=2), "cp")[0] == [0, 2]


def test_axes_and_links():
    """E37: tp within the node, dp and pp across. With tp = 4 two data-parallel peers share a node."""
    assert [link(Layout(tp=8, pp=4, dp=2), "h100", axis) for axis in ("tp", "dp", "pp", "cp")] == [
        "nvlink",
        "network",
        "network",
        "none",
    ]
    assert link(Layout(tp=16), "h100", "tp") == "network"
    assert link(Layout(tp=4, dp=2, pp=2), "h100", "dp") == "nvlink"
    assert link(Layout(tp=2, dp=2, pp=2), "h100", "pp") == "nvlink"
    assert link(Layout(tp=16), "v100", "tp") == "nvlink"  # 16 GPUs to a server


def test_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="rank must be below t = 64 and is 64"):
        coordinates(Layout(tp=64), 64)
    with pytest.raises(ValueError, match="axis must be one of tp, cp, dp, pp and is 'ep'"):
        groups(Layout(tp=2), "ep")


def test_memory_is_the_memory_models():
    """18 bytes a parameter, 6 + 12/dp where the optimizer is shared; the largest stage's state."""
    layout, workload = Layout(tp=8, dp=4), Workload(batch=4, sequence=1024)
    shared = Workload(batch=4, sequence=1024, distributed_optimizer=True)
    own = layouts.memory.rank_parameters(LLAMA, layout).elements
    assert memory_use(LLAMA, layout, workload).state == pytest.approx(18 * own)
    assert memory_use(LLAMA, layout, shared).state == pytest.approx(9 * own, abs=2)
    kept = memory.activation_bytes(LLAMA, 1, 1024, layout).total
    assert memory_use(LLAMA, layout, workload).activations == kept


# ---- the planner ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans():
    return plan(ModelConfig.preset("llama-3-70b"), "h100", 64, batch=512, sequence=8192)


def test_every_layout_is_either_planned_or_refused(plans):
    everything = [one.layout for one in (*plans.fitting, *plans.refused)]
    sizes = [(one.tp, one.pp, one.dp) for one in everything]
    assert len(sizes) == len(set(sizes)) == 28  # 64 = 2⁶: so many ways in three factors
    assert all(tp * pp * dp == 64 for tp, pp, dp in sizes)


def test_what_is_planned_fits_and_comes_fastest_first(plans):
    times = [one.step.seconds for one in plans.fitting]
    assert times == sorted(times) and plans.best is plans.fitting[0]
    limit = layouts.USABLE * 80 * GiB
    for one in plans.fitting:
        assert one.memory.total <= limit
        assert one.memory == memory_use(ModelConfig.preset("llama-3-70b"), one.layout, one.workload)
        layouts.require_world(one.layout, 64)
    assert link(plans.best.layout, "h100", "tp") == "nvlink"  # R11


def test_what_falls_out_says_why(plans):
    """What lacks least memory comes first; then what does not split, in the words of what does not."""
    reasons = {(one.layout.tp, one.layout.pp): one.reason for one in plans.refused}
    assert reasons[1, 1].startswith("needs 422.7 GiB at least, and 72.0 GiB are to be had")
    assert reasons[1, 32].startswith("pp = 32 stages do not hold 80 layers evenly; pp that work: 1, 2, 4, 5")
    short = [float(one.reason.split()[1]) for one in plans.refused if one.reason.startswith("needs")]
    assert short == sorted(short) and plans.refused[0].reason.startswith(f"needs {short[0]}")
    assert sum(map(len, plans.reasons.values())) == len(plans.refused)


def test_the_published_layout_of_gpt3_is_near_the_top():
    """N21 trained 175B on 1,024 A100s with t = 8 within the node; here that is first too."""
    found = plan(ModelConfig.preset("gpt3-175b"), "a100", 1024, batch=1536)
    assert found.best.layout.tp == 8
    beyond = [one.reason for one in found.refused if one.layout.tp > 96]
    assert beyond and all("is more than the 96 query heads, and a head is not cut" in reason for reason in beyond)
    crossing = [one for one in found.fitting if one.layout.tp == 16]
    assert crossing and crossing[0].step.seconds > 1.1 * found.best.step.seconds


def test_nothing_fits():
    found = plan(ModelConfig.preset("gpt3-175b"), "a100", 8, batch=8)
    assert found.fitting == []
    with pytest.raises(ValueError, match="no layout fits; needs .* GiB at least, and 72.0 GiB are to be had"):
        _ = found.best


def test_smaller_memory_turns_to_recomputation():
    """The same layout on the same card, of which less may be used."""
    roomy, tight = (
        {one.layout.tp: one.workload.recompute for one in found.fitting if one.layout.pp == 1}
        for found in (plan(LLAMA, "h100", 8, batch=64, sequence=8192, usable=share) for share in (0.9, 0.6))
    )
    assert roomy == {1: "full", 2: "none", 4: "none", 8: "none"}
    assert tight == {2: "full", 4: "none", 8: "none"}


def test_bad_input():
    with pytest.raises(ValueError, match="no card 'abacus'; there are v100"):
        plan(LLAMA, "abacus", 8, batch=8)
    with pytest.raises(ValueError, match="gpus must be at least 1 and is 0"):
        plan(LLAMA, "h100", 0, batch=8)
    with pytest.raises(ValueError, match="batch must be at least 1 and is 0"):
        plan(LLAMA, CARDS["h100"], 8, batch=0)
