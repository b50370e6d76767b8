"""Addresses: `book/notation.md` is at /notation.html, the front page at /. Sitemap, 404 page, descriptions."""

import html
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.builders.html import StandaloneHTMLBuilder

from .project import repository_url, site_url

BRANCH = "main"  # of the repository, that links into it and the launch button name
DESCRIPTION_LENGTH = 160  # characters that search engines show


def short(docname):
    return docname.removeprefix("book/")


class BookBuilder(StandaloneHTMLBuilder):
    """The HTML builder with `book/` taken out of the addresses."""

    def get_target_uri(self, docname, typ=None):
        return super().get_target_uri(short(docname), typ)

    def get_outfilename(self, pagename):
        return super().get_outfilename(short(pagename))

    def dump_search_index(self):
        """The search page builds its links from document names: give it the short ones."""
        super().dump_search_index()
        path = Path(self.outdir) / self.searchindex_filename
        index = path.read_text(encoding="utf-8")
        names = re.search(r'"?docnames"?:\s*(\[[^\]]*\])', index)
        shortened = json.dumps([short(name) for name in json.loads(names[1])])
        path.write_text(index[: names.start(1)] + shortened + index[names.end(1) :], encoding="utf-8")


def place(app, config):
    """Repository and site address, from the one place that states them."""
    repository = repository_url(app.srcdir)
    config.html_baseurl = site_url(repository)
    config.html_theme_options["repository_url"] = repository
    config.html_theme_options["repository_branch"] = BRANCH
    config.html_theme_options["launch_buttons"] = {"colab_url": "https://colab.research.google.com"}


def published(app, pagename):
    """The full address of a page on the published site; the front page's is the folder."""
    address = app.builder.get_target_uri(pagename)
    return app.config.html_baseurl + ("" if address == "index.html" else address)


def description(doctree):
    """The page's first paragraph, cut at a word."""
    paragraph = next((p for p in doctree.findall(nodes.paragraph) if isinstance(p.parent, nodes.section)), None)
    text = " ".join(paragraph.astext().split()) if paragraph is not None else ""
    if len(text) <= DESCRIPTION_LENGTH:
        return text
    return text[:DESCRIPTION_LENGTH].rsplit(" ", 1)[0] + " …"


def describe(app, pagename, templatename, context, doctree):
    """Canonical address, description and card of a page."""
    context["pageurl"] = published(app, pagename)
    if doctree is None:
        return
    title = context["title"]
    card = {
        "og:type": "article",
        "og:site_name": app.config.html_title,
        "og:url": context["pageurl"],
        "og:title": re.sub("<[^>]*>", "", title),
        "og:image": app.config.html_baseurl + "_static/card.png",
    }
    if 'name="description"' not in context["metatags"]:
        context["metatags"] += meta("name", "description", description(doctree))
    context["metatags"] += "".join(meta("property", key, value) for key, value in card.items())


def meta(kind, key, value):
    return f'<meta {kind}="{key}" content="{html.escape(html.unescape(value))}" />\n'


NOT_FOUND = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Not found · {title}</title>
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 1.1rem/1.6 system-ui, sans-serif; max-width: 34rem; margin: 20vh auto 0; padding: 0 1.5rem }}
</style>
<h1>This page is on no rank</h1>
<p>The address leads nowhere; perhaps a page was renamed. <a href="{front}">The front page</a> leads everywhere.</p>
</html>
"""


def write_site_files(app, exception):
    """sitemap.xml, robots.txt and 404.html."""
    if exception is not None or app.builder.format != "html":
        return
    base, out = app.config.html_baseurl, Path(app.outdir)
    addresses = sorted(published(app, name) for name in app.env.found_docs)
    entries = "".join(f"<url><loc>{html.escape(address)}</loc></url>\n" for address in addresses)
    (out / "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{entries}</urlset>\n',
        encoding="utf-8",
    )
    (out / "robots.txt").write_text(f"Sitemap: {base}sitemap.xml\n", encoding="utf-8")
    page = NOT_FOUND.format(title=html.escape(app.config.html_title), front=urlsplit(base).path)
    (out / "404.html").write_text(page, encoding="utf-8")


def setup(app):
    app.add_builder(BookBuilder, override=True)
    app.connect("config-inited", place, priority=100)
    app.connect("html-page-context", describe)
    app.connect("build-finished", write_site_files)
