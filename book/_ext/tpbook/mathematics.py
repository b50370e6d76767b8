"""Mathematics by KaTeX, from the site's own files, and only on pages that have any.

A formula reaches the page as its TeX source in an element of class `math`; `mathematics.js` sets it, as HTML for the
eye and as MathML for screen readers. Without JavaScript a reader sees the TeX.
"""

from docutils import nodes
from sphinx.util.math import get_node_equation_number


def inline(translator, node):
    """`$...$`"""
    translator.body.append(translator.starttag(node, "span", "", CLASS="math notranslate nohighlight"))
    translator.body.append(translator.encode(node.astext()) + "</span>")
    raise nodes.SkipNode


def block(translator, node):
    """`$$...$$`, numbered if it has a label."""
    translator.body.append(translator.starttag(node, "div", "", CLASS="math notranslate nohighlight"))
    if node["number"]:
        number = get_node_equation_number(translator, node)
        translator.body.append(f'<span class="eqno">({number})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append(f'<div class="formula">{translator.encode(aligned(node.astext()))}</div></div>\n')
    raise nodes.SkipNode


def aligned(tex):
    """Lines broken by `\\\\` need an environment around them."""
    return rf"\begin{{aligned}}{tex}\end{{aligned}}" if r"\\" in tex and r"\begin" not in tex else tex


def load_katex(app, pagename, templatename, context, doctree):
    def is_formula(node):
        return isinstance(node, (nodes.math, nodes.math_block))

    if doctree is not None and any(doctree.findall(is_formula)):
        app.add_css_file("vendor/katex/katex.min.css")
        app.add_js_file("vendor/katex/katex.min.js", loading_method="defer")
        app.add_js_file("mathematics.js", loading_method="defer")


def setup(app):
    app.add_html_math_renderer("katex", inline_renderers=(inline, None), block_renderers=(block, None))
    app.connect("html-page-context", load_katex)
