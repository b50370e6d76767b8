"""What tests of pictures share: a picture's texts, where they stand, and which of them lie badly."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import matplotlib as mpl
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath


def _elements(picture):
    return list(ElementTree.fromstring(picture.svg).iter("{http://www.w3.org/2000/svg}text"))


def drawn(picture) -> list[str]:
    """The picture's texts, in the order of drawing."""
    return [element.text for element in _elements(picture)]


def _box(element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom, by the metrics of the font that the picture names."""
    style = dict(pair.split(": ", 1) for pair in element.get("style").split("; ") if ": " in pair)
    size = float(re.search(r"([\d.]+)px", style.get("font", "") + style.get("font-size", "")).group(1))
    weight = "bold" if re.search(r"\b(700|bold)\b", element.get("style")) else "normal"
    font = FontProperties(family="DejaVu Sans", weight=weight)
    extent = TextPath((0, 0), element.text, size=size, prop=font).get_extents()
    x, y = float(element.get("x")), float(element.get("y"))
    left = x - {"start": 0, "middle": 0.5, "end": 1}[style.get("text-anchor", "start")] * extent.width
    return left, y - extent.y1, left + extent.width, y - extent.y0


def badly_placed(picture) -> list[str]:
    """Texts that lie outside the picture or on each other."""
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', picture.svg).groups())
    boxes = [(element.text, _box(element)) for element in _elements(picture)]
    faults = [
        f"{text!r} is outside"
        for text, (left, top, right, bottom) in boxes
        if left < 0 or top < 0 or right > width or bottom > height
    ]
    for (one, a), (other, b) in combinations(boxes, 2):
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
            faults.append(f"{one!r} lies on {other!r}")
    return faults


def foreign(picture) -> list[str]:
    """What a picture must not have: a date, a version, a path, a style sheet."""
    return re.findall(r"dc:date|20\d\d-\d\d|Matplotlib|/home|/work|<style|<metadata", picture.svg)


def require_steady(make) -> None:
    """What `make` draws is the same under a caller's other settings, holds nothing of this machine, fits a phone."""
    picture = make()
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "lines.linestyle": "--", "patch.linewidth": 5}):
        assert picture.svg == make().svg
    assert foreign(picture) == []
    assert picture.svg.startswith('<svg style="min-width: 324px"')  # a phone shows it without scrolling
