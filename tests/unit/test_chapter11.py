"""Chapter 11's worked integers tell the right way from the wrong ones that the page names; its published numbers are
those of the data file; and its runs show what its text says."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from notebook_reading import cells_of, printed, prose, source

from tpcode.config import Layout, ModelConfig
from tpcode.cost import memory

ROOT = Path(__file__).parents[2]
K22 = yaml.safe_load((Path(memory.__file__).parent / "published.yaml").read_text(encoding="utf-8"))["korthikanti2022"]


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(11)


def assigned(cells: dict, id: str, name: str) -> dict:
    """The literal that a cell gives to a name."""
    return eval(re.search(rf"^{name} = ({{.*?^}})", source(cells[id]), re.DOTALL | re.MULTILINE)[1])


# ---- the worked integers --------------------------------------------------------------------------------------------


def test_the_halves_tell_a_norm_of_the_sum_from_other_norms(cells):
    """Rules out: summands whose normed sum equals the sum of their norms, or their norms alone, in any token that the
    page speaks of."""
    names: dict = {}
    exec(source(cells["halves"]).partition("def both_ways")[0], names)
    y_of, norm = names["y_of"], names["toy_norm"]
    right = norm(y_of.sum(0))
    assert right.tolist() == [[0, 4], [0, 2], [0, 0], [6, 0]]
    of_summands = norm(y_of[0]) + norm(y_of[1])
    assert (of_summands[1].tolist(), right[1].tolist()) == ([2, 4], [0, 2])  # as the page says
    assert not torch.equal(of_summands, right)
    by_features = y_of.sum(0).T  # a reduce-scatter along the features leaves a rank one feature of each token
    assert not torch.equal(norm(by_features).T, right)


def test_the_pair_tells_the_sum_from_a_ranks_own_part(cells):
    names: dict = {}
    exec(source(cells["pair-by-hand"]), names)
    parts, dX = names["parts"], names["dX"]
    dense = np.hstack(names["dH_of"]) @ np.hstack(names["A_of"]).T
    assert dX.tolist() == dense.tolist() == [[8, 6], [7, 3]]
    for r in range(2):
        for part in parts:
            assert part[r].tolist() != dX[r].tolist()
    assert parts[1][0].tolist() == [3, 4]  # what the page says would be lost


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_a_layer_sends_ten_units_and_plain_tp_eight(cells):
    text = printed(cells["units"])
    for t in (2, 4):
        assert f"t = {t}, TP: 8 units\n    4 all_reduce\n" in text
        assert f"t = {t}, TP + SP: 10 units\n    6 all_gather\n    4 reduce_scatter\n" in text


def test_the_gathered_input_is_kept_by_the_pairs_and_not_by_the_package(cells):
    text = printed(cells["kept-by-pairs"])
    assert "of pairs keeps\n    [[16, 6]" in text and "package's FFN keeps\n    [[2, 4, 6]" in text


def test_only_the_sum_is_right_and_a_run_without_it_falls_too(cells):
    text = printed(cells["parts"])
    assert "own is right (< 1e-12): 0" in text and "mean is right (< 1e-12): 0" in text
    assert "9 of them in parts" in text and "sum is right (< 1e-12): 9" in text and "left alone: True" in text
    forgotten = printed(cells["forgotten"])
    curves = re.findall(r"loss ([\d.]+), after 30 steps ([\d.]+)", forgotten)
    assert all(float(last) < float(first) / 3 for first, last in curves) and len(curves) == 2
    assert re.findall("same gamma: (True|False)", forgotten) == ["True", "False"]


def test_every_verdict_of_the_page_is_the_one_that_its_text_draws(cells):
    assert printed(cells["memory"]).count("as metered: True") == 6
    assert "False" not in printed(cells["pairs-on-ranks"])
    figures = [line.split()[-3:] for line in printed(cells["figures"]).splitlines()[1:-1]]
    assert len(figures) == 4 * (3 + 4)
    for unit, paper, ours in figures:
        assert paper == ours if unit == "GiB" else abs(float(paper) - float(ours)) < 0.2
    *lines, without, with_sp = printed(cells["fits"]).splitlines()
    assert (without.split(": ")[1], with_sp.split(": ")[1]) == ("t = 8, full", "t = 8, selective")
    stars = {line.split()[0]: line.count("*") for line in lines[2:]}
    assert stars == {"TP": 0, "SP": 0, "selective": 0, "both": 4, "full": 4}
    assert "4.00 times" in printed(cells["router"]) and printed(cells["router"]).count("1.00 times") == 2


def test_selective_alone_fits_the_22b_model_at_16_bytes_and_not_at_18(cells):
    """Rules out: chapters 10 and 11 saying opposite things of one model, with no word of why."""
    model = replace(ModelConfig.preset("k22-22b"), dropout=0.1)

    def ways(recipe, card=80e9, **options):
        found = memory.fits(model, card, 4, 2048, recipe=recipe, **options)
        return {(one.layout.tp, one.recompute) for one in found}

    assert (8, "selective") in ways("mixed") and (8, "selective") not in ways("mixed, fp32 gradients")
    for recipe in ("mixed", "mixed, fp32 gradients"):  # "at 16 bytes or at 18"
        assert (8, "selective") in ways(recipe, 72e9, sequence_parallel=True)
    assert "it counted 16 bytes for each parameter, and this table has the paper's 18" in prose(cells)


def test_what_is_outside_the_layers_follows_the_formula_of_the_prose(cells):
    assert "`sbh/t · (1 + 4(1 + V/h))`" in prose(cells)
    model = replace(ModelConfig.preset("k22-22b"), dropout=0.1)
    ends = memory.activation_bytes(model, 4, 2048, Layout(tp=8, sequence_parallel=True)).ends
    assert ends == 4 * 2048 * model.hidden // 8 * (1 + 4 * (1 + model.vocab / model.hidden))


# ---- published numbers ----------------------------------------------------------------------------------------------


def test_published_numbers_are_those_of_the_data_file(cells):
    """Rules out: a number mistyped on the page, which would agree with nobody."""
    rows = {row[0]: row for row in K22["table3_configs"]["rows"]}
    models = assigned(cells, "figures", "models")
    for name, (p, b, m) in models.items():
        assert (p, b) == (rows[name][5], rows[name][8])
        assert m == (3 if name in ("175B", "530B") else 1)
    figure_1 = assigned(cells, "figures", "figure_1")
    assert figure_1 == {name: tuple(K22["fig1_GiB_per_gpu"][name].values()) for name in models}
    figure_7 = assigned(cells, "figures", "figure_7")
    assert figure_7 == {name: tuple(K22["fig7_pct_of_tp_baseline"][name].values()) for name in models}
    table_5 = {row[0]: tuple(row[1:3]) for row in K22["table5_end_to_end"]["rows"]}
    assert assigned(cells, "table-5", "table_5") == table_5
    layer_ms = {row[0]: row[3] for row in K22["table4_layer_ms_22B"]["rows"]}
    assert '{"TP": 19.6, "TP + SP": 19.0}' in source(cells["table-5"])
    assert (layer_ms["baseline_no_recompute"], layer_ms["sequence_parallel"]) == (19.6, 19.0)


def test_the_formulas_of_table_2_are_the_papers(cells):
    """The page's strings, in units of sbh bytes, are those of the data file divided by sbh."""
    said = set(re.findall(r'^    "(.+?)": \(', source(cells["table-2"]), re.MULTILINE))
    paper = {name: f for name, f in K22["table2_activation_bytes_per_layer"].items() if name != "status"}
    assert said == {"2" if f == "2 sbh" else "34/t" if f == "34 sbh / t" else f[4:-1] for f in paper.values()}
