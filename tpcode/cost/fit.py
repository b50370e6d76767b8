"""Three efficiencies from published step times, and how well they predict a model that they have not seen.

With T the time that a run took, and T(e) what efficiencies e predict, it minimises

    Σ log(T(e) / T)²  +  0.01 Σ log(e / measured)²

The second sum holds each efficiency near what that operation alone has been measured to reach on an A100
(`step_time.MEASURED`): a prior of 30% where a run's time is trusted to 3%. Without it six runs of large models with a
microbatch of one tell memory and links badly apart, as both of their times grow with bsh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tpcode.config import Layout, ModelConfig
from tpcode.cost.hardware import Card
from tpcode.cost.step_time import MEASURED, Efficiencies, step_time
from tpcode.cost.workload import Workload

LOWEST, HIGHEST = 0.2, 0.95  # where an efficiency is looked for
PRIOR = 0.01  # (3% / 30%)²
BOUNDS = np.log([LOWEST, HIGHEST])
ROUNDS, STEP, ENOUGH = 20, 1e-4, 1e-6  # of the search, in logarithms


@dataclass(frozen=True)
class Run:
    """A training step whose time is published.

    Attributes:
        name: of the model: runs of one name are left out together.
        seconds: that the step took.
    """

    name: str
    config: ModelConfig
    layout: Layout
    workload: Workload
    card: str | Card
    seconds: float

    def predicted_seconds(self, efficiencies: Efficiencies) -> float:
        """What the model of a step's time says."""
        return step_time(self.config, self.layout, self.workload, self.card, efficiencies).seconds

    def error(self, efficiencies: Efficiencies) -> float:
        """Predicted over published, less 1."""
        return self.predicted_seconds(efficiencies) / self.seconds - 1


def fit(runs: Sequence[Run], prior: float = PRIOR) -> Efficiencies:
    """The three efficiencies, each from 0.2 to 0.95, that explain these runs best: Gauss and Newton's method on their
    logarithms, with slopes from small steps.

    Args:
        prior: the weight of what was measured; 0 for none.
    """
    measured, seconds = np.log(tuple(MEASURED["a100"])), np.log([run.seconds for run in runs])

    def misses(point: np.ndarray) -> np.ndarray:
        predicted = np.log([run.predicted_seconds(Efficiencies(*np.exp(point))) for run in runs])
        return np.concatenate([predicted - seconds, sqrt(prior) * (point - measured)])

    point = measured
    now = misses(point)
    for _ in range(ROUNDS):
        slopes = np.stack([(misses(point + step) - now) / STEP for step in STEP * np.eye(3)], 1)
        change = _step_inside(point, slopes, now)
        while True:  # a whole step, or as much of it as makes things better
            there = np.clip(point + change, *BOUNDS)
            then = misses(there)
            if then @ then < now @ now or np.abs(change).max() < ENOUGH:
                break
            change = change / 2
        point, now = there, then
        if np.abs(change).max() < ENOUGH:
            break
    return Efficiencies(*np.exp(point).tolist())


def _step_inside(point: np.ndarray, slopes: np.ndarray, now: np.ndarray) -> np.ndarray:
    """The least-squares step of those efficiencies that are not at a bound which they would cross."""
    free = np.ones(len(point), bool)
    while free.any():
        change = np.zeros(len(point))
        change[free], *_ = np.linalg.lstsq(slopes[:, free], -now, rcond=None)
        stuck = free & ((point <= BOUNDS[0]) & (change < 0) | (point >= BOUNDS[1]) & (change > 0))
        if not stuck.any():
            return change
        free &= ~stuck
    return np.zeros(len(point))


def leave_one_out(runs: Sequence[Run], prior: float = PRIOR) -> list[tuple[Run, Efficiencies, float]]:
    """Each run with efficiencies fitted to the runs of all *other* models, and the error of its prediction."""
    fits = {name: fit([run for run in runs if run.name != name], prior) for name in {run.name for run in runs}}
    return [(run, fits[run.name], run.error(fits[run.name])) for run in runs]
