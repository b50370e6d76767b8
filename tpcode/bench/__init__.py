"""`tpcode bench`: what tensor parallelism takes on this machine, measured: collectives, FFN, attention, a whole block.

`settings` says what is measured and refuses what cannot be, `measure` runs on the ranks, `fit` finds alpha and beta,
`tables` tells, `trace` makes a timeline for Chrome. In numbers handed on, times are in seconds and sizes in bytes.
"""

import os

from tpcode.bench.settings import Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> dict:
    """Measure, on ranks of its own or on those that torchrun started; returns the report as plain data.

    Raises:
        MemoryError: there is too little; the message has what is needed and what there is.
        RankError: a rank failed.
    """
    from tpcode.bench.fit import fit_all, predict_all
    from tpcode.bench.measure import measure
    from tpcode.runtime import RankPool, launch
    from tpcode.runtime.env import cores, under_torchrun

    settings.require_memory()
    load = os.getloadavg()[0]  # before the bench adds its own
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces itself on standard error
    if under_torchrun():
        ranks = launch(measure, settings.world, settings)
    else:
        with RankPool(settings.world, timeout=settings.timeout_seconds) as pool:
            ranks = pool.run(measure, settings)
    report = ranks[0]
    report["machine"] |= {"cores": cores(), "load": load}
    report["trace"] = [event for rank in ranks for event in rank["trace"]]
    report["fits"] = fit_all(report["collectives"])
    predict_all(report)
    return report
