"""The plan of the book (`book/chapters.yaml`): a table of the chapters, and the hours that follow from it.

In any page's source, `{{core_hours}}`, `{{all_hours}}`, `{{core_days}}`, `{{chapters_planned}}`, `{{chapters_here}}`
and `{{repository}}` stand for what is computed here, in code blocks too.
"""

import math
from pathlib import Path

import yaml
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.addnodes import pending_xref

from .project import repository_url


def read_plan(root):
    """The chapters in order: dicts with slug, title, gist, core and all (minutes), claims."""
    return yaml.safe_load((Path(root) / "book" / "chapters.yaml").read_text(encoding="utf-8"))


def docname(number, chapter):
    return f"chapters/{number:02d}_{chapter['slug']}"


def hours(minutes):
    """
    >>> hours(750)
    '12 h 30 min'
    """
    return f"{minutes // 60} h {minutes % 60:02d} min"


def computed(root, found):
    """What stands in the text for each `{{name}}`; `found` are the documents that the book has."""
    plan = read_plan(root)
    core = sum(chapter["core"] for chapter in plan)
    return {
        "core_hours": hours(core),
        "core_days": str(math.ceil(core / 60)),
        "all_hours": hours(sum(chapter["all"] for chapter in plan)),
        "chapters_planned": str(len(plan)),
        "chapters_here": str(sum(docname(number, chapter) in found for number, chapter in enumerate(plan))),
        "repository": repository_url(root),
    }


def fill_in(app, name, source):
    if not name.startswith("book/"):
        return  # a notebook says what it says wherever it is read
    for key, value in computed(app.srcdir, app.env.found_docs).items():
        source[0] = source[0].replace("{{" + key + "}}", value)


class PlanTable(Directive):
    """`{plan}`: every chapter with its minutes, linked where it exists and marked "to come" where it does not."""

    def run(self):
        env = self.state.document.settings.env
        rows = [self.row(env, number, chapter) for number, chapter in enumerate(read_plan(env.srcdir))]
        titles = [nodes.Text(title) for title in ("", "Chapter", "Core, min", "All, min")]
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (1, 12, 2, 2)), cols=4)
        group += nodes.thead("", nodes.row("", *(entry(title) for title in titles)))
        group += nodes.tbody("", *rows)
        return [nodes.table("", group, classes=["plan"])]

    def row(self, env, number, chapter):
        target = docname(number, chapter)
        if target in env.found_docs:
            title = nodes.inline("", "", nodes.Text(chapter["title"]))
            name = pending_xref("", title, refdomain="std", reftype="doc", reftarget="/" + target, refdoc=env.docname,
                                refexplicit=True, refwarn=True)  # fmt: skip
            state = []
        else:
            name = nodes.Text(chapter["title"])
            state = [nodes.Text(" "), nodes.inline("", "to come", classes=["to-come"])]
        what = nodes.paragraph("", "", nodes.strong("", "", name), *state, nodes.raw("", "<br>", format="html"),
                               nodes.inline("", chapter["gist"], classes=["gist"]))  # fmt: skip
        numbers = [entry(nodes.Text(str(chapter[path]) if chapter[path] else "–")) for path in ("core", "all")]
        return nodes.row("", entry(nodes.Text(str(number))), nodes.entry("", what), *numbers)


def entry(text):
    return nodes.entry("", nodes.paragraph("", "", text))


def setup(app):
    app.add_directive("plan", PlanTable)
    app.connect("source-read", fill_in)
