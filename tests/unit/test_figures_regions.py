"""The map of a layer's regions is told from values and placements on real ranks, and from what these sent."""

import functools
from dataclasses import replace

import pytest
import torch
from svg_reading import badly_placed, drawn, require_steady

from tpcode import ModelConfig, launch
from tpcode.comm import scatter_sequence
from tpcode.dense import MODELS
from tpcode.figures.regions import kind_of, observe_layer, regions
from tpcode.model import Block


def on_a_rank(family, sequence_parallel):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    sizes = {"hidden": 8, "ffn": 32, "heads": 4, "layers": 1, "vocab": 12, "max_seq": 4, "dropout": 0.1}
    dense = MODELS[family](ModelConfig(family=family, **sizes), std=None)
    block = Block.from_dense(dense.part("blocks")[0], dense.names, sequence_parallel=sequence_parallel)
    x, dy = torch.randn(2, 2, 4, 8)
    if sequence_parallel:
        x, dy = scatter_sequence(x), scatter_sequence(dy)
    return observe_layer(block, x, dy)


@functools.cache
def seen(family="gpt2"):
    ways = {"TP": launch(on_a_rank, 2, family, False), "TP + SP": launch(on_a_rank, 2, family, True)}
    return ways, on_a_rank(family, False)


PICTURES = {"both": lambda: regions(*seen()), "Llama": lambda: regions(*seen("llama"))}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_nothing_of_this_machine(make):
    require_steady(make)


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_texts_lie_inside_and_apart(make):
    assert badly_placed(make()) == []


def test_a_layers_regions_are_those_of_its_values():
    """By hand: the stream is replicated or cut, what heads and FFN have is cut, products are summands in both ways."""
    ways, whole = seen()
    stream = {0, 1, 5, 6, 10}
    for name, own in (("TP", "replicated"), ("TP + SP", "sharded")):
        kinds = [kind_of([rank[i].tensor for rank in ways[name]], whole[i].tensor) for i in range(len(whole))]
        assert kinds == [own if i in stream else "partial" if i in (4, 9) else "sharded" for i in range(11)]
        gradients = [kind for place in ways[name][0] for _, kind in place.used]
        row = "replicated" if name == "TP" else "partial"
        assert gradients == [row, "sharded", "sharded", row, row, "sharded", "sharded", row]


def test_collectives_stand_where_the_ranks_sent_them():
    ways, _ = seen()
    gather, scatter, reduce = "all_gather", "reduce_scatter", "all_reduce"
    expected = {
        "TP": {2: ([], [reduce]), 5: ([reduce], []), 7: ([], [reduce]), 10: ([reduce], [])},
        "TP + SP": {i: ([gather], [gather, scatter]) if i in (2, 7) else ([scatter], [gather]) for i in (2, 5, 7, 10)},
    }
    for name, by_rank in ways.items():
        for places in by_rank:
            sent = [([e.op for e in place.forward], [e.op for e in place.backward]) for place in places]
            assert {i: both for i, both in enumerate(sent) if any(both)} == expected[name]


def test_the_picture_says_it_in_words_and_in_tiles():
    picture = regions(*seen())
    texts = drawn(picture)
    assert texts.count("X  [2, 4, 8]") == texts.count("X  [2, 2, 8]") == 1
    assert texts.count("all-gather + reduce-scatter") == 2 and texts.count("all-reduce") == 4
    assert "norm  [2, 2, 8] sharded, dγ partial" in picture.alt and "norm  [2, 4, 8] replicated" in picture.alt


def test_a_tensor_that_lies_in_no_way_is_refused():
    whole = torch.arange(8.0).reshape(1, 2, 4)
    assert kind_of([whole[:, :1], whole[:, 1:]], whole) == "sharded"
    assert kind_of([whole, whole], whole) == "replicated"
    assert kind_of([whole / 4, whole * 3 / 4], whole) == "partial"
    for wrong in ([whole, whole + 1], [whole[:, :1], whole[:, :1]], [whole[:, :1]]):
        with pytest.raises(ValueError, match=r"are not the whole \[1, 2, 4\] on each rank, nor pieces of it"):
            kind_of(wrong, whole)


def test_ranks_that_sent_other_things_are_refused():
    ways, whole = seen()
    first, second = ways["TP"]
    other = [*second[:5], replace(second[5], forward=()), *second[6:]]
    with pytest.raises(ValueError, match="at place 5, 'X [+] Y', the ranks used or sent different things"):
        regions({"TP": [first, other]}, whole)
    with pytest.raises(ValueError, match="room for one way or two, and there are 3"):
        regions({"a": [], "b": [], "c": []}, whole)
