"""A chapter's link to its exercise notebook, which works as it stands in Jupyter, is a download on the site."""

import shutil
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.osutil import relative_uri

FOLDER = "exercises"


def link_notebooks(app, doctree):
    """Point links at the copied notebooks. A link to one that does not exist is left for Sphinx to report."""
    for link in list(doctree.findall(pending_xref)):
        notebook = f"{link.get('reftarget')}.ipynb"
        if link.get("refdomain") == "doc" and notebook.startswith(FOLDER + "/") and (app.srcdir / notebook).is_file():
            page = app.builder.get_target_uri(app.env.docname)
            refuri = relative_uri(page, notebook)
            link.replace_self(
                nodes.reference("", "", *link.children, refuri=refuri, internal=True, classes=["download"])
            )


def copy_notebooks(app, exception):
    if exception is None and app.builder.format == "html":
        target = Path(app.outdir) / FOLDER
        target.mkdir(exist_ok=True)
        for notebook in (Path(app.srcdir) / FOLDER).glob("*.ipynb"):
            shutil.copy(notebook, target)


def setup(app):
    app.connect("doctree-read", link_notebooks)
    app.connect("build-finished", copy_notebooks)
