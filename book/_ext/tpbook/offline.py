"""Takes out what the theme and its extensions would load from other hosts, or load in vain.

- sphinx_thebe writes the address of a CDN into every page, for a button the book does not have.
- Font Awesome's script is 1.5 MB (542 KB compressed) for a dozen icons, its fonts 275 KB; book.css draws the icons as
  masks. `_templates/static/webpack-macros.html` leaves out the script tag.
"""

import re
import shutil
from pathlib import Path

UNUSED = ("scripts/fontawesome.js*", "vendor/fontawesome", "*thebe*", "scripts/*.map", "styles/*.map", "*macros.html")
FONT_AWESOME = re.compile(r"@font-face\{[^}]*Font Awesome[^}]*\}")


def is_thebe(asset):
    return "thebe" in f"{asset.filename} {asset.attributes.get('body', '')}".lower()


def drop_thebe(app, pagename, templatename, context, doctree):
    for kind in ("script_files", "css_files"):
        context[kind] = [asset for asset in context[kind] if not is_thebe(asset)]


def remove_unused_files(app, exception):
    """Delete what no page loads, and the style sheet's references to it."""
    static = Path(app.outdir) / "_static"
    sheet = static / "styles" / "pydata-sphinx-theme.css"
    if exception is None and sheet.is_file():
        sheet.write_text(FONT_AWESOME.sub("", sheet.read_text(encoding="utf-8")), encoding="utf-8")
    for pattern in UNUSED:
        for path in list(static.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def setup(app):
    app.config.templates_path.append("book/_templates")
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("build-finished", remove_unused_files)
