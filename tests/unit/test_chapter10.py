"""Chapter 10's cells say what its text says, and its stored bytes are the formula's."""

import re
from dataclasses import replace

import pytest
from notebook_reading import cells_of, printed, prose

from tpcode.config import Layout, ModelConfig
from tpcode.cost.memory import extra_flops, fits, layer_bytes

MODEL = replace(ModelConfig.preset("k22-22b"), dropout=0.1)


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(10)


def test_every_comparison_with_the_meter_holds(cells):
    said = "".join(map(printed, (cell for cell in cells.values() if cell["cell_type"] == "code")))
    verdicts = re.findall(r"(?:to the byte|same dX): (\w+)", said)
    assert verdicts == ["True"] * 13


def test_the_list_of_tensors_adds_up_to_34_and_5(cells):
    counts = re.findall(r"(\d) ([sa]·.*)$", printed(cells["thirty-four"]), re.MULTILINE)
    units = {unit: sum(int(count) for count, of in counts if of == unit) for unit in {unit for _, unit in counts}}
    assert units == {"s·b·h": 34, "a·s²·b": 5}
    assert "{'attention': 11, 'ffn': 19, 'norms': 4, 'scores': 5}" in printed(cells["thirty-four"])


def test_ten_lines_or_six_large_tensors_stay_whole(cells):
    rows = [line.split() for line in printed(cells["on-ranks"]).splitlines()[1:21]]
    sbh = 2 * 64 * 64
    large = [row for row in rows if row[-1] == "whole" and int(row[2].replace(",", "")) >= sbh]
    assert [row[0] for row in large] == ["norm_1", "attention.qkv", "dropout_1", "norm_2", "ffn.c_fc", "dropout_2"]
    divided = [row for row in rows if row[-1] != "whole"]
    for row in divided:
        one, two, four = (int(number.replace(",", "")) for number in row[2:5])
        assert one == 2 * two == 4 * four
    assert "whole: 10 sbh" in printed(cells["on-ranks"])


def test_scores_are_three_quarters_and_recomputation_costs_what_the_text_says(cells):
    whole = layer_bytes(MODEL, 4, 2048)
    assert 0.75 < 1 - layer_bytes(MODEL, 4, 2048, recompute="selective") / whole < 0.77
    prices = [
        extra_flops(replace(ModelConfig.preset(f"k22-{name}"), dropout=0.1), 2048, "selective")
        for name in ("22b", "175b", "530b")
    ]
    assert max(prices) < 0.02  # "two percent at most"
    assert 0.32 < extra_flops(MODEL, 2048, "full") < 1 / 3  # "nearly a third"
    calls = re.findall(r"(\d) all-reduces", printed(cells["run-again"]))
    assert calls == ["4", "4", "6"]
    assert re.findall(r"(\d+)% more;", printed(cells["measured-time"])) == ["0", "7", "39"]


def test_of_twelve_plans_two_fit_and_a_tenth_less_leaves_one(cells):
    ways = [(one.layout.tp, one.recompute) for one in fits(MODEL, 80e9, 4, 2048)]
    assert ways == [(8, "selective"), (8, "full")]
    assert [one.recompute for one in fits(MODEL, 72e9, 4, 2048)] == ["full"]
    of_18 = fits(MODEL, 80e9, 4, 2048, recipe="mixed, fp32 gradients")
    assert [one.recompute for one in of_18] == ["full"] and "with 18 bytes for each parameter" in prose(cells)
    words = "".join(cells["bars-of-plans"]["outputs"][0]["data"]["text/plain"])
    assert words.count("within the limit") == 2 and words.count("over the limit") == 10
    assert "t = 8, full" in printed(cells["a-tenth"])


def test_the_formulas_of_the_text_are_those_of_the_code(cells):
    """Each formula is on the page, and gives what `layer_bytes` gives."""
    b, s, h, a, t = 4, 2048, MODEL.hidden, MODEL.heads, 8
    sbh = s * b * h
    formulas = {
        "sbh(34 + 5as/h)": (Layout(tp=1), "none", sbh * (34 + 5 * a * s / h)),
        "sbh(10 + 24/t + 5as/(ht))": (Layout(tp=t), "none", sbh * (10 + 24 / t + 5 * a * s / (h * t))),
        "sbh(10 + 24/t)": (Layout(tp=t), "selective", sbh * (10 + 24 / t)),
        "2sbh": (Layout(tp=t), "full", 2 * sbh),
    }
    for formula, (layout, recompute, value) in formulas.items():
        assert formula in prose(cells)
        assert layer_bytes(MODEL, b, s, layout, recompute=recompute) == pytest.approx(value, rel=1e-12)
    llama = ModelConfig.preset("llama-3-8b")
    by_hand = s * b * llama.hidden * (12 + 4 * llama.kv_heads / llama.heads) + 6 * s * b * llama.ffn
    assert "sbh(12 + 4k/a) + 6sbF" in prose(cells)
    assert layer_bytes(llama, b, s) == by_hand
