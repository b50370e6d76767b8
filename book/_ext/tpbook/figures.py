"""Figures that cells draw: every one has a text alternative, and vector figures follow light and dark.

An SVG output is written into the page instead of being loaded as an image, so that the page's colours reach it. The
ink and the red of `tpcode.figures.style`, which are legible on white and on black for those who look at a figure in
Jupyter, become the page's own; every other colour stays, black too, which is the ink of labels on green and amber.

The text alternative is that of the cell (`{"mystnb": {"image": {"alt": "…"}}}`), else that of a `Picture`, whose plain
text is "Picture: " and its words.
"""

import html
import itertools
import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

logger = logging.getLogger(__name__)

COLOURS = {"#767676": "currentColor", "#d1242f": "var(--collective)"}
PICTURE = "Picture: "
PREAMBLE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
IDENTIFIER = re.compile(r'(\bid="|href="#|url\(#)([^")]+)')


def in_output(image):
    ancestor = image.parent
    while ancestor is not None:
        if "cell_output" in ancestor.get("classes", ()):
            return True
        ancestor = ancestor.parent
    return False


def inline_svg(svg, alt, prefix):
    """The SVG's text for use inside HTML: named, with page-wide unique identifiers, its ink that of the text.

    >>> inline_svg('<svg width="9pt"><path style="fill: #767676"/></svg>', "a dot", "f1-")
    '<svg role="img" aria-label="a dot" width="9pt"><path style="fill: currentColor"/></svg>'
    """
    svg = METADATA.sub("", PREAMBLE.sub("", svg))
    for fixed, following in COLOURS.items():
        svg = svg.replace(fixed, following)
    svg = IDENTIFIER.sub(rf"\g<1>{prefix}\g<2>", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)


def take_alt_from_picture(app, doctree):
    """An image without a text alternative has that of the `Picture` it shows, which is the output's plain text."""
    for bundle in doctree.findall(nodes.container):
        if bundle.get("nb_element") != "mime_bundle":
            continue
        plain = [child.astext() for child in bundle if child.get("mime_type") == "text/plain"]
        if plain and plain[0].startswith(PICTURE):
            for image in bundle.findall(nodes.image):
                image.setdefault("alt", plain[0].removeprefix(PICTURE))


def treat_figures(app, doctree, docname):
    """Inline the vector outputs of a page, and report every image without a text alternative."""
    count = itertools.count(1)
    for image in list(doctree.findall(nodes.image)):
        alt = " ".join(image.get("alt", "").split())
        if not alt or alt == image["uri"]:
            logger.warning(
                "the image %s has no text alternative: give the cell the metadata "
                '{"mystnb": {"image": {"alt": "what the picture shows"}}}',
                image["uri"],
                location=image if image.source else docname,
            )
        if image["uri"].endswith(".svg") and in_output(image):
            svg = (Path(app.srcdir) / image["uri"]).read_text(encoding="utf-8")
            markup = inline_svg(svg, alt, f"figure-{next(count)}-")
            image.replace_self(nodes.raw("", f'<div class="figure">{markup}</div>', format="html"))


def setup(app):
    app.connect("doctree-read", take_alt_from_picture)
    app.connect("doctree-resolved", treat_figures)
