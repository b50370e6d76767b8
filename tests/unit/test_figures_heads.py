"""The picture of heads on ranks: who holds what is counted here a second time, and what has no room is refused."""

import pytest
from svg_reading import badly_placed, drawn, require_steady

from tpcode.figures import heads_to_ranks
from tpcode.figures.style import KINDS

PICTURES = {
    "multi-head": lambda: heads_to_ranks(4, 4, (2, 4)),
    "grouped, replicas": lambda: heads_to_ranks(8, 2, (1, 2, 4, 8)),
    "multi-query": lambda: heads_to_ranks(6, 1, (1, 2, 3, 6)),
}


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_same_bytes_under_other_settings_and_texts_apart(make):
    require_steady(make)
    assert badly_placed(make()) == []


@pytest.mark.parametrize("a, k, t", [(8, 4, 2), (8, 2, 4), (8, 2, 8), (6, 1, 3)])
def test_every_rank_has_its_query_heads_and_the_kv_heads_that_they_read(a, k, t):
    picture = heads_to_ranks(a, k, (t,))
    tiles = [text for text in drawn(picture) if text[0] in "qk" and text[-1].isdigit()]
    wanted = []
    for rank in range(t):
        queries = [q for q in range(a) if q * t // a == rank]
        wanted += [f"q{q}" for q in queries] + [f"kv{n}" for n in sorted({q * k // a for q in queries})]
    assert tiles == wanted
    words = picture.alt.removeprefix(f"t = {t}: ").removesuffix(".").split("; ")
    assert [word.partition(" holds ")[0] for word in words] == [f"rank {rank}" for rank in range(t)]
    assert ", ".join(word.partition(" holds ")[2] for word in words).replace(" and ", ", ").split(", ") == wanted


def test_kv_heads_are_green_only_where_they_have_replicas():
    green = KINDS["replicated"].ground
    alone, shared = (heads_to_ranks(8, 2, (t,)).svg.count(green) for t in (2, 4))
    assert (alone, shared) == (0, 1 + 4)  # the legend's, and the four ranks'


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="room for 8 query heads"):
        heads_to_ranks(12, 4)
    with pytest.raises(ValueError, match="one t at least"):
        heads_to_ranks(8, 4, ())
    with pytest.raises(ValueError, match="t that work: 1, 2, 4, 8"):
        heads_to_ranks(8, 4, (3,))
