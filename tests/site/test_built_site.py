"""The site as files: every link leads somewhere, nothing comes from elsewhere, and a fault stops the build."""

import doctest
import gzip
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("_config.yml", "_toc.yml", "book", "chapters", "exercises", "pyproject.toml", "constraints.txt", "tools")

# What a browser fetches by itself. A plain link to another host is the reader's choice and is fine.
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src"),
           ("embed", "src"), ("object", "data"), ("link", "href"), ("image", "href"), ("use", "href")}  # fmt: skip
NOT_FETCHED_LINKS = {"canonical", "next", "prev", "index", "search", "author"}


class Page(HTMLParser):
    """What the tests want to know of a page: its links, what it fetches, its anchors, and its text-less pictures."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.fetched, self.anchors, self.without_alt, self.meta, self.title = [], [], set(), [], {}, ""
        self.in_title = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[key] for key in ("id", "name") if found.get(key))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in NOT_FETCHED_LINKS:
            return
        self.fetched += [found[key] for key in found if (tag, key) in FETCHED and found[key]]
        is_picture = tag == "img" or (tag == "svg" and found.get("role") == "img")
        if is_picture and not (found.get("alt") or found.get("aria-label") or "alt" in found and "logo" in str(found)):
            self.without_alt.append(found)
        if tag == "meta":
            self.meta[found.get("name") or found.get("property")] = found.get("content")
        self.in_title = tag == "title" and not self.title

    def handle_data(self, data):
        if self.in_title:
            self.title += data

    def handle_endtag(self, tag):
        self.in_title = False


@pytest.fixture(scope="session")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def target(site: Path, page: Path, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link within the site leads to."""
    parts = urlsplit(link)
    path = unquote(parts.path)
    file = page if not path else (site / path.lstrip("/") if path.startswith("/") else page.parent / path)
    return (file / "index.html" if file.is_dir() else file).resolve(), unquote(parts.fragment)


def test_every_page_of_the_toc_is_built_at_its_short_address(site):
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    names = [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]
    assert len(names) > 3
    for name in names:
        assert (site / (name.removeprefix("book/") + ".html")).is_file(), name


def test_links_and_anchors_resolve(site, pages):
    broken, checked = [], 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its one link is to the published front page, wherever the 404 was met
        for link in page.links + page.fetched:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            file, anchor = target(site, path, link)
            checked += 1
            if not file.is_file():
                broken.append(f"{path.name}: {link} leads to no file")
            elif anchor and file.suffix == ".html" and anchor not in (pages.get(file) or Page(file)).anchors:
                broken.append(f"{path.name}: {link} leads to no anchor")
    assert not broken, "\n".join(broken)
    assert checked > 50  # not vacuous: the pages do have links


def test_links_into_the_repository_name_its_branch_and_a_file_of_it(pages):
    """The launch button of a chapter among them."""
    repository = urlsplit(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]).path
    mark = repository + "/blob/"
    named = {link.split(mark)[1] for page in pages.values() for link in page.links if mark in link}
    assert any(link.endswith("00_start_here.ipynb") for link in named)
    for link in named:
        branch, _, file = link.partition("/")
        assert branch == "main" and (ROOT / file).is_file(), link


def test_nothing_is_fetched_from_another_host(site, pages):
    foreign = [f"{path.name}: {url}" for path, page in pages.items() for url in page.fetched if is_foreign(url)]
    sheets = 0
    for sheet in site.rglob("*.css"):
        sheets += 1
        for url in re.findall(r"""(?:url\(|@import )\s*["']?([^"')]+)""", sheet.read_text(encoding="utf-8")):
            if is_foreign(url):
                foreign.append(f"{sheet.name}: {url}")
            elif not url.startswith(("data:", "#")):
                assert (sheet.parent / urlsplit(url).path).is_file(), f"{sheet.name}: {url} leads to no file"
    for text in (*site.rglob("*.html"), *site.rglob("*.js")):
        for host in ("unpkg.com", "jsdelivr.net", "cdnjs.cloudflare.com", "googleapis.com", "googletagmanager"):
            if host in text.read_text(encoding="utf-8"):
                foreign.append(f"{text.name} names {host}")
    assert not foreign, "\n".join(foreign)
    assert sheets > 3


def is_foreign(url: str) -> bool:
    return url.startswith("//") or urlsplit(url).scheme in {"http", "https"}


def test_every_picture_has_a_text_alternative(pages):
    bare = [f"{path.name}: {found}" for path, page in pages.items() for found in page.without_alt]
    assert not bare, "\n".join(bare)


def test_titles_differ_and_every_page_is_described(site, pages):
    content = [path for path in pages if path.name not in {"404.html", "search.html"}]
    titles = [pages[path].title for path in content]
    assert len(set(titles)) == len(titles), titles
    for path in content:
        meta = pages[path].meta
        assert 40 <= len(meta["description"] or "") <= 200, (path.name, meta.get("description"))
        assert meta["og:title"] and meta["og:url"].startswith("https://")
        assert (site / meta["og:image"].removeprefix(pages[site / "index.html"].meta["og:url"])).is_file()


def test_sitemap_lists_the_pages(site, pages):
    listed = re.findall(r"<loc>([^<]*)</loc>", (site / "sitemap.xml").read_text())
    files = {path for path in pages if path.name not in {"404.html", "search.html"}}
    base = min(listed, key=len)
    assert {site / (url.removeprefix(base) or "index.html") for url in listed} == files


def test_search_index_uses_the_short_addresses(site):
    names = re.search(r'"?docnames"?:\s*(\[[^\]]*\])', (site / "searchindex.js").read_text(encoding="utf-8"))
    for name in json.loads(names[1]):
        assert (site / f"{name}.html").is_file(), name


def test_scripts_and_styles_of_a_page_stay_light(site, pages):
    """Compressed kilobytes of all scripts and styles that one page loads. Font Awesome alone was 542 KB."""
    for path, page in pages.items():
        assets = {target(site, path, url)[0] for url in page.fetched if urlsplit(url).path.endswith((".js", ".css"))}
        size = sum(len(gzip.compress(asset.read_bytes())) for asset in assets) / 1e3
        assert size < 300, (path.name, size)


def test_plan_shows_what_is_here_and_what_is_to_come(site):
    plan = yaml.safe_load((ROOT / "book" / "chapters.yaml").read_text())
    front = (site / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr\b.*?</tr>", front, re.DOTALL)[1:]
    assert len(rows) == len(plan)
    for number, (row, chapter) in enumerate(zip(rows, plan)):
        address = f"chapters/{number:02d}_{chapter['slug']}.html"
        here = (site / address).is_file()
        assert (f'href="{address}"' in row) is here and ("to come" in row) is not here, (number, chapter["slug"])
    for path in ("core", "all"):
        minutes = sum(chapter[path] for chapter in plan)
        assert f"{minutes // 60} h {minutes % 60:02d} min" in front
    assert all(chapter["core"] <= chapter["all"] for chapter in plan)


def test_front_page_picture_computes_what_it_shows(site):
    """The numbers on the tiles, read from the page, against the dense product."""
    front = (site / "index.html").read_text(encoding="utf-8")
    wide = re.search(r'<svg class="hero-drawing wide".*?</svg>', front, re.DOTALL)[0]
    tiles = [int(value) for value in re.findall(r'class="value">(-?\d+)<', wide)]
    ranks = [tiles[: len(tiles) // 2], tiles[len(tiles) // 2 :]]
    x = ranks[0][:2]
    columns = [[rank[2 + 2 * i : 4 + 2 * i] for i in range(2)] for rank in ranks]  # A_r, [2, 2]
    rows = [rank[8 + 2 * i : 10 + 2 * i] for rank in ranks for i in range(2)]  # B, [4, 2]
    a = [left + right for left, right in zip(*columns)]  # A, [2, 4]
    hidden = [max(0, sum(xi * row[j] for xi, row in zip(x, a))) for j in range(4)]
    z = [sum(hidden[j] * rows[j][k] for j in range(4)) for k in range(2)]
    assert [rank[-2:] for rank in ranks] == [z, z]
    assert [sum(pair) for pair in zip(ranks[0][12:14], ranks[1][12:14])] == z
    assert ranks[0][12:14] != z  # the parts are partial


def test_quotations_become_boxes_and_figures_take_the_ink_of_the_page(site):
    use = (site / "how_to_use.html").read_text(encoding="utf-8")
    assert '<blockquote class="rule">' in use and '<blockquote class="prediction">' in use
    figures = re.findall(r'<div class="figure"><svg role="img" aria-label="([^"]+)".*?</svg>',
                         (site / "chapters" / "00_start_here.html").read_text(encoding="utf-8"), re.DOTALL)  # fmt: skip
    assert figures and all(len(alt) > 40 for alt in figures)


@pytest.mark.parametrize("module", ["figures", "plan", "project"])
def test_examples_of_the_extension(module, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    result = doctest.testmod(importlib.import_module(f"tpbook.{module}"))
    assert result.attempted > 0 and result.failed == 0


def test_repository_is_named_in_one_place(site):
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    page = re.sub("<[^>]*>", "", (site / "how_to_use.html").read_text(encoding="utf-8"))
    assert f"git clone {repository}.git" in page and f"git+{repository}.git" in page
    for source in [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("book/*.md")]:
        for installed in re.findall(r"git\+(https://[^\s\"'\\{]+)", source.read_text(encoding="utf-8")):
            assert installed.removesuffix(".git") == repository, source.name


# ---- the build itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """What the site is made of, elsewhere; of the chapters the prose alone, which is built sooner."""
    for name in SOURCES:
        source = ROOT / name
        copying = shutil.copytree if source.is_dir() else shutil.copy
        copying(source, tmp_path / name)
    for path in tmp_path.glob("chapters/*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"] = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
        path.write_text(json.dumps(notebook), encoding="utf-8")
    return tmp_path


def build(root: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, root / "tools" / "build_site.py"], capture_output=True, text=True)


def test_faults_stop_the_build_and_no_stale_page_survives(copy):
    page = copy / "book" / "notation.md"
    sound = page.read_text(encoding="utf-8")
    page.write_text(
        sound + "\n[nowhere](no_such_page.md)\n\n{cite}`NoSuchKey`\n\n![](_static/favicon.svg)\n\n"
        "$$\n{{no_such_name}\n$$\n",
        encoding="utf-8",
    )
    for _ in range(2):  # again: a second build must not pass because the page was read before
        failed = build(copy)
        assert failed.returncode == 1
        for fault in ("no_such_page.md", "NoSuchKey", "no text alternative"):
            assert fault in failed.stderr, failed.stderr
    assert "up to date" not in failed.stdout

    page.write_text(sound.replace("# Notation", "# Signs"), encoding="utf-8")
    (copy / "_build" / "html").mkdir(exist_ok=True)
    (copy / "_build" / "html" / "gone.html").write_text("a page of an earlier build")
    mended = build(copy)
    assert mended.returncode == 0, mended.stderr
    html = copy / "_build" / "html"
    assert not (html / "gone.html").exists()
    assert "Signs" in (html / "index.html").read_text(encoding="utf-8")  # another page's sidebar knows the new title
    assert "up to date" in build(copy).stdout
