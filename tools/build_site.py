"""Build the site into _build/html from the outputs stored in the notebooks (`make site`).

Any change to what the site is made of leads to a whole build, since a page's sidebar, links and search index depend
on the other pages; without a change nothing is built. Warnings are errors. Needs the `book` extra alone, not torch.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "_config.yml",
    "_toc.yml",
    "book",
    "chapters",
    "exercises",
    "pyproject.toml",
    "constraints.txt",
    "tools/build_site.py",
)
HTML = ROOT / "_build" / "html"
LOG = ROOT / "_build" / "site.log"
STAMP = ROOT / "_build" / "site.sha256"
LOG_LINES = 60
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def fingerprint() -> str:
    """A digest of every file that the site is made of, names and contents, and of the Python that builds it."""
    digest = hashlib.sha256(sys.version.encode())
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(file.parts):
                digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def clear() -> None:
    """Remove the last build and its caches: a page that is gone must not be served, nor an old warning be hidden."""
    STAMP.unlink(missing_ok=True)
    for leftover in (HTML, ROOT / "_build" / ".doctrees", ROOT / "_build" / "jupyter_execute"):
        shutil.rmtree(leftover, ignore_errors=True)


def build() -> int:
    """Run Jupyter Book with its output going to the log; its exit status."""
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "-n", "-W", "--keep-going"]
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("w", encoding="utf-8") as log:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode


def main() -> int:
    sources = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == sources:
        print("the site in _build/html is up to date")
        return 0
    print("building the site into _build/html", flush=True)
    clear()
    start = time.monotonic()
    status = build()
    if status:
        tail = COLOURS.sub("", LOG.read_text(encoding="utf-8")).splitlines()[-LOG_LINES:]
        print(*tail, f"the site was not built; the whole log is in {LOG.relative_to(ROOT)}", sep="\n", file=sys.stderr)
        return 1
    STAMP.write_text(sources)
    print(f"built {len(list(HTML.rglob('*.html')))} pages in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
