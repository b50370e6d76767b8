"""The book's Sphinx extension: what Jupyter Book lacks to give a site that stands alone.

`addresses`  pages at short addresses, a sitemap, a 404 page, descriptions for search engines and cards
`citations`  sources by their keys
`exercises`  notebooks of exercises to download
`figures`    figures drawn in a cell stand in the page itself, so that their ink follows light and dark
`boxes`      "The rule" and "Your prediction" become boxes
`mathematics` KaTeX, served by the site
`offline`    nothing is asked of another host
`hero`        the picture of the front page
`claims`      the page of claims, with links back to where each is shown
`plan`       the plan of the book and what is computed from it
"""

from . import addresses, boxes, citations, claims, exercises, figures, hero, mathematics, offline, plan


def setup(app):
    for part in (addresses, boxes, citations, claims, exercises, figures, hero, mathematics, offline, plan):
        part.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
