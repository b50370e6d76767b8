"""The page of claims: what circulates (`book/claims.yaml`), the verdict, and the places in the chapters that show it.

A chapter says `([E1](../book/claims.md#e1))` where a cell or a test shows the claim; the page links back to there.
"""

import json
import re
from pathlib import Path

import yaml

from .plan import docname, read_plan

PAGE = "book/claims"
LINK = re.compile(r"\]\(\.\./book/claims\.md#([erc]\d+)\)")
HEADING = re.compile(r"^#+ (.*?)(?: <span.*)?$", re.MULTILINE)
VERDICTS = {
    "wrong": "**Wrong.** ",
    "imprecise": "**Imprecise.** ",
    "unsourced": "**No source.** ",
    "right": "**Right.**",
    "rule": "**What correct code does.**",
}


def read_claims(root):
    """Dicts with id, verdict, says and, where there is one, correct and source."""
    return yaml.safe_load((Path(root) / "book" / "claims.yaml").read_text(encoding="utf-8"))


def places(root):
    """For each linked claim, as (id, number of the chapter, its document, heading above the link), in book order."""
    found = []
    for number, chapter in enumerate(read_plan(root)):
        notebook = Path(root) / f"{docname(number, chapter)}.ipynb"
        if notebook.is_file():
            text = _prose(json.loads(notebook.read_text(encoding="utf-8")))
            for link in LINK.finditer(text):
                heading = HEADING.findall(text[: link.start()])[-1]
                found.append((link[1].upper(), number, docname(number, chapter), heading))
    return found


def _prose(notebook):
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def page(root):
    """What stands for each `{{name}}` in the page."""
    claims, shown = read_claims(root), places(root)
    known = {id for id, *_ in shown}
    here = [claim for claim in claims if claim["id"] in known]
    return {
        "claims_here": str(len(here)),
        "claims_planned": str(len(claims)),
        "claims": "\n\n".join(_entry(claim, [place for place in shown if place[0] == claim["id"]]) for claim in here),
    }


def _entry(claim, shown):
    links = [f"[chapter {number}, {heading}](../{document}.ipynb)" for _, number, document, heading in shown]
    source = f" Source: {claim['source']}." if claim.get("source") else ""
    said = f"> {claim['says']}" if claim.get("correct") or claim["verdict"] == "right" else claim["says"]
    verdict = VERDICTS[claim["verdict"]] + claim.get("correct", "")
    return f"## {claim['id']}\n\n{said}\n\n{verdict} Shown in {' and '.join(links)}.{source}"


def fill_in(app, name, source):
    if name == PAGE:
        for key, value in page(app.srcdir).items():
            source[0] = source[0].replace("{{" + key + "}}", value)


def setup(app):
    app.connect("source-read", fill_in)
