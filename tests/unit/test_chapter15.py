"""Chapter 15's worked integers tell right from wrong, and its stored outputs are what its text says."""

import numpy as np
import pytest
import torch
from notebook_reading import cells_of, defined_by, printed


@pytest.fixture(scope="module")
def cells() -> dict[str, dict]:
    return cells_of(15)


def test_ranks_that_drew_different_ids_have_no_row(cells):
    """One id on all ranks is its row; no other pair is any row, so the text's "belongs to no token" holds for all."""
    names = defined_by(cells, "two-ids")
    E, looked_up = names["E"], names["looked_up"]
    for first in range(4):
        for second in range(4):
            x = looked_up((first, second)).tolist()
            owners = [id for r, id in enumerate((first, second)) if id // 2 == r]
            assert np.array_equal(x, E[owners].sum(0))
            if first == second:
                assert x == E[first].tolist()
            elif len(owners) != 1:
                assert x not in E.tolist()


@pytest.fixture(scope="module")
def timing(cells) -> dict:
    from tpcode.checkpoint import SMOLLM2
    from tpcode.config import PRESETS

    return defined_by(cells, "token-time", SMOLLM2=SMOLLM2, llama=PRESETS["llama-3-70b"])


def test_the_verdicts_on_a_tokens_time(timing):
    """Small: each added rank makes it slower. Large: faster, not eightfold, and at t = 8 mostly latency. Prefill:
    bandwidth. The interview: from half in all-reduces, twice the ranks are slower."""
    seconds, small, large = timing["token_seconds"], timing["SMOLLM2"], timing["llama"]
    assert sum(seconds(small, 1)) < sum(seconds(small, 3)) < sum(seconds(small, 9))
    assert sum(seconds(large, 8)) > sum(seconds(large, 1)) / 8
    times = [sum(seconds(large, t)) for t in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    weights, latency, bandwidth = seconds(large, 8)
    assert latency > (weights + latency + bandwidth) / 2 and bandwidth < 0.01 * latency
    assert sum(seconds(large, 16)) > times[-1]
    _, latency, bandwidth = seconds(large, 8, tokens=2048)
    assert bandwidth > 5 * latency


def test_a_tokens_time_tells_each_slip(timing):
    """By hand for t = 3: 61 calls of 4 messages of 5 µs; what is left out gives another number."""
    _, latency, _ = timing["token_seconds"](timing["SMOLLM2"], 3)
    assert latency == pytest.approx(61 * 4 * 5e-6)
    slips = [60 * 4 * 5e-6, 61 * 2 * 5e-6, 61 * 5e-6, 121 * 4 * 5e-6, 31 * 4 * 5e-6]
    assert all(abs(latency - slip) > 1e-5 for slip in slips)


def test_the_stored_run_says_what_the_text_says(cells):
    said = printed(cells["same-text"]) + printed(cells["nine-ranks"])
    assert said.count("on every rank: True") == 3 and "False" not in said and said.count("Paris.") == 3
    caches = printed(cells["cache-bytes"])
    assert caches.count("15,360 bytes a token on a rank") == 2 and "138,240 on all" in caches
    calls = printed(cells["token-ledger"])
    assert calls.count("61 of") == 2 and "61 of [1, 1, 576], payload 2304 bytes each" in calls
    apart = printed(cells["apart"]).splitlines()
    assert [line.rsplit(" ")[-1] for line in apart] == ["False", "True", "True"]
    files = printed(cells["reshard"])
    assert "51 on all" in files and "54 on all" in files and files.count("True") == 4 and "False" not in files


def test_an_argmax_with_gumbels_noise_draws_by_softmax():
    """The text's third cure, in the text's own formula: frequencies in 40,000 draws within 4.5 deviations."""
    z, n = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64), 40_000
    u = torch.rand(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(15))
    counts, p = (z - (-u.log()).log()).argmax(-1).bincount(minlength=4), z.softmax(0)
    assert ((counts - n * p).abs() < 4.5 * (n * p * (1 - p)).sqrt()).all()
    wrong = (z + u).argmax(-1).bincount(minlength=4)  # plain uniform noise does not
    assert ((wrong - n * p).abs() > 4.5 * (n * p * (1 - p)).sqrt()).any()
