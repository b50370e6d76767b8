"""The built site, served on a free port, and a real browser."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the site, built if anything it is made of has changed."""
    built = subprocess.run([sys.executable, ROOT / "tools" / "build_site.py"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def address(site):
    """Where the site is served, with a slash at the end."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium. Without one the tests are skipped, or fail with TPCODE_NO_SKIPS=1."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        _cannot_look(f"none of {', '.join(BROWSERS)} is on the PATH")
    try:
        playwright = sync_playwright().start()
    except Exception as error:  # its driver needs a library that is not on every machine: Debian's libatomic1
        _cannot_look(f"Playwright's driver does not start ({error}); is libatomic1 installed?")
    running = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
    yield running
    running.close()
    playwright.stop()


def _cannot_look(why: str):
    message = f"no browser, so the pages are not looked at: {why}"
    pytest.fail(message) if os.environ.get("TPCODE_NO_SKIPS") == "1" else pytest.skip(message)
