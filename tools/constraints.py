"""Write constraints.txt from what is installed in this environment."""

import subprocess
import sys
from pathlib import Path

HEADER = """\
# Exact versions of everything that is installed, for every target of the Makefile.
# Renew with: make constraints
"""

frozen = subprocess.run(
    [sys.executable, "-m", "pip", "freeze", "--exclude-editable"], check=True, capture_output=True, text=True
).stdout
# A local build tag such as torch's +cpu names a build that other machines cannot find.
lines = sorted({line.split("+")[0] for line in frozen.splitlines() if "==" in line}, key=str.lower)
(Path(__file__).parent.parent / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n")
