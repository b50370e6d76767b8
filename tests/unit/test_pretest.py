"""The pretest of chapter 0: each statement stands on the page as in its data file, and comes from a checked claim."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PRETEST = yaml.safe_load((ROOT / "chapters/00_pretest.yaml").read_text(encoding="utf-8"))
PLAN = yaml.safe_load((ROOT / "book/chapters.yaml").read_text(encoding="utf-8"))

# The verdicts of the book's list of claims, for those that the pretest draws on.
VERDICTS = {
    "E1": "wrong",
    "E4": "wrong",
    "E12": "wrong",
    "E13": "wrong",
    "E25": "imprecise",
    "E32": "wrong",
    "E33": "wrong",
    "R6": "right",
    "R15": "right",
    "R17": "right",
}


def page() -> str:
    notebook = json.loads((ROOT / "chapters/00_start_here.ipynb").read_text(encoding="utf-8"))
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def test_ten_statements_some_true_none_twice():
    assert len({item["statement"] for item in PRETEST}) == 10
    assert len({item["claim"] for item in PRETEST}) == 10
    assert 3 <= sum(item["verdict"] == "right" for item in PRETEST) <= 7


@pytest.mark.parametrize("item", PRETEST, ids=lambda item: item["claim"])
def test_a_statement_has_its_claims_verdict_and_a_chapter_that_settles_it(item):
    assert item["verdict"] == VERDICTS[item["claim"]]
    assert item["claim"] in PLAN[item["chapter"]]["claims"]


def test_each_statement_is_settled_by_a_chapter_of_its_own():
    assert len({item["chapter"] for item in PRETEST}) == 10


def test_the_page_has_them_in_this_order_and_says_which_chapter_settles_each():
    listed = re.findall(r"^(\d+)\. (.+)$", page(), flags=re.MULTILINE)
    assert [(int(n), text) for n, text in listed] == [(n, item["statement"]) for n, item in enumerate(PRETEST, 1)]
    rows = re.findall(r"^\| (\d+) \| (\d+), ([^|]+) \|$", page(), flags=re.MULTILINE)
    expected = [(str(n), str(item["chapter"]), PLAN[item["chapter"]]["title"]) for n, item in enumerate(PRETEST, 1)]
    assert rows == expected


def test_the_page_does_not_give_the_answers_away():
    """After the statements stands which chapter settles each, and no verdict."""
    after = page().partition("True or false?")[2].partition("\n## ")[0]
    assert not re.search(r"\b(right|wrong|imprecise|is true|is false|are true|are false)\b", after.partition("10. ")[2])


def test_the_page_points_to_this_repository():
    """Where it moves, the links of the page have to follow."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    text = (ROOT / "chapters/00_start_here.ipynb").read_text(encoding="utf-8")
    found = re.findall(r"https://github\.com/[^\s\"')\\]+", text)
    assert len(found) == 1  # the line that installs the package in Colab
    assert all(address.startswith(repository) for address in found)
