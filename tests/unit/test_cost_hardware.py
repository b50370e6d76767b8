"""Cards and links, per GPU and direction; and that costs load no torch."""

import subprocess
import sys

import pytest

from tpcode import cost
from tpcode.cost import hardware
from tpcode.cost.hardware import CARDS, GB, card

FLOORS = "; ".join(f"import tpcode.cost.{name}" for name in cost.__all__)


def test_costs_load_no_torch():
    """Not vacuous: the modules are there once they are asked for."""
    code = f"import sys, tpcode.cost; {FLOORS}; tpcode.cost.flops.RECOMPUTE; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_module_is_answered_with_the_list():
    with pytest.raises(AttributeError, match="has no attribute 'money'; it has communication, .*workload"):
        _ = cost.money
    assert {"flops", "layout"} <= set(dir(cost))


def test_links_like_for_like():
    """NVLink over InfiniBand, per GPU and direction: 24 on a DGX-2H, 12 with A100s and HDR, 9 with H100s and NDR."""
    ratios = {name: one.nvlink_bytes_per_second / one.network_bytes_per_second for name, one in CARDS.items()}
    assert ratios == {"v100": 24, "a100": 12, "h100": 9, "h200": 9}
    assert hardware.bytes_per_second(200) == 25 * GB == CARDS["a100"].network_bytes_per_second
    assert hardware.per_direction(600 * GB) == 300 * GB == CARDS["a100"].nvlink_bytes_per_second


def test_dense_and_not_sparse():
    assert {name: one.flops_per_second / 1e12 for name, one in CARDS.items()} == {
        "v100": 130,
        "a100": 312,
        "h100": 989,
        "h200": 989,
    }
    assert all(len(one.sources) >= 2 for one in CARDS.values())


def test_a_ring_goes_at_the_speed_of_what_leaves_the_node():
    a100, h100 = CARDS["a100"], CARDS["h100"]
    assert a100.ring_bytes_per_second(8) == 300 * GB  # within the node
    assert a100.ring_bytes_per_second(16) == 8 * 25 * GB  # all eight adapters of each of two nodes
    assert a100.ring_bytes_per_second(16, ranks_per_node=1) == 25 * GB  # data-parallel peers at t = 8
    assert h100.ring_bytes_per_second(32, ranks_per_node=4) == 4 * 50 * GB
    assert CARDS["v100"].ring_bytes_per_second(16) == 150 * GB  # sixteen to a server
    assert a100.nodes(64) == 8


def test_cards_by_name():
    assert card("A100") is CARDS["a100"] is card(CARDS["a100"])
    for unknown in ("b300", None, 100):
        with pytest.raises(ValueError, match="no card .*; there are v100, a100, h100, h200"):
            card(unknown)


def test_ranks_that_do_not_fill_nodes_are_refused():
    with pytest.raises(ValueError, match="12 ranks do not fill nodes with 8 each"):
        CARDS["a100"].nodes(12)
    with pytest.raises(ValueError, match="has 8 GPUs, and 16 were asked for"):
        CARDS["a100"].nodes(16, 16)
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        CARDS["a100"].nodes(0)
