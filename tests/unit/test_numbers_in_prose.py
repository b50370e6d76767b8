"""No number is typed into a chapter's prose: it stands in one of its cells, or it is named here with a reason.

Looked at are numbers with a decimal point or with three digits and more; small whole numbers are sizes and counts.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
PLAN = yaml.safe_load((ROOT / "book/chapters.yaml").read_text(encoding="utf-8"))
CLAIMS = {claim["id"]: claim for claim in yaml.safe_load((ROOT / "book/claims.yaml").read_text(encoding="utf-8"))}

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
NOT_PROSE = re.compile(
    r"\]\([^)]*\)|<[^>]*>|\{cite\}`\w+`|sections? [\d.]+|\*\*Exercises? [^*]*\*\*|xercises? \d+\.\d+|\(\d\.\d comes"
)

# Facts that no cell computes, and where they come from.
GIVEN = {
    "00_start_here": {
        "00.1": "a command",
        "135": "the model's name",
        "600": "as it circulates: a statement to be judged",
        "200": "as it circulates: a statement to be judged",
        "1776": "a year",
    },
    "03_column_split": {"2.13": "a version"},
    "05_ffn_column_then_row": {"1.5": "2(t - 1)/t at t = 4: chapter 2's cell", "1776": "a year"},
    "06_attention_heads": {"0.16": "a version"},
    "08_a_whole_transformer": {
        "0.16": "a version",
        "1776": "a year",
        "19.6": "measured in K22, table 4",
        "19.0": "measured in K22, table 4",
    },
    "07_vocabulary_and_loss": {"0.16": "a version", "128": "Megatron-LM's default, cited"},
}


def numbers(text: str) -> set[str]:
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def from_cells(notebook: dict) -> set[str]:
    found = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            texts = ["".join(cell["source"]).replace("_", "")]
            for output in cell["outputs"]:
                texts.append("".join(output.get("text") or output.get("data", {}).get("text/plain", [])))
            found |= {n.replace(",", "") for text in texts for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
    return found


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_numbers_in_prose_come_from_cells(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    row = PLAN[int(path.stem[:2])]
    known = from_cells(notebook) | {str(row["core"]), str(row["all"])} | set(GIVEN.get(path.stem, {}))
    known |= {number for id in row["claims"] for number in numbers(CLAIMS[id]["says"])}  # quoted, to be judged
    prose = [
        NOT_PROSE.sub("", "".join(cell["source"])) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    ]
    said = {n for text in prose for n in numbers(text) if "." in n or len(n) >= 3}
    assert sorted(said - known) == []


def test_nothing_is_given_that_no_chapter_says():
    stems = {path.stem: path for path in CHAPTERS}
    for stem, facts in GIVEN.items():
        text = stems[stem].read_text(encoding="utf-8")
        assert all(fact in text for fact in facts), stem
