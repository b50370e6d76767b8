"""Draw book/_static/card.png, the picture of links to the book and of the README, from the front page's picture.

Needs the built site (`make site`) and Chromium. Run it when the front page's picture has changed.
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 1200, 630  # as links are shown elsewhere

CARD = """() => {
    const picture = [...document.querySelectorAll("svg")].find(svg => svg.textContent.includes("rank 0"));
    document.documentElement.dataset.theme = "light";
    document.body.innerHTML = `<main style="padding: 50px 60px; background: white; width: 1080px; height: 530px">
        <p style="font: 700 64px 'DejaVu Sans', sans-serif; margin: 0; color: #1a2129">Tensor parallelism</p>
        <p style="font: 28px 'DejaVu Sans', sans-serif; margin: 12px 0 36px; color: #56606c">
            Read it, run it on real ranks, be checked.</p>${picture.outerHTML}</main>`;
    document.querySelector("main svg").style.cssText = "width: 1080px; max-width: none; height: auto; display: block";
}"""


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto((ROOT / "_build" / "html" / "index.html").as_uri())
        page.evaluate(CARD)
        page.screenshot(path=ROOT / "book" / "_static" / "card.png")
        browser.close()


if __name__ == "__main__":
    main()
