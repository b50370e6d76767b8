"""Chapter 9's worked integers tell the right masks, norms and rows from the wrong ones that the page and its exercises
list; and the page's wrong runs are wrong in the way that it says."""

import re

import numpy as np
import pytest
from notebook_reading import cells_of, defined_by, printed

from tpcode.layers import Placement


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(9)


@pytest.fixture(scope="module")
def page(cells) -> dict:
    """The names that the cells of the worked examples define."""
    return defined_by(cells, "init-rules", "drop-by-hand", "norm-by-hand", "norm-counted", "files-rows", "files-naive")


def test_each_rule_for_first_weights_gives_another_weight(page):
    """Rules out: a seed whose numbers repeat, so that equal shards would prove nothing."""
    import torch

    for t in (2, 4):
        merged = [torch.cat([rule(r, t) for r in range(t)]) for rule in page["rules"].values()]
        assert [len(W.unique(dim=0)) for W in merged] == [8 // t, 8, 8]
        assert torch.equal(merged[2], page["draw"](7, 8))
        assert not torch.equal(merged[1], merged[2])


def test_a_mask_of_its_own_on_each_rank_gives_the_output_of_no_mask(page):
    X, A = page["X2"], page["A"]
    every_mask = [(2 * X * np.array(mask) @ A).tolist() for mask in ((0, 0), (0, 1), (1, 0), (1, 1))]
    unscaled = [(X * np.array(mask) @ A).tolist() for mask in ((0, 1), (1, 0), (1, 1))]
    assert page["mixed"] == [8, 20]
    assert page["mixed"] not in every_mask + unscaled


def test_each_wrong_norm_is_another(page):
    cut, whole = page["cut_of"], page["replicated"]
    own = [np.hypot(part, whole) for part in cut]
    wrong = {
        "rank 0 alone": own[0],
        "rank 1 alone": own[1],
        "all squares summed": np.sqrt(2 * whole**2 + 25),
        "norms added": sum(own),
        "mean of squares": np.sqrt((2 * whole**2 + 25) / 2),
        "no replicated one": 5,
        "no root": 169,
    }
    assert np.sqrt(page["once"]) == 13
    assert len({round(float(value), 2) for value in [13, *wrong.values()]}) == len(wrong) + 1


def test_all_ranks_together_count_every_entry_once(page):
    for placement in page["what"].values():
        if placement.dim is not None:
            counted = sum(int(placement.counted(r, 4).sum()) for r in range(4))
            assert counted == placement.true_size


def test_joined_and_halved_files_are_not_the_right_ones(page):
    right = {t: [page["table"].rows(r, t).tolist() for r in range(t)] for t in (2, 4)}
    assert [part.tolist() for part in page["joined"]] != right[2]
    assert page["joined"][1][0] == 6 and right[2][1][0] == 5
    assert [part.tolist() for part in page["halved"]] != right[4]
    assert Placement(0, (10,), pad=True).shard_size(4) == 3


def test_every_wrong_run_goes_down_and_only_the_right_one_is_the_dense_one(cells):
    rows = {line[:21].strip(): line[21:].split() for line in printed(cells["curves"]).splitlines()[1:]}
    assert len(rows) == 6
    assert all(float(losses[-1]) < float(losses[0]) - 1 for losses in rows.values())
    assert rows["right"] == rows["one device"]
    off = dict(re.findall(r"^(.+?) +ends at .+ off by (.+)$", printed(cells["curves-distance"]), re.MULTILINE))
    assert off.pop("right") == "< 1e-12"
    assert all(float(distance) > 0.05 for distance in off.values())
    ends = dict(re.findall(r"^(.+?) +ends at ([\d.]+)", printed(cells["curves-distance"]), re.MULTILINE))
    assert float(ends["replicas unsummed"]) < float(ends["one device"])  # as the text says


def test_no_two_faults_have_the_same_signs(cells):
    """Two have, in the table; which gradients are wrong then tells them apart."""
    rows = {line[:21].strip(): tuple(line[21:].split()) for line in printed(cells["signs"]).splitlines()[1:]}
    assert rows.pop("right") == ("same", "same", "same", "yes")
    assert rows.pop("no copy (f)") == rows["replicas unsummed"]
    assert len(set(rows.values())) == 3
    which = printed(cells["signs-which"]).split("replicas unsummed")
    assert "right: lm_head" in which[0] and which[0].count("wrong: ") == 11
    assert re.findall(r"wrong: \S+?(\w_proj)", which[1]) == ["k_proj", "v_proj"]


def test_the_two_streams_are_megatrons(cells):
    assert "seeds 1234 and 3952" in printed(cells["drop-streams"])  # 1234 + 2718
    assert "seeds 1234 and 3953" in printed(cells["drop-streams"])
