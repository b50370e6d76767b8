"""Published numbers beside ours, in one table (run with -s to see it), and the bounds on them."""

from dataclasses import replace

import pytest

from tpcode.cost import fit as fitting
from tpcode.cost import published, step_time

FITTED_BOUNDS = {"mean": 0.04, "largest": 0.07}


def errors(prior=fitting.PRIOR):
    """Of K22's eight iteration times: in sample, and with the model left out."""
    found = published.iteration_times(prior)
    return [abs(inside) for _, inside, _, _ in found], [abs(outside) for _, _, _, outside in found]


def mean(numbers):
    return sum(numbers) / len(numbers)


def test_the_table(capsys):
    """Every number that has a bound is within it; there are as many as the papers' tables have rows."""
    found = published.comparisons()
    with capsys.disabled():
        print("\n" + published.table(found))
    assert {name: len(section) for name, section in found.items()} == {
        "Counted": 10 + 4,
        "Divided": 10,
        "Training times": 2,
        "Utilization": 4 * 2,
        "Iteration times": 2 * 8,
        "A layer, which nothing was fitted to": 5 * 2,
        "Data parallelism, which nothing was fitted to": 1,
        "Another card, which nothing was fitted to": 4 + 4,
        "Other models and cards, which nothing was fitted to": 4 + 4,
    }
    bounded = [one for section in found.values() for one in section if one.good is not None]
    assert len(bounded) == 14 + 10 + 2 + 8 + 8
    assert [one for one in bounded if not one.good] == []


def test_iteration_times_of_a_model_left_out(capsys):
    """Three efficiencies from three models predict the fourth: within 4% in the mean and 7% at most, and each
    efficiency lies between its bounds. In sample beside it."""
    inside, outside = errors()
    with capsys.disabled():
        for name, found in (("in sample", inside), ("left out", outside)):
            print(f"\nK22 table 5, {name}: mean {100 * mean(found):.2f}%, largest {100 * max(found):.2f}%", end="")
    assert mean(outside) <= FITTED_BOUNDS["mean"] and max(outside) <= FITTED_BOUNDS["largest"]
    assert mean(inside) <= mean(outside) and max(inside) <= max(outside)
    for _, _, efficiencies, _ in published.iteration_times():
        assert all(fitting.LOWEST + 0.01 < e < fitting.HIGHEST - 0.01 for e in efficiencies)


@pytest.mark.parametrize("prior", [fitting.PRIOR / 4, 4 * fitting.PRIOR])
def test_the_bounds_do_not_hang_on_the_priors_weight(prior):
    _, outside = errors(prior)
    assert mean(outside) <= FITTED_BOUNDS["mean"] and max(outside) <= FITTED_BOUNDS["largest"]


def test_without_a_prior_the_largest_models_leave_memory_and_links_undecided():
    """Why there is one: fitted to runs with a microbatch of one alone, memory reaches its bound, and the 22B model is
    missed by a little more than 7%."""
    _, outside = errors(0.0)
    assert mean(outside) <= FITTED_BOUNDS["mean"]
    assert FITTED_BOUNDS["largest"] < max(outside) < 0.08
    memory = {run.name: efficiencies.memory for run, _, efficiencies, _ in published.iteration_times(0.0)}
    assert memory["22B"] == pytest.approx(fitting.HIGHEST) and max(memory[n] for n in memory if n != "22B") < 0.8


def test_what_is_shipped_is_what_the_fit_gives():
    again = fitting.fit(published.k22_runs())
    assert tuple(again) == pytest.approx(tuple(step_time.FITTED), abs=1e-3)
    assert all(fitting.LOWEST < e < fitting.HIGHEST for e in again)


def test_a_wrong_model_is_out_of_bound():
    """The bounds can fail: without the chunks of the 175B model's stages its bubble is three times as long."""
    runs = published.k22_runs()
    flat = [replace(run, workload=replace(run.workload, interleave=1)) for run in runs if run.name != "530B"]
    missed = [abs(error) for _, _, error in fitting.leave_one_out(flat)]
    assert max(missed) > FITTED_BOUNDS["largest"]
    one = published.Comparison("here", "this", "s", 2.0, 2.2, within=0.07, relative=True)
    assert (one.good, replace(one, within=0.11).good, replace(one, within=None).good) == (False, True, None)
    assert "OUT OF BOUND" in published.table({"wrong": [one]})


def test_a_layers_times_that_were_not_fitted():
    """K22's table 4: each within 5%, though no number of it went into the fit."""
    assert max(abs(one.error) for one in published.layer_times()) < 0.05


def test_tables_are_read_by_their_columns():
    first = published.rows("narayanan2021", "table1_weak_scaling")[0]
    assert (first["params_B"], first["tp"], first["pct_peak"]) == (1.7, 1, 44)
    assert len(published.rows("shoeybi2019", "weak_scaling_configs")) == 4
