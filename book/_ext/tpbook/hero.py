"""`{hero}`: the front page's picture. An FFN of six small matrices on two ranks, its numbers computed here.

Drawn twice: ranks below each other for a wide page, side by side for a phone; book.css shows one of the two. The
drawing states what the book is about: `Y = ReLU(X A) B`, A cut by columns and B by rows, one sum at the end.
"""

from docutils import nodes
from docutils.parsers.rst import Directive

X = [[1, 2]]
A = [[1, 1, 3, 0], [0, 1, 1, 1]]
B = [[1, 0], [2, 1], [0, 1], [1, 3]]
RANKS = 2

CELL = 38  # side of a matrix entry, and the unit of the drawing
GAP = 30  # between two matrices
LABEL = 20  # height of the name above a matrix
COLLECTIVE = 34  # thickness of the bar that joins the ranks

NEWLINE = "\n"  # between texts, for the search page shows a page's text as it stands

ALT = (
    "A small feed-forward network on two ranks. Both ranks hold the input X. Rank 0 holds the left half of the columns "
    "of A and the upper half of the rows of B, rank 1 the other halves. Each multiplies on its own and ends with a "
    "partial result; one all-reduce adds the two, and both ranks hold the output Y."
)


def product(left, right):
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*right)] for row in left]


def relu(matrix):
    return [[max(0, value) for value in row] for row in matrix]


def add(left, right):
    return [[x + y for x, y in zip(*rows)] for rows in zip(left, right)]


def ranks():
    """For each rank the matrices in the order of work: (name, kind, values, the operator before it)."""
    width = len(A[0]) // RANKS
    steps = []
    for rank in range(RANKS):
        half = slice(rank * width, (rank + 1) * width)
        columns, rows = [row[half] for row in A], B[half]
        hidden = relu(product(X, columns))
        steps.append([
            ("X", "replicated", X, ""),
            (f"A{sub(rank)}", "sharded", columns, "×"),
            (f"Z{sub(rank)}", "sharded", hidden, "→"),
            (f"B{sub(rank)}", "sharded", rows, "×"),
            (f"Y{sub(rank)}", "partial", product(hidden, rows), "→"),
        ])  # fmt: skip
    return steps


def output(steps):
    """What the all-reduce leaves on every rank."""
    total = steps[0][-1][2]
    for rank in steps[1:]:
        total = add(total, rank[-1][2])
    return total


def sub(rank):
    return "₀₁₂₃₄₅₆₇₈₉"[rank]


def text(x, y, content, css=""):
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{content}</text>'


def matrix(x, y, name, kind, values):
    """A matrix whose upper left corner is (x, y): one tile an entry, the kind shown by colour and by pattern."""
    height, width = len(values) * CELL, len(values[0]) * CELL
    parts = [text(x + width / 2, y - 7, name, "name"), f'<g class="{kind}">']
    parts.append(f'<rect class="fill" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
    parts.append(f'<rect class="pattern" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            parts.append(text(x + (j + 0.5) * CELL, y + (i + 0.5) * CELL + 6, value, "value"))
    return NEWLINE.join(parts) + "</g>"


def size(values):
    return len(values[0]) * CELL, len(values) * CELL


def patterns(prefix):
    """Dots for replicated, stripes for partial; sharded stays plain. Identifiers must differ between the drawings."""
    return (
        f'<defs><pattern id="{prefix}replicated" width="9" height="9" patternUnits="userSpaceOnUse">'
        '<circle cx="2" cy="2" r="1.2" class="ink"/></pattern>'
        f'<pattern id="{prefix}partial" width="9" height="9" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2" height="9" class="ink"/></pattern></defs>'
    )


def wide():
    """Time runs to the right, the ranks stand below each other."""
    steps, lane, margin = ranks(), 2 * CELL + LABEL + 26, 72
    parts = []
    for rank, matrices in enumerate(steps):
        middle, x = rank * lane + LABEL + CELL + 4, margin
        parts.append(text(0, middle + 5, f"rank {rank}", "rank"))
        for name, kind, values, operator in matrices:
            if operator:
                parts.append(text(x + GAP / 2, middle + 7, operator, "operator"))
                x += GAP
            width, height = size(values)
            parts.append(matrix(x, middle - height / 2, name, kind, values))
            x += width
        bar = x + GAP / 2 + 6
        x = bar + COLLECTIVE + GAP / 2 + 6
        parts.append(arrow(bar - GAP / 2 - 2, middle, bar - 4, middle))
        parts.append(arrow(bar + COLLECTIVE + 2, middle, x - 6, middle))
        parts.append(matrix(x, middle - CELL / 2, "Y", "replicated", output(steps)))
        x += size(output(steps))[0]
    height = RANKS * lane - 10
    center = bar + COLLECTIVE / 2
    parts.append(f'<rect class="collective" x="{bar}" y="4" width="{COLLECTIVE}" height="{height - 12}" rx="8"/>')
    parts.append(f'<g transform="rotate(-90 {center:g} {height / 2:g})">'
                 + text(center, height / 2 + 5, "all-reduce: Y₀ + Y₁", "sum") + "</g>")  # fmt: skip
    return drawing("wide", x, height, parts)


def narrow():
    """Time runs downwards, the ranks stand side by side."""
    steps, lane = ranks(), 168
    parts = []
    for rank, matrices in enumerate(steps):
        middle, y = rank * lane + lane / 2, 24
        parts.append(text(middle, 16, f"rank {rank}", "rank centred"))
        for name, kind, values, operator in matrices:
            width, height = size(values)
            y += LABEL
            if operator:
                parts.append(text(middle - 62, y + 2, "↓" if operator == "→" else operator, "operator"))
            parts.append(matrix(middle - width / 2, y, name, kind, values))
            y += height + 8
        bar = y + 14
        parts.append(arrow(middle, bar - 18, middle, bar - 4))
        parts.append(arrow(middle, bar + COLLECTIVE + 1, middle, bar + COLLECTIVE + 14))
        y = bar + COLLECTIVE + 14 + LABEL + 4
        width, height = size(output(steps))
        parts.append(matrix(middle - width / 2, y, "Y", "replicated", output(steps)))
        y += height
    full = RANKS * lane
    parts.append(f'<rect class="collective" x="10" y="{bar}" width="{full - 20}" height="{COLLECTIVE}" rx="8"/>')
    parts.append(text(full / 2, bar + COLLECTIVE / 2 + 5, "all-reduce: Y₀ + Y₁", "sum"))
    return drawing("narrow", full, y + 4, parts)


def arrow(x1, y1, x2, y2):
    """A red arrow: a collective. It points right or down."""
    across, along = ((0, 5), (6, 0)) if y1 == y2 else ((5, 0), (0, 6))
    left, right = (f"{x2 - along[0] + sign * across[0]:g},{y2 - along[1] + sign * across[1]:g}" for sign in (-1, 1))
    return f'<path class="arrow" d="M{x1:g},{y1:g}L{x2:g},{y2:g}M{left}L{x2:g},{y2:g}L{right}"/>'


def drawing(name, width, height, parts):
    return (
        f'<svg class="hero-drawing {name}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{ALT}">'
        f"{patterns(name + '-')}{NEWLINE.join(parts)}</svg>"
    )


class Hero(Directive):
    def run(self):
        return [nodes.raw("", f'<div class="hero-figure">{wide()}{narrow()}</div>', format="html")]


def setup(app):
    app.add_directive("hero", Hero)
