"""Splitting sizes: right values, and refusals that say what would work."""

import doctest
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tpcode import shapes
from tpcode.shapes import divide, head_groups, padded, padded_vocab, require_last_dim, shard_range


def test_examples_in_docstrings():
    results = doctest.testmod(shapes)
    assert results.attempted >= 3 and results.failed == 0


@pytest.mark.parametrize(("n", "t", "share"), [(12, 1, 12), (12, 4, 3), (1536, 3, 512), (0, 4, 0), (np.int64(8), 2, 4)])
def test_divide(n, t, share):
    assert divide(n, t, "F") == share and type(divide(n, t, "F")) is int


def test_divide_refuses_and_lists_what_works():
    with pytest.raises(ValueError, match=r"^F = 1536 does not divide by t = 9; t that work: 1, 2, 3, 4, 6, 8"):
        divide(1536, 9, "F")
    with pytest.raises(
        ValueError, match=r"V = 50257 does not divide by t = 2; t that work: 1, 29, 1733, 50257; pad it$"
    ):
        divide(50257, 2, "V", hint="pad it")


def test_uneven_shards_are_refused_rather_than_rounded():
    """Rules out: 5 features over 2 ranks losing their true size."""
    with pytest.raises(ValueError, match="features = 5 does not divide by t = 2; t that work: 1, 5"):
        shard_range(5, 0, 2, "features")


@pytest.mark.parametrize("t", [1, 2, 3, 4, 6, 12])
def test_shard_ranges_cover_everything_once(t):
    whole = list(range(12))
    pieces = [whole[shard_range(12, rank, t, "F")] for rank in range(t)]
    assert sum(pieces, []) == whole
    assert {len(piece) for piece in pieces} == {12 // t}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: divide(8.0, 2, "F"), TypeError, "F must be an integer and is 8.0"),
        (lambda: divide(8, 2.0, "F"), TypeError, "t must be an integer"),
        (lambda: divide(True, 1, "F"), TypeError, "F must be an integer and is True"),
        (lambda: divide("8", 2, "F"), TypeError, "'8'"),
        (lambda: divide(8, None, "F"), TypeError, "None"),
        (lambda: divide(-8, 2, "F"), ValueError, "F must be at least 0 and is -8"),
        (lambda: divide(8, 0, "F"), ValueError, "t must be at least 1 and is 0"),
        (lambda: divide(8, -2, "F"), ValueError, "t must be at least 1 and is -2"),
        (lambda: shard_range(8, 4, 4, "F"), ValueError, "below t = 4 and is 4; ranks count from 0 to 3"),
        (lambda: shard_range(8, -1, 4, "F"), ValueError, "rank must be at least 0"),
        (lambda: shard_range(8, False, 4, "F"), TypeError, "rank must be an integer"),
        (lambda: padded(0, 4, "F"), ValueError, "F must be at least 1"),
        (lambda: padded_vocab(10, 0), ValueError, "t must be at least 1"),
        (lambda: padded_vocab(10, 2, 0), ValueError, "multiple must be at least 1"),
        (lambda: head_groups(12, 5, 1), ValueError, "query heads = 12 is no multiple of KV heads = 5"),
        (lambda: head_groups(12, 0, 1), ValueError, "KV heads must be at least 1"),
        (lambda: head_groups(12, 4, True), TypeError, "t must be an integer"),
    ],
)
def test_nonsense_is_named(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(("n", "multiple", "size"), [(1536, 9, 1539), (12, 4, 12), (1, 4, 4)])
def test_padded(n, multiple, size):
    assert padded(n, multiple, "F") == size


def test_padded_vocabulary_depends_on_t():
    assert {t: padded_vocab(50257, t) for t in (1, 2, 4, 8)} == {1: 50304, 2: 50432, 4: 50688, 8: 51200}
    assert padded_vocab(49152, 3) == 49152  # 3 · 128 · 128 already
    assert padded_vocab(10, 4, multiple=1) == 12


def test_head_groups_that_divide():
    groups = head_groups(heads=12, kv_heads=4, t=2)
    assert (groups.heads_per_rank, groups.kv_heads_per_rank, groups.replicas) == (6, 2, 1)
    assert [list(groups.kv_heads_of(rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(groups.replicas_of(rank)) for rank in range(2)] == [[0], [1]]


def test_head_groups_with_replicas():
    groups = head_groups(heads=9, kv_heads=3, t=9)
    assert (groups.heads_per_rank, groups.kv_heads_per_rank, groups.replicas) == (1, 1, 3)
    assert [groups.kv_heads_of(rank)[0] for rank in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert list(groups.replicas_of(4)) == [3, 4, 5]


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 4), (9, 3), (32, 8), (6, 6), (8, 1), (12, 6)])
def test_every_query_head_finds_its_kv_head_on_its_rank(heads, kv_heads):
    """Query head q reads KV head q // (heads / kv_heads). Not vacuous: t = 1 always works, so heads are looked at."""
    looked_at = 0
    for t in range(1, heads + 1):
        try:
            groups = head_groups(heads, kv_heads, t)
        except ValueError:
            continue
        assert sorted(q for rank in range(t) for q in groups.heads_of(rank)) == list(range(heads))
        for rank in range(t):
            for q in groups.heads_of(rank):
                assert q // (heads // kv_heads) in groups.kv_heads_of(rank)
                looked_at += 1
            assert all(groups.kv_heads_of(peer) == groups.kv_heads_of(rank) for peer in groups.replicas_of(rank))
    assert looked_at >= heads


def test_head_groups_refuses_and_lists_what_works():
    for t in (3, 6, 5):
        with pytest.raises(ValueError, match=rf"KV heads = 4 do not split over t = {t}: .* work: 1, 2, 4, 12$"):
            head_groups(12, 4, t)
    for t in (2, 4):
        with pytest.raises(ValueError, match="t that work: 1, 3, 9$"):
            head_groups(9, 3, t)


def test_require_last_dim():
    require_last_dim(np.zeros((2, 5)), 5, "input")
    with pytest.raises(ValueError, match=r"^x: the last dimension must be 6 and is 5 \(shape \[2, 5\]\); transpose$"):
        require_last_dim(np.zeros((2, 5)), 6, "x", hint="transpose")
    with pytest.raises(ValueError, match=r"must be 6 and does not exist \(shape \[\]\)$"):
        require_last_dim(SimpleNamespace(shape=()), 6, "input")


@pytest.mark.parametrize("module", ["tpcode", "tpcode.shapes", "tpcode.config", "tpcode.byhand"])
def test_the_floor_of_arithmetic_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
