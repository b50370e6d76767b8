"""Each page in a real browser: what a reader would see, at desktop and phone width, light and dark."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
NAMES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]
PAGES = [name.removeprefix("book/") for name in NAMES]
WIDTHS = {"desktop": 1280, "phone": 390}

# What a page shows of its formulas and pictures.
LOOK = """() => {
  const article = document.querySelector('article');
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  const dollars = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.data.includes('$') && !node.parentElement.closest('code, pre, script, style, .katex'))
      dollars.push(node.data.trim());
  }
  const formulas = [...article.querySelectorAll('.math')];
  return {
    dollars,
    formulas: formulas.length,
    unset: formulas.filter(f => !f.querySelector('.katex-html') || !f.querySelector('math')).map(f => f.textContent),
    wrong: [...article.querySelectorAll('.katex-error')].map(e => e.textContent),
    images: [...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.src),
    flat: [...article.querySelectorAll('svg[role=img]')]
      .filter(s => getComputedStyle(s).display !== 'none' && s.getBoundingClientRect().width < 50).length,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    theme: document.documentElement.dataset.theme,
  };
}"""

# The text of drawings, which axe does not look at: its contrast with what is painted beneath it.
FAINT_TEXT_IN_FIGURES = """() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const painted = element => {
    if (element instanceof SVGElement) return getComputedStyle(element).fill;
    return getComputedStyle(element).backgroundColor;
  };
  const alpha = element => {
    const {opacity, fillOpacity} = getComputedStyle(element);
    const own = (channels(painted(element))[3] ?? 1) * opacity;
    return element instanceof SVGElement ? own * fillOpacity : own;
  };
  const blended = (below, element) => {
    const part = alpha(element);
    return below.map((v, i) => v * (1 - part) + channels(painted(element))[i] * part);
  };
  const faint = [];
  let seen = 0;
  for (const text of document.querySelectorAll('article svg[role=img] text')) {
    const box = text.getBoundingClientRect();
    if (!box.width) continue;
    text.scrollIntoView({block: 'center', inline: 'center'});
    const at = text.getBoundingClientRect();
    const beneath = document.elementsFromPoint(at.x + at.width / 2, at.y + at.height / 2)
      .filter(e => !['text', 'tspan', 'svg', 'g'].includes(e.tagName) && /^rgb/.test(painted(e)));
    const ground = beneath.findIndex(e => alpha(e) > 0.9);
    if (ground < 0) continue;
    seen += 1;
    const shades = beneath.slice(0, ground).reverse();  // what is drawn on the ground, half seen through
    const colour = shades.reduce(blended, channels(painted(beneath[ground])).slice(0, 3));
    const ratio = contrast(channels(getComputedStyle(text).fill), colour);
    if (ratio < 4.5) faint.push(`${text.textContent} at ${ratio.toFixed(2)} on <${beneath[0].tagName}>`);
  }
  return {faint, seen};
}"""


# Hides the tokens of code that look like one before them, thousands on a page, each of which axe would weigh alone.
HIDE_REPEATED_TOKENS = """() => {
  const looks = new Set();
  for (const token of document.querySelectorAll('pre span:not(:has(*))')) {
    const {color, fontSize, fontWeight, backgroundColor} = getComputedStyle(token);
    const ground = getComputedStyle(token.closest('pre')).backgroundColor;
    const look = [color, fontSize, fontWeight, backgroundColor, token.parentElement.tagName, ground].join();
    if (looks.has(look)) token.style.visibility = 'hidden';
    looks.add(look);
  }
}"""


# Whether the focused element has an outline, or the shadow that the theme draws around links in the contents.
FOCUS_RING = """() => {
  const {outlineStyle, boxShadow} = getComputedStyle(document.activeElement);
  return outlineStyle !== 'none' || boxShadow !== 'none';
}"""


class Visit:
    """One page at one width in one mode, with everything that went wrong while it loaded."""

    def __init__(self, browser, address, width, mode):
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.context.add_init_script(f"localStorage.mode = localStorage.mode || '{mode}';"
                                     f"localStorage.theme = localStorage.theme || '{mode}';")  # fmt: skip
        self.page, self.problems, self.host = self.context.new_page(), [], urlsplit(address).netloc
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        self.page.on("console", self.note_console)
        self.page.on("request", self.note_request)
        self.page.on("response", lambda r: r.status >= 400 and self.problems.append(f"{r.status} for {r.url}"))

    def note_console(self, message):
        if message.type in {"error", "warning"}:
            self.problems.append(f"console {message.type}: {message.text}")

    def note_request(self, request):
        parts = urlsplit(request.url)
        if parts.scheme not in {"data", "blob"} and parts.netloc != self.host:
            self.problems.append(f"asked another host: {request.url}")

    def open(self, url):
        """Load the page with its deferred scripts, and wait for the fonts that they asked for."""
        self.page.goto(url, wait_until="load")
        self.page.evaluate("document.fonts.ready.then(() => null)")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()


@pytest.fixture
def visit(browser, address):
    return lambda width=WIDTHS["desktop"], mode="light": Visit(browser, address, width, mode)


def source_has_mathematics(name: str) -> bool:
    """Whether a page's source holds `$...$` outside code."""
    source = ROOT / NAMES[PAGES.index(name)]
    if (notebook := source.with_suffix(".ipynb")).is_file():
        cells = yaml.safe_load(notebook.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        text = source.with_suffix(".md").read_text(encoding="utf-8")
    return bool(re.search(r"\$[^$\s][^$]*\$", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)))


def against_the_rules(page, mode: str) -> str:
    """What axe-core finds, with every folded part open; in dark only of contrast, on which alone the mode bears."""
    from axe_playwright_python.sync_playwright import Axe

    page.add_style_tag(content="* { animation: none !important; transition: none !important }")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.evaluate(HIDE_REPEATED_TOKENS)
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] if mode == "light" else ["color-contrast"]
    report = Axe().run(page, options={"runOnly": rules}).response
    assert "color-contrast" in {rule["id"] for rule in report["passes"]}
    found = [f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
             for rule in report["violations"] for node in rule["nodes"]]  # fmt: skip
    return "\n\n".join(found)


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_page(visit, address, name, width, mode):
    with visit(width, mode) as visitor:
        visitor.open(f"{address}{name}.html")
        seen = visitor.page.evaluate(LOOK)
        assert not visitor.problems, "\n".join(visitor.problems)  # before axe asks for what is not there
        if width == WIDTHS["desktop"]:  # colours do not hang on the width
            figures = visitor.page.evaluate(FAINT_TEXT_IN_FIGURES)
            assert not figures["faint"], "\n".join(figures["faint"])
            if name == "index":
                assert figures["seen"] > 20  # the drawing's numbers were looked at
            broken_rules = against_the_rules(visitor.page, mode)
            assert not broken_rules, broken_rules
    assert seen["theme"] == mode
    assert (seen["formulas"] > 0) == source_has_mathematics(name)
    for fault in ("dollars", "unset", "wrong", "images", "flat"):
        assert not seen[fault], (fault, seen[fault])
    assert seen["overflow"] <= 0, f"the page is {seen['overflow']} px wider than the window"


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_search_page_is_accessible(visit, address, mode):
    with visit(mode=mode) as visitor:
        visitor.open(f"{address}search.html")
        assert not against_the_rules(visitor.page, mode)


def test_search_finds_a_word_and_leads_to_its_page(visit, address):
    with visit(WIDTHS["phone"]) as visitor:
        visitor.page.goto(f"{address}search.html?q=partial")
        visitor.page.locator("#search-results p.context").first.wait_for()
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"]
    with visit() as visitor:
        page = visitor.page
        page.goto(address)
        page.locator(".bd-sidebar-primary .search-button-field").click()
        page.locator("#pst-search-dialog input").fill("replicated")
        page.keyboard.press("Enter")
        result = page.locator("#search-results a", has_text="Notation").first
        result.wait_for()
        result.click()
        page.wait_for_url("**/notation.html*")
    assert not visitor.problems, "\n".join(visitor.problems)


def test_mode_button_changes_the_mode_and_is_remembered(visit, address):
    with visit(mode="light") as visitor:
        page = visitor.page
        page.goto(address)
        page.locator(".theme-switch-button").first.click()
        chosen = page.evaluate("document.documentElement.dataset.mode")
        page.goto(f"{address}notation.html")
        assert page.evaluate("document.documentElement.dataset.mode") == chosen != "light"


def test_contents_open_on_a_phone(visit, address):
    with visit(WIDTHS["phone"]) as visitor:
        page = visitor.page
        page.goto(f"{address}notation.html")
        link = page.locator("nav.bd-links a", has_text="How to use the book")
        assert not link.first.is_visible() or link.first.bounding_box()["x"] < 0
        page.locator(".primary-toggle:visible").first.click()
        page.get_by_role("link", name="How to use the book").first.click()
        page.wait_for_url("**/how_to_use.html")


def test_keyboard_focus_is_seen(visit, address):
    with visit() as visitor:
        page = visitor.page
        page.goto(f"{address}notation.html")
        rings = []
        for _ in range(8):
            page.keyboard.press("Tab")
            rings.append(page.evaluate(FOCUS_RING))
    assert all(rings), rings
