"""The HTTP API of a local hub: the part of the real hub's API with which `huggingface_hub` downloads and uploads files.

There are listing, file metadata, ranges, the LFS upload protocol and commits, but no Xet storage: uploads need
HF_HUB_DISABLE_XET=1. Requests of browsers from other sites are refused: those with an Origin, and on a loopback address
those for another host name (DNS rebinding).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from steelyard.checkpoint.hub.local_store import BLOCK, MAIN, HubStore, Repository, git_oid, is_large
from steelyard.core import files

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
NO_XET = "this hub has no Xet storage: set HF_HUB_DISABLE_XET=1"
_NAME = r"(?P<name>[^/]+(?:/[^/]+)?)"
_KEY = r"(?P<key>(?:models|datasets)/[^/]+(?:/[^/]+)?)"


@dataclass
class LocalHub:
    """A store, its user, the token that writes need (None: any), and whether writes are allowed."""

    store: HubStore
    user: str
    token: str | None = None
    is_writable: bool = True
    is_loopback: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def signature(self, oid: str) -> str:
        """What an upload address contains: the upload itself comes without the token."""
        return hmac.new(self.secret, oid.encode(), "sha256").hexdigest()


class HubHandler(http.server.BaseHTTPRequestHandler):
    """One request; `hub` is set by the server's own subclass."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    ROUTES = (
        (r"GET /api/whoami-v2", "whoami"),
        (r"POST /api/validate-yaml", "validate"),
        (r"POST /api/repos/create", "create"),
        (rf"POST /api/{_KEY}/preupload/.*", "preupload"),
        (rf"POST /api/{_KEY}/commit/.*", "commit"),
        (rf"POST /api/{_KEY}/paths-info/(?P<revision>[^/]+)", "paths_info"),
        (r"GET /api/.*/xet-(?:read|write)-token/.*", "no_xet"),
        (r"POST /(?P<name>.+)\.git/info/lfs/objects/batch", "batch"),
        (r"PUT /storage/(?P<oid>[0-9a-f]{64})", "store"),
        (rf"(?:GET|HEAD) /api/{_KEY}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", "tree"),
        (rf"(?:GET|HEAD) /api/{_KEY}(?:/revision/(?P<revision>[^/]+))?", "info"),
        (rf"(?:GET|HEAD) /(?P<kind>datasets/)?{_NAME}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
    )  # fmt: skip

    def log_message(self, format: str, *arguments: Any) -> None:
        """No access log."""

    def do_GET(self) -> None:
        """Answer a request of any method."""
        path = urlsplit(self.path).path
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        is_upload = self.command == "PUT"  # It is written to disk while it is read.
        self.body = b"" if is_upload or chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.begin(f"{self.command} {unquote(path)}"):
            return
        for pattern, name in self.ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                given = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                getattr(self, f"do_{name}")(**given)
                return
        self.missing()

    do_HEAD = do_POST = do_PUT = do_GET

    def begin(self, request: str) -> bool:
        """Refuse requests from pages of other sites."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if self.headers.get("Origin") or (self.hub.is_loopback and host not in LOOPBACK):
            self.say({"error": "this hub does not serve browsers"}, 403)
            return False
        return True

    def say(self, value: Any, status: int = 200, **headers: str) -> None:
        """Answer with JSON."""
        self.answer(json.dumps(value).encode(), status, Content_Type="application/json", **headers)

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        """Answer with bytes."""
        self.head(len(body), status, **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, length: int, status: int, **headers: str) -> None:
        """Send the status and the headers."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        if self.command == "PUT":  # Its body may not have been read.
            self.send_header("Connection", "close")
        self.end_headers()

    def missing(self, code: str = "RepoNotFound") -> None:
        """Answer that something does not exist."""
        self.answer(b"not found", 404, X_Error_Code=code)

    def is_known(self) -> bool:
        """Whether the request has the token; any one, if none is set."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return bool(given) if self.hub.token is None else hmac.compare_digest(given.encode(), self.hub.token.encode())

    def refused(self, writes: bool = True) -> bool:
        """Whether a request was refused: without the token, or a write to a hub that is read-only."""
        if writes and not self.hub.is_writable:
            self.say({"error": "this hub is read-only; start it with --token-file to allow uploads"}, 403)
            return True
        if not self.is_known():
            self.say({"error": "Invalid username or password."}, 401)
            return True
        return False

    def repository(self, key: str, revision: str = MAIN) -> Repository | None:
        """A repository that the sender may see; if there is none, the request is answered."""
        main = self.hub.store.find(key)
        if main is None or (main.private and self.hub.token is not None and not self.is_known()):
            self.missing()
            return None
        found = main if revision == MAIN else self.hub.store.find(key, revision)
        if found is None:
            self.missing("RevisionNotFound")
        return found

    def do_whoami(self) -> None:
        """The user."""
        if not self.refused(writes=False):
            token = {"displayName": "local", "role": "write"}
            self.say({"type": "user", "name": self.hub.user, "orgs": [], "auth": {"accessToken": token}})

    def do_validate(self) -> None:
        """The metadata of a card is not checked."""
        self.say({"errors": [], "warnings": []})

    def do_no_xet(self) -> None:
        """A client that wants to use Xet."""
        self.say({"error": NO_XET}, 400, X_Error_Message=NO_XET)

    def do_create(self) -> None:
        """Create a repository."""
        if self.refused():
            return
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        key = f"{wanted.get('type') or 'model'}s/{name}"
        url = f"{self._endpoint()}/{key.removeprefix('models/')}"
        if self.hub.store.find(key) is not None:
            self.say({"error": "exists", "url": url}, 409)
            return
        self.hub.store.create(key, wanted.get("private", False) or wanted.get("visibility") == "private")
        self.say({"url": url})

    def do_preupload(self, key: str) -> None:
        """Which files are uploaded on their own, and which the hub has."""
        if self.refused() or (repository := self.repository(key)) is None:
            return
        answers, paths = [], repository.paths()
        for file in json.loads(self.body)["files"]:
            large = is_large(file["path"], file["size"])
            made = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if (path := paths.get(file["path"])) is not None:
                made["oid"] = self.hub.store.digest(path) if large else git_oid(path.read_bytes())
            answers.append(made)
        self.say({"files": answers})

    def do_batch(self, name: str) -> None:
        """Where large files are uploaded to; those that are here are not sent again."""
        if self.refused():
            return
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            upload = {
                "upload": {"href": f"{self._endpoint()}/storage/{wanted['oid']}?{self.hub.signature(wanted['oid'])}"}
            }
            has = (self.hub.store.objects / wanted["oid"]).is_file()
            objects.append(wanted if has else wanted | {"actions": upload})
        self.say({"transfer": "basic", "objects": objects})

    def do_store(self, oid: str) -> None:
        """Receive a large file, whose digest must be its name."""
        if urlsplit(self.path).query != self.hub.signature(oid):
            self.say({"error": "this is not an address of this hub"}, 403)
            return
        digest, path = hashlib.sha256(), self.hub.store.objects / oid
        temporary = path.with_name(f"{files.TEMPORARY}{threading.get_ident()}-{oid}")
        try:
            with open(temporary, "wb") as file:
                for block in self._received():
                    digest.update(block)
                    file.write(block)
            is_right = digest.hexdigest() == oid
            if is_right:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if is_right:
            self.say({})
        else:
            self.say({"error": "the content does not have this digest"}, 400)

    def _received(self) -> Iterator[bytes]:
        """The body of an upload, in blocks."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left and (block := self.rfile.read(min(left, BLOCK))):
            left -= len(block)
            yield block

    def do_commit(self, key: str) -> None:
        """Make a commit of small files, uploaded large files and deletions."""
        if self.refused() or (repository := self.repository(key)) is None:
            return
        items = [json.loads(line) for line in self.body.splitlines()]
        added: dict[str, bytes | Path] = {}
        deleted: list[str] = []
        for kind, value in ((item["key"], item["value"]) for item in items):
            if kind == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                added[value["path"]] = self.hub.store.objects / value["oid"]
            elif kind == "deletedFile":
                deleted.append(value["path"])
            elif kind == "deletedFolder":
                deleted += [name for name in repository.paths() if name.startswith(value["path"].rstrip("/") + "/")]
        lost = [name for name, content in added.items() if isinstance(content, Path) and not content.is_file()]
        if lost:
            self.say({"error": f"not uploaded: {', '.join(lost)}"}, 400)
            return
        try:
            self.hub.store.commit(key, items[0]["value"]["summary"], added, deleted)
        except ValueError as error:
            self.say({"error": str(error)}, 400)
            return
        sha = repository.sha
        url = f"{self._endpoint()}/{key.removeprefix('models/')}/commit/{sha}"
        self.say({"success": True, "commitOid": sha, "commitUrl": url})

    def do_tree(self, key: str, revision: str, folder: str = "") -> None:
        """The files of a folder, with those below if the request says so."""
        if (repository := self.repository(key, revision)) is None:
            return
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        paths = {name: path for name, path in repository.paths().items() if name.startswith(prefix)}
        if prefix and not paths:
            self.missing("EntryNotFound")
            return
        if parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1"):
            self.say([repository.entry(name, path) for name, path in paths.items()])
            return
        below = {prefix + name[len(prefix) :].partition("/")[0] for name in paths if "/" in name[len(prefix) :]}
        folders = [
            {"type": "directory", "path": name, "oid": git_oid(name.encode()), "size": 0} for name in sorted(below)
        ]
        here = [repository.entry(name, path) for name, path in paths.items() if "/" not in name[len(prefix) :]]
        self.say([*folders, *here])

    def do_paths_info(self, key: str, revision: str) -> None:
        """Some files and folders by name."""
        if (repository := self.repository(key, revision)) is None:
            return
        is_json = "json" in (self.headers.get("Content-Type") or "")
        wanted = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode()).get("paths", [])
        paths, found = repository.paths(), []
        for name in wanted:
            if name in paths:
                found.append(repository.entry(name, paths[name]))
            elif any(each.startswith(f"{name}/") for each in paths):
                found.append({"type": "directory", "path": name, "oid": git_oid(name.encode()), "size": 0})
        self.say(found)

    def do_info(self, key: str, revision: str = MAIN) -> None:
        """A repository and the names of its files."""
        if (repository := self.repository(key, revision)) is not None:
            name = key.partition("/")[2]
            siblings = [{"rfilename": file} for file in repository.paths()]
            info = {"id": name, "modelId": name, "sha": repository.sha, "siblings": siblings, "tags": []}
            self.say(info | {"private": repository.private, "gated": False, "disabled": False})

    def do_resolve(self, name: str, revision: str, file: str, kind: str = "models/") -> None:
        """The content of a file, or its part from a byte on."""
        if (repository := self.repository(kind + name, revision)) is None:
            return
        path = repository.paths().get(file)
        if path is None:
            self.missing("EntryNotFound")
            return
        entry, first, status = repository.entry(file, path), 0, 200
        size = entry["size"]
        headers = {
            "ETag": f'"{entry.get("lfs", entry)["oid"]}"',
            "X_Repo_Commit": repository.sha,
            "Accept_Ranges": "bytes",
        }
        last = size - 1
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, status = int(found[1]), 206
            last = min(last, int(found[2])) if found[2] else last
            headers["Content_Range"] = f"bytes {first}-{last}/{size}"
            if first >= size:
                self.answer(b"", 416, Content_Range=f"bytes */{size}")
                return
        self.head(last + 1 - first, status, **headers)
        if self.command != "HEAD":
            self.send_file(path, first, last + 1)

    def send_file(self, path: Path, first: int, end: int) -> None:
        """Send a part of a file."""
        with open(path, "rb") as file:
            file.seek(first)
            if end == path.stat().st_size:
                shutil.copyfileobj(file, self.wfile, BLOCK)
            else:
                self.wfile.write(file.read(end - first))

    def _endpoint(self) -> str:
        return f"http://{self.headers.get('Host')}"
