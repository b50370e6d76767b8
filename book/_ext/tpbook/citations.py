"""Citations show the key that the book uses for a source: [M19], not [1]."""

import pybtex.plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle


class KeyLabels(BaseLabelStyle):
    def format_labels(self, entries):
        return (entry.key for entry in entries)


class KeyStyle(Style):
    default_label_style = KeyLabels


def setup(app):
    pybtex.plugin.register_plugin("pybtex.style.formatting", "keys", KeyStyle)
