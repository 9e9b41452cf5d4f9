"""A hub for rehearsals and for sites without a network: `steelyard hub serve DIR`."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

from steelyard.checkpoint.hub.local_api import HubHandler, LocalHub
from steelyard.checkpoint.hub.local_store import HubStore
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, UserError


def start(hub: LocalHub, host: str, port: int, handler: type[HubHandler] = HubHandler) -> ThreadingHTTPServer:
    """A server of the hub, in a thread."""
    try:
        server = ThreadingHTTPServer((host, port), type("Handler", (handler,), {"hub": hub}))
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be used: {error.strerror}", hint="choose another --port") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


def serve(folder: Path, host: str, port: int, user: str, token: str | None) -> None:
    """Serve a folder until the process is interrupted."""
    is_loopback = host in ("127.0.0.1", "localhost")
    store = HubStore(folder)
    store.prepare()
    is_writable = is_loopback or token is not None
    server = start(LocalHub(store, user, token, is_writable, is_loopback), host, port)
    console.say(f"serving {len(store.names())} repositories of {folder}; Ctrl-C ends it. In another shell:")
    console.say(f"export HF_ENDPOINT=http://{host}:{server.server_port} HF_HUB_DISABLE_XET=1")
    word = "the word in the token file" if token else "any long word, such as local-rehearsal"
    console.say(f"to upload, set HF_TOKEN to {word}" if is_writable else "uploads need --token-file")
    try:
        threading.Event().wait()
    except Interrupted:
        server.shutdown()
