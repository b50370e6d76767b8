"""Serve the built site on 127.0.0.1 (`make book`), or say which port to take instead."""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HTML = Path(__file__).resolve().parent.parent / "_build" / "html"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """A line for every file of every page would hide the address."""


def main(port: int) -> int:
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(QuietHandler, directory=str(HTML)))
    except OSError as error:
        print(f"port {port} cannot be used ({error.strerror}); try another: make book PORT={port + 1}", file=sys.stderr)
        return 1
    print(f"the book is at http://127.0.0.1:{port}  (Ctrl-C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
