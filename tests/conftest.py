"""What all tests share: warm ranks, what is skipped where, and no skipping in CI."""

import os
import signal

import pytest
import torch

from tpcode import RankPool

# A shell starts what runs in the background with SIGINT ignored, and so would the programs be that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup ignores this one


@pytest.fixture(scope="session")
def pool2():
    with RankPool(2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4():
    with RankPool(4, timeout=60) as pool:
        yield pool


@pytest.fixture(autouse=True)
def default_dtype():
    """Tests run in any order: the dtype that one sets for its process ends with it."""
    yield
    torch.set_default_dtype(torch.float32)


def pytest_collection_modifyitems(items):
    gpus = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.args[0] if marker and marker.args else 1
        if marker and gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, there are {gpus}"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With TPCODE_NO_SKIPS, as in CI, a test that would be skipped fails; only those that need a GPU may be."""
    report = (yield).get_result()
    if report.skipped and os.environ.get("TPCODE_NO_SKIPS") and not item.get_closest_marker("gpu"):
        if hasattr(report, "wasxfail"):
            return
        report.outcome = "failed"
        report.longrepr = f"skipped, and TPCODE_NO_SKIPS is set: {report.longrepr}"
