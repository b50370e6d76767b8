"""Print the requirements of one extra of pyproject.toml, so that `make book` can install it without torch."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"][sys.argv[1]])
