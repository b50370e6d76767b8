"""Chapter 12's cells say what its text says; its numbers are those of `tpcode.cost`."""

import re
from pathlib import Path

import pytest
import yaml
from notebook_reading import cells_of, printed, source

from tpcode.config import Layout, ModelConfig
from tpcode.cost import published, step_time
from tpcode.cost.communication import compute_bound_tp
from tpcode.cost.hardware import CARDS
from tpcode.cost.workload import Workload

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(12)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[+-]?\d[\d,]*\.?\d*", text)]


def test_volumes_are_those_of_the_claims(cells):
    said = printed(cells["volume"])
    for number in ("100,663,296", "201.3 MB", "805.3 MB", "1.409 GB", "50.3 MB"):
        assert number in said
    assert "tpcode.cost says the same: True" in said
    bound, layers, model, again = (
        float(size) for size in re.findall(r"^    .* ([\d.]+)$", printed(cells["a-step"]), re.M)
    )
    assert layers / bound == pytest.approx(7 / 8, abs=1e-3) and layers < model < again
    assert again / layers == pytest.approx(1.5, rel=0.01)
    assert model / layers < 1.01  # "those you could forget"


def test_the_ledger_agrees_on_two_and_four_ranks(cells):
    assert re.findall(r"t = (\d): .*: (\w+)", printed(cells["ledger"])) == [("2", "True"), ("4", "True")]


def test_tensor_parallelism_sends_most_and_the_pipeline_least(cells):
    sent = {axis: float(size) for axis, size in re.findall(r"(\w\w): +([\d.]+) GB", printed(cells["axes"]))}
    assert sent["tp"] > 10 * sent["dp"] > 100 * sent["pp"]
    assert sent["tp"] / 96 < sent["dp"]  # "with a single microbatch it would be gone"


def test_the_calls_of_a_step_come_about_as_the_page_says(cells):
    """Six all-reduces in each of 12 layers and an all-gather each way: 74 a microbatch; an eighth of bsh each way."""
    said = re.findall(r"(\w\w): +([\d.]+) GB, in ([\d,]+) calls", printed(cells["axes"]))
    calls = {axis: numbers(found)[0] for axis, _, found in said}
    assert calls == {"tp": 96 * (6 * 12 + 2), "dp": 1, "pp": 96 * 2}
    sent = {axis: float(size) for axis, size, _ in said}
    payload = 2 * 2048 * 12_288 / 1e9
    assert sent["tp"] == pytest.approx(96 * (6 * 12 * 2 + 2) * 7 / 8 * payload, abs=0.051)
    assert sent["pp"] == pytest.approx(96 * 2 * payload / 8, abs=0.051)
    assert "74 calls" in source(cells["axes-answer"])


def test_the_model_of_a_step_is_what_the_page_says_it_is(cells):
    """Rounds of tiles; of a layer's sums only those of backward hide; three efficiencies are fitted, no more."""
    multiprocessors = CARDS["a100"].multiprocessors
    half_empty, full = (
        step_time.Gemm("", "forward", 256 * tiles, 128, 4096).tiled_flops(multiprocessors)
        for tiles in (multiprocessors * 3 // 2, multiprocessors * 2)
    )
    assert half_empty == full
    layer = step_time.layer_operations(ModelConfig.preset("gpt3-175b"), Layout(tp=8), Workload(batch=1, sequence=2048))
    sums = [one for one in layer if isinstance(one, step_time.Collective)]
    assert [(one.phase, one.behind is not None) for one in sums] == [("forward", False)] * 2 + [("backward", True)] * 2
    assert len(list(step_time.FITTED)) == 3
    said = printed(cells["reached"])
    assert all(f"{share:.1%}" in said for share in (step_time.FITTED.link, step_time.FITTED.gemm))
    assert f"{step_time.FITTED.link:.1%} of the speed" in source(cells["reached-answer"])


def test_cutting_further_leaves_the_product_bound_by_arithmetic(cells):
    said = printed(cells["product-intensity"])
    rows = re.findall(r"n = +(\d+), t = +(\d+): +([\d.]+), (\w+)", said)
    assert [row[3] for row in rows] == ["memory", "memory", "arithmetic", "arithmetic"]
    needed, (_, t, at_64, _) = numbers(said)[0], rows[-1]
    assert t == "64" and float(at_64) > 3 * needed  # "well above what is needed, even at t = 64"


def test_what_depends_on_the_machine_is_not_compared(cells):
    timed = [id for id, cell in cells.items() if "perf_counter" in source(cell)]
    assert timed == ["measured"]
    assert "nbval-ignore-output" in cells["measured"]["metadata"]["tags"]


def test_megabytes_are_where_alpha_stops_to_matter(cells):
    halves = [float(size) for size in re.findall(r"at ([\d.]+) MB", printed(cells["nccl"]))]
    assert halves == sorted(halves) and 9 < halves[-1] < 10  # "below some ten megabytes"
    shares = [int(share) for share in re.findall(r"(\d+)% of it α", printed(cells["nccl"]))]
    assert shares[0] > 90 and shares[1] < 20


def test_the_derivation_gives_the_bound(cells):
    """FLOPs over wire bytes are F/(t-1), whatever n and h; and it equals C/W where t - 1 is the package's bound."""
    text = source(cells["bound-text"])
    assert "FLOPs / wire bytes = F / (t - 1)" in text and "`t < F W / C`" in text
    for n, h, F, t in ((1, 7, 30, 2), (2048, 12_288, 49_152, 8)):
        flops, wire = 2 * 2 * n * h * F / t, 2 * 2 * n * h * (t - 1) / t
        assert flops / wire == pytest.approx(F / (t - 1))
    card = CARDS["a100"]
    bound = compute_bound_tp(49_152, card)
    assert 49_152 / bound == pytest.approx(card.flops_per_second / card.nvlink_bytes_per_second)


def test_limits_fall_with_the_generations_and_lie_on_both_sides_of_a_node(cells):
    said = re.findall(
        r"^(\S+), F = .*\n +v100 +([\d.]+), a100 +([\d.]+), h100 +([\d.]+)$", printed(cells["bounds"]), re.M
    )
    limits = {name: [float(limit) for limit in found] for name, *found in said}
    assert len(limits) == 4
    assert all(found == sorted(found, reverse=True) for found in limits.values())
    assert limits["gpt3-175b"][2] > 8 > limits["llama-3-8b"][2] and limits["smollm2-135m"][2] < 1
    whole = [float(share) for share in re.findall(r"layer: ([\d.]+) times", printed(cells["bounds"]))]
    assert whole[0] == 0.75 and min(whole[1:3]) > 0.9


def test_the_ratio_halves_with_each_doubling_of_h(cells):
    ratios = [numbers(line)[-1] for line in printed(cells["ratio-h"]).splitlines()[3:]]
    assert ratios == pytest.approx([ratios[0] / 2**i for i in range(5)], abs=0.006)


def test_links_are_24_12_and_9_times_slower(cells):
    said = printed(cells["links"])
    assert re.findall(r"(\d+) times slower", said) == ["24", "12", "9"]
    assert re.findall(r"hardware: (\w+)", said) == ["True"] * 3
    multiples = [float(times) for times in re.findall(r"× *([\d.]+)", printed(cells["across"]))]
    assert multiples[0] == 1.0 and multiples[1] < 2 and multiples[2] > 10  # "less than feared", "lose it all"
    limits = compute_bound_tp(49_152, "a100"), compute_bound_tp(49_152, "a100", ranks_per_node=8)
    assert [int(limit) for limit in limits] == [47, 31]
    assert "that is 47, more than a node has; over full nodes" in source(cells["interview"])


def test_statement_8_of_chapter_0_is_settled_here(cells):
    pretest = yaml.safe_load((ROOT / "chapters/00_pretest.yaml").read_text(encoding="utf-8"))
    assert pretest[7]["chapter"] == 12 and pretest[7]["verdict"] == "wrong"
    assert "Statement 8 of chapter 0 was false." in source(cells["links-answer"])


def test_the_curve_and_its_errors_are_the_packages(cells):
    levels, doublings = printed(cells["playbook"]).split("by the last doubling")
    rows, drops = (
        [numbers(line) for line in part.splitlines() if line.startswith("t = ")] for part in (levels, doublings)
    )
    plain = [one for one in published.playbook_curve() if "SP" not in one.what]
    for (t, theirs, ours, error), one in zip(rows[1:], plain, strict=True):
        assert f"TP {t:g}:" in one.what
        assert (theirs, ours) == pytest.approx((one.published, one.ours), abs=0.051)
        assert error == pytest.approx(100 * one.error, abs=0.051)
    measured, predicted = ({int(row[0]): row[i] for row in drops} for i in (1, 2))
    assert measured[8] == -12.2 and measured[16] == -42.7  # the opening rounds them
    assert predicted[8] < 2 * measured[8] and predicted[16] < -40  # "far worse than it was"; "has one too"
    errors = [row[3] for row in rows[1:]]
    assert abs(errors[0]) < 5 and -25 < errors[2] < errors[1] <= -20 and 15 < errors[3] < 25
    theirs, ours = numbers(printed(cells["playbook"]).splitlines()[-2])
    assert ours / theirs > 4 / 3
    narrow = compute_bound_tp(published.PLAYBOOK_3B.ffn, "h100")
    assert narrow < 4 and f"t < {narrow:.1f}" in printed(cells["playbook"])


def test_the_bars_show_what_the_text_says(cells):
    words = "".join(cells["playbook-bars"]["outputs"][0]["data"]["text/plain"])
    assert "collectives 145.6" in words
    small = [float(size) for size in re.findall(r"kernels ([\d.]+)", words)]
    sums = [float(size) for size in re.findall(r"([\d.]+) in all", words)]
    collectives = [float(size) for size in re.findall(r"collectives ([\d.]+)", words)]
    assert small == sorted(small) and all(1.3 < b / a < 2 for a, b in zip(small, small[1:]))  # "grows by less"
    for name, sign in {"products": 1, "kernels": 1, "collectives": 1, "optimizer": -1}.items():
        sizes = [sign * float(size) for size in re.findall(rf"{name} ([\d.]+)", words)]
        assert len(sizes) == 5 and sizes == sorted(sizes)  # "only the optimizer shrinks"
    batches = list(published.numbers()["tp_measurements"]["ultrascale_tp"]["max_batch"].values())
    assert batches == sorted(set(batches))  # "which grows with t"
    assert [c > 0.4 * s for c, s in zip(collectives, sums)] == [False, False, False, True, True]


def test_weak_scaling_is_shown_with_its_errors(cells):
    rows = published.weak_scaling()[1:]
    errors = [float(error) for error in re.findall(r"([+-][\d.]+)%$", printed(cells["weak"]), re.M)]
    assert errors == pytest.approx([100 * row.error for row in rows], abs=0.051)
    assert all(abs(error) < 3 for error in errors[:3])  # "within three percent for t alone"
    assert min(errors[3:]) > 0 and max(errors[3:]) == errors[4]  # "too optimistic in every row, most at t = 2"
    assert ModelConfig.preset("m19-1.2b").ffn < ModelConfig.preset("m19-8.3b").ffn
