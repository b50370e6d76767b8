"""What the site takes from pyproject.toml: where the repository is, and hence where the site is published."""

import tomllib
from pathlib import Path
from urllib.parse import urlsplit


def repository_url(root):
    """The Repository address under [project.urls] of the pyproject.toml in folder `root`."""
    project = tomllib.loads((Path(root) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"].rstrip("/")


def site_url(repository):
    """Where GitHub Pages publishes a repository.

    >>> site_url("https://github.com/owner/book")
    'https://owner.github.io/book/'
    """
    owner, name = urlsplit(repository).path.strip("/").split("/")
    return f"https://{owner}.github.io/{name}/"
