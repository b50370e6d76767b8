"""A quotation that opens with one of these bold words is a box on the site.

In Jupyter and on GitHub it stays the quotation it is, so a notebook needs no markup of its own.
"""

from docutils import nodes

BOXES = {"the rule": "rule", "your prediction": "prediction", "before you run anything": "prediction"}


def box_class(quotation):
    """'rule', 'prediction' or None, by the bold words that the quotation opens with."""
    if not len(quotation) or not isinstance(quotation[0], nodes.paragraph):
        return None
    opening = next((child for child in quotation[0] if child.astext().strip()), None)
    return BOXES.get(opening.astext().strip(" .:").lower()) if isinstance(opening, nodes.strong) else None


def mark_boxes(app, doctree):
    for quotation in doctree.findall(nodes.block_quote):
        if name := box_class(quotation):
            quotation["classes"].append(name)


def setup(app):
    app.connect("doctree-read", mark_boxes)
