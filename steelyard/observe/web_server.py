"""`steelyard serve`: all runs below a folder, live in a browser.

    GET /                 the page (pages/serve.html, its styles and scripts), which fetches the rest as text only
    GET /api/runs         one line per run: {"folder": ..., "runs": [{"id", "name", "state", "verdict", ...}]}
    GET /api/run?id=      the full view of a run, as in `observe/run_view.py`
    GET /api/curves?id=   its curves and markers, as in `observe/run_curves.py`
    GET /api/timeline?id= its timeline, as in `observe/report/timeline_data.py`
    GET /api/logs?id=&host=&find=&stream=  lines of a host's logs, as in `observe/log_search.py`
    GET /api/recipes?id=&id=  the keys in which the recipes of runs differ

The server is read-only and serves only runs below the folder. By default it listens on localhost only. It answers only
requests for its own host names, which prevents DNS rebinding: pages of other sites cannot read from it through a
browser. Pages load nothing from other sites (Content-Security-Policy).
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import ipaddress
import json
import socket
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from steelyard.core.console import console
from steelyard.core.errors import Interrupted, UserError
from steelyard.observe.served_runs import Runs

COMPRESSED = 4096  # bytes from which on an answer is compressed: curves are long, and often read over ssh
STYLE, SCRIPT = "text/css; charset=utf-8", "text/javascript; charset=utf-8"
PAGES = {
    "/": ("observe/pages/serve.html", "text/html; charset=utf-8"),
    **{
        f"/{name}": (f"observe/pages/{name}", SCRIPT)
        for name in ("serve.js", "run_list.js", "run_page.js", "run_logs.js")
    },
    "/serve.css": ("observe/pages/serve.css", STYLE),
    # Shared with reports.
    **{f"/{name}": (f"core/pages/{name}", STYLE) for name in ("page.css", "charts.css")},
    **{f"/{name}": (f"core/pages/{name}", SCRIPT) for name in ("canvas.js", "lines.js", "curves.js")},
    "/timeline.js": ("observe/pages/timeline.js", SCRIPT),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOCAL = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::", "")


class Handler(BaseHTTPRequestHandler):
    """Answers only GET and HEAD."""

    server_version, sys_version = "steelyard", ""
    timeout = 30

    def __init__(self, runs: Runs, names: frozenset[str], is_everywhere: bool, *arguments: Any) -> None:
        self.runs, self.names, self.is_everywhere = runs, names, is_everywhere
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Serve a page or an API request."""
        try:
            if not self._is_meant():
                message = b"unknown host name; start the server with steelyard serve --host NAME\n"
                return self._send(HTTPStatus.MISDIRECTED_REQUEST, message, "text/plain")
            url = urlsplit(self.path)
            if url.path in PAGES:
                name, kind = PAGES[url.path]
                return self._send(HTTPStatus.OK, resources.files("steelyard").joinpath(name).read_bytes(), kind)
            answer = self.runs.answer(url.path, parse_qs(url.query, max_num_fields=100))
            if answer is None:
                return self._send(HTTPStatus.NOT_FOUND, b"{}\n", "application/json")
            body = json.dumps(answer, ensure_ascii=True, allow_nan=False, default=str).encode()
            self._send(HTTPStatus.OK, body, "application/json")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # The client disconnected.
        except Exception as error:  # A run that cannot be read must not stop the server.
            console.warn(f"cannot answer {self.path!r}: {type(error).__name__}: {error}")
            with contextlib.suppress(OSError):
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, b"{}\n", "application/json")

    do_HEAD = do_GET

    def _is_meant(self) -> bool:
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        # DNS rebinding needs a host name, so any IP address is safe if the server listens on all of them.
        return name in self.names or (self.is_everywhere and _is_address(name))

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        is_long = len(body) > COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if is_long else body
        self.send_response(status)
        if is_long:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a page polls every two seconds, which would fill the terminal."""


def make_server(folder: Path, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server that is bound but does not serve yet."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", hint="pass the folder that contains the runs")
    is_everywhere = host in EVERYWHERE
    names = {host.lower(), *(LOCAL if host in LOCAL or is_everywhere else ())}
    if is_everywhere:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    except OSError as error:
        hint = "pass an address or a name of this machine as --host"
        raise UserError(f"cannot listen on {host}: {error.strerror}", hint=hint) from None
    kind = Server6 if family == socket.AF_INET6 else Server
    try:
        return kind((host, port), partial(Handler, Runs(folder), frozenset(names), is_everywhere))
    except OSError as error:
        hint = "use another --port" if error.errno != errno.EADDRNOTAVAIL else "use an address of this machine"
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from None


class Server(ThreadingHTTPServer):
    """A server that stops without waiting for open connections."""

    daemon_threads = True


class Server6(Server):
    """The same on IPv6."""

    address_family = socket.AF_INET6


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def serve(folder: Path, host: str, port: int) -> None:
    """Serve until interrupted."""
    with make_server(folder, host, port) as server:
        if host not in LOCAL:
            console.warn(f"anyone who can reach {host} can read the runs below {folder}")
        shown = f"[{host}]" if ":" in host else host or "localhost"
        address = f"http://{shown}:{server.server_address[1]}/"
        console.say(f"{address} shows the runs below {folder}; stop with Ctrl-C")
        with contextlib.suppress(Interrupted):
            server.serve_forever(poll_interval=0.5)
