"""The bibliography: sources by the key that the book uses for them ([M19], not [1]), titles as they are printed."""

import pybtex.plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle
from pybtex.style.sorting import BaseSortingStyle
from pybtex.style.template import field, sentence


class KeyLabels(BaseLabelStyle):
    def format_labels(self, entries):
        return (entry.key for entry in entries)


class KeyOrder(BaseSortingStyle):
    def sorting_key(self, entry):
        return entry.key.lower()


class KeyStyle(Style):
    default_label_style = KeyLabels
    default_sorting_style = KeyOrder

    def format_title(self, entry, which_field, as_sentence=True):
        title = field(which_field)
        return sentence[title] if as_sentence else title


def mend_roles(app, pagename, templatename, context, doctree):
    """docutils gives the entries of a list a role that is deprecated and that a list may not hold."""
    if "doc-biblioentry" in context.get("body", ""):
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')


def setup(app):
    pybtex.plugin.register_plugin("pybtex.style.formatting", "keys", KeyStyle)
    app.connect("html-page-context", mend_roles)
