"""Each chapter links exactly the claims that the plan gives it, and each claim that is linked exists."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "book/_ext"))
claims = pytest.importorskip("tpbook.claims", reason="needs Sphinx, of the extra `book`")

PLAN = list(enumerate(claims.read_plan(ROOT)))
HERE = [(number, row) for number, row in PLAN if (ROOT / f"{claims.docname(number, row)}.ipynb").is_file()]
KNOWN = {claim["id"]: claim for claim in claims.read_claims(ROOT)}


@pytest.mark.parametrize("number, row", HERE, ids=[row["slug"] for _, row in HERE])
def test_a_chapter_links_the_claims_of_its_row(number, row):
    linked = {id for id, chapter, *_ in claims.places(ROOT) if chapter == number}
    assert linked == set(row["claims"])


def test_every_claim_has_a_verdict_and_a_chapter_to_come():
    planned = {id for _, row in PLAN for id in row["claims"]}
    assert planned == set(KNOWN)
    assert all(claim["verdict"] in claims.VERDICTS and claim["says"] for claim in KNOWN.values())
    assert all(claim.get("correct") for claim in KNOWN.values() if claim["id"].startswith("E"))


def test_the_page_says_where_each_claim_is_shown():
    text = claims.page(ROOT)["claims"]
    for id, number, document, heading in claims.places(ROOT):
        entry = text.split(f"## {id}\n")[1].split("\n## ")[0]
        assert f"[chapter {number}, {heading}](../{document}.ipynb)" in entry
