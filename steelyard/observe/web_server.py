"""`steelyard serve`: all runs below a folder, live in a browser.

    GET /            the page (pages/serve.html, .css, .js), which fetches the rest and renders it as text only
    GET /api/runs    one line per run: {"folder": ..., "runs": [{"id", "name", "state", "verdict", "progress", "loss"}]}
    GET /api/run?id= the full view of a run, as in `observe/run_view.py`

The server is read-only and serves only runs below the folder. By default it listens on localhost only. It answers only
requests for its own host names, which prevents DNS rebinding: pages of other sites cannot read from it through a
browser. Pages load nothing from other sites (Content-Security-Policy).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from steelyard.core.console import console
from steelyard.core.errors import Interrupted, UserError
from steelyard.observe import find_runs
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import summary, view
from steelyard.observe.scheduler_poll import Asking
from steelyard.observe.verdict import has_ended

SECONDS_FRESH = 1.5  # A run is refreshed no more often than this, for any number of browsers.
SECONDS_LISTED = 5.0
PAGES = {
    "/": ("observe/pages/serve.html", "text/html; charset=utf-8"),
    "/serve.css": ("observe/pages/serve.css", "text/css; charset=utf-8"),
    "/serve.js": ("observe/pages/serve.js", "text/javascript; charset=utf-8"),
    # Shared with reports.
    "/charts.css": ("core/pages/charts.css", "text/css; charset=utf-8"),
    "/canvas.js": ("core/pages/canvas.js", "text/javascript; charset=utf-8"),
    "/lines.js": ("core/pages/lines.js", "text/javascript; charset=utf-8"),
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


class Followed:
    """One run, refreshed on request if its cached answer is too old."""

    def __init__(self, path: Path) -> None:
        self.state, self.asking, self.lock = RunState(path), Asking(path), threading.Lock()
        self._answers: dict[str, tuple[float, dict[str, Any]]] = {}

    def answer(self, make: Callable[[RunState], dict[str, Any]], fresh: float) -> dict[str, Any]:
        """The result of `make` for the run, at most `fresh` seconds old."""
        with self.lock:
            at, known = self._answers.get(make.__name__, (float("-inf"), {}))
            if time.monotonic() - at < fresh:
                return known
            # Most of hundreds of runs have ended, and polling the scheduler for each of them would take minutes.
            if not has_ended(self.state.refresh()):
                self.asking.ask(self.state)
                self.state.refresh()
            answer = make(self.state)
            self._answers[make.__name__] = time.monotonic(), answer
            return answer


class Runs:
    """The runs below a folder; the folder is scanned again every `SECONDS_LISTED` seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._found: dict[str, Followed] = {}
        self._looked = float("-inf")

    def found(self) -> dict[str, Followed]:
        """The runs by their path relative to the folder, which is their only id."""
        with self._lock:
            if time.monotonic() - self._looked > SECONDS_LISTED:
                paths = {_name(path.relative_to(self.folder)): path for path in find_runs.below(self.folder)}
                self._found = {name: self._found.get(name) or Followed(path) for name, path in paths.items()}
                self._looked = time.monotonic()
            return self._found

    def listed(self) -> dict[str, Any]:
        """Summaries of all runs, newest first."""
        found = self.found()
        runs = [{"id": name, **run.answer(summary, SECONDS_LISTED)} for name, run in found.items()]
        return {"folder": _name(self.folder), "runs": sorted(runs, key=lambda run: -_moved(found[run["id"]].state))}

    def one(self, name: str) -> dict[str, Any] | None:
        """The full view of a run; None if there is no such run."""
        run = self.found().get(name)
        return None if run is None else run.answer(view, SECONDS_FRESH)


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
            answer: dict[str, Any] | None = None
            if url.path == "/api/runs":
                answer = self.runs.listed()
            elif url.path == "/api/run":
                answer = self.runs.one(parse_qs(url.query).get("id", [""])[0])
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
        self.send_response(status)
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


def _moved(state: RunState) -> float:
    """Time of the last activity of a run."""
    return max(state.progressed or 0.0, state.began or 0.0)


def _name(path: Path) -> str:
    """A path as text, with invalid UTF-8 replaced, since a browser cannot request it."""
    return os.fsencode(path).decode("utf-8", "replace")


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
