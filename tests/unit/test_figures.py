"""Pictures: the same bytes on every run, never colour alone, and drawn from data that says the right thing."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import pytest

from tpcode.figures import three_splits
from tpcode.figures.splits import Hop, Sum, data_parallel, pipeline_parallel, tensor_parallel
from tpcode.figures.style import INK, KINDS, RED, canvas, tile

SPLITS = [data_parallel(4, 4), pipeline_parallel(4, 4), tensor_parallel(4, 4)]


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def held(split, row: int) -> list[list[tuple[float, float]]]:
    """Which parts of one row each device holds."""
    return [[(tile.start, tile.stop) for tile in tiles if tile.row == row] for tiles in split.devices]


# ---- the SVG --------------------------------------------------------------------------------------------------------


def test_two_renders_are_byte_equal():
    assert three_splits().svg == three_splits().svg


def test_another_process_with_other_settings_renders_the_same_bytes():
    code = (
        "import matplotlib as mpl; mpl.rcParams.update({'font.size': 30, 'svg.fonttype': 'path', 'savefig.dpi': 300});"
        "from tpcode.figures import three_splits; print(three_splits().svg)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == three_splits().svg


def test_no_date_no_version_no_path_no_foreign_host():
    svg = three_splits().svg
    assert not re.search(r"dc:date|20\d\d-\d\d|Matplotlib|/home|/work", svg)
    # Namespaces are names and not addresses; nothing else may look like an address.
    assert set(re.findall(r'https?://[^"]*', svg)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_a_page_can_take_it_in():
    svg = three_splits().svg
    ElementTree.fromstring(svg)
    assert svg.startswith('<svg style="min-width: 324px"')  # scrolls on a phone
    assert "<style" not in svg  # a style sheet in an inline SVG would restyle the whole page
    assert "<metadata" not in svg


def test_the_words_say_what_the_picture_says():
    alt = three_splits().alt
    for split in SPLITS:
        assert split.name in alt and split.holds in alt and split.sends in alt


def test_the_page_gives_these_words_to_who_cannot_see_it():
    page = json.loads((Path(__file__).parents[2] / "chapters/00_start_here.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in page["cells"] if "three_splits(" in "".join(cell["source"])]
    assert [cell["metadata"]["mystnb"]["image"]["alt"] for cell in cells] == [three_splits().alt]


def test_drawing_leaves_the_callers_settings_alone():
    before = dict(mpl.rcParams)
    three_splits()
    assert dict(mpl.rcParams) == before


# ---- never colour alone ---------------------------------------------------------------------------------------------


def test_every_tile_has_a_label_in_the_picture():
    drawn = texts(three_splits().svg)
    for split in SPLITS:
        for tiles in split.devices:
            assert all(tile.label in drawn for tile in tiles)
    assert all(f"{layer}·{device}" in drawn for layer in range(4) for device in range(4))  # index pairs


def test_a_tile_without_a_label_is_refused():
    with canvas(50, 50) as (_, axes), pytest.raises(ValueError, match="no label"):
        tile(axes, 0, 0, 10, 10, "sharded", "")


def test_kinds_differ_without_colour():
    assert len({look.hatch for look in KINDS.values()}) == len(KINDS)  # plain, dotted, striped
    assert three_splits().svg.count("<pattern") == sum(bool(look.hatch) for look in KINDS.values())
    assert texts(three_splits().svg).count("+") == 4 + 4 * 4 + 1  # one sum, four sums, the legend


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_lines_have_contrast(kind):
    """Text 4.5 to 1 on its ground; shapes 3 to 1 on a white and on a dark page, amber (never without "+") 2 to 1."""

    def luminance(colour):
        channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mpl.colors.to_rgb(colour)]
        return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]

    def contrast(one, two):
        dark, light = sorted((luminance(one), luminance(two)))
        return (light + 0.05) / (dark + 0.05)

    look = KINDS[kind]
    assert contrast(look.ink, look.ground) > 4.5
    assert contrast(look.ink, look.shade or look.ground) > 4
    for shape in (look.ground, INK, RED):
        assert min(contrast(shape, "#ffffff"), contrast(shape, "#121212")) > (2 if kind == "partial" else 3)


# ---- the data says the right thing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "devices"), [(4, 4), (2, 2), (5, 2), (6, 3), (7, 4)])
def test_who_holds_what(layers, devices):
    dp, pp, tp = (make(layers, devices) for make in (data_parallel, pipeline_parallel, tensor_parallel))
    for row in range(1, layers + 1):
        assert held(dp, row) == [[(0.0, 1.0)]] * devices  # everywhere, whole
        assert sorted(held(pp, row)) == [[]] * (devices - 1) + [[(0.0, 1.0)]]  # once, whole
        slices = [part for parts in held(tp, row) for part in parts]  # once each, and together whole
        assert len(slices) == devices and slices[0][0] == 0.0 and slices[-1][1] == 1.0
        assert all(left[1] == right[0] for left, right in zip(slices, slices[1:]))
    assert all(any(tile.row for tile in tiles) for tiles in pp.devices)  # no idle stage


@pytest.mark.parametrize(("layers", "devices"), [(4, 4), (5, 2), (6, 3)])
def test_what_is_sent(layers, devices):
    assert data_parallel(layers, devices).traffic == (Sum(layers),)
    assert tensor_parallel(layers, devices).traffic == tuple(Sum(row) for row in range(1, layers + 1))
    pipeline = pipeline_parallel(layers, devices)
    assert [hop.device for hop in pipeline.traffic] == list(range(devices - 1))
    for hop in pipeline.traffic:
        assert isinstance(hop, Hop)
        assert held(pipeline, hop.row)[hop.device] and held(pipeline, hop.row + 1)[hop.device + 1]


def test_replicated_means_equal_labels_and_sharded_means_different_ones():
    for split in SPLITS:
        labels = [[tile.label for tile in tiles if tile.kind == "sharded"] for tiles in split.devices]
        assert not any(set(one) & set(two) for one, two in combinations(labels, 2))
        copies = [[tile.label for tile in tiles if tile.kind == "replicated"] for tiles in split.devices]
        assert all(one == copies[0] for one in copies)


@pytest.mark.parametrize(("layers", "devices"), [(4, 1), (8, 8), (2, 3)])
def test_sizes_that_cannot_be_drawn_are_refused_with_both_numbers(layers, devices):
    with pytest.raises(ValueError, match=f"devices={devices}, layers={layers}"):
        three_splits(layers, devices)
