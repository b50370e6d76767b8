"""A new release of a dependency cannot break the notebooks: every version is exact, and it is what is installed."""

import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


PINNED = {
    canonical(name): exact
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for name, exact in [line.split("==")]
}


def test_every_requirement_has_an_exact_version():
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(r for extra in ("book", "hf", "dev") for r in extras[extra])]
    names = {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}
    assert names - PINNED.keys() == set()
    assert all("==" in requirement for requirement in extras["peers"])  # installed without what they depend on


def test_reading_the_book_asks_for_no_torch():
    assert not any("torch" in requirement for requirement in PROJECT["optional-dependencies"]["book"])


def test_what_is_installed_is_what_is_pinned():
    installed = {}
    for name in PINNED:
        with suppress(PackageNotFoundError):  # some are for other platforms
            installed[name] = version(name).split("+")[0]  # torch names its build: 2.13.0+cpu
    assert len(installed) > 100
    assert installed == {name: PINNED[name] for name in installed}, "run `make clean`, then `make test`"


def test_what_is_pinned_installs_on_every_python_that_we_name():
    """Debian 12 has Python 3.11.2, and a package may ask for 3.11.5."""
    lowest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    wants = {d.metadata["Name"]: d.metadata["Requires-Python"] or "" for d in distributions()}
    assert lowest == "3.11.0"
    assert [name for name, python in wants.items() if not SpecifierSet(python).contains(lowest)] == []
