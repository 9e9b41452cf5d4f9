"""A hub on this machine that speaks the parts of the real one's API that `huggingface_hub` calls.

It keeps repositories in memory, asks for a token where the real one does, can be told to fail (`Fault`), and remembers
every request.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

USER, TOKEN = "someone", "hf_" + "Planted0" * 4 + "Tk"
LFS_FROM = 20_000  # Bytes from which a file goes to the large file storage.


@dataclass
class Repository:
    """Files by name, as of the newest commit."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(self.commits).encode()).hexdigest()


@dataclass
class Fault:
    """What goes wrong with requests whose method and path match: a status, or a connection cut after so many bytes."""

    pattern: str
    status: int = 0
    cut_after: int | None = None
    times: int = 1
    message: str = "this is a fault"


class Hub:
    """The state of a hub."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.fetched: list[str] = []
        self.requests: list[str] = []
        self.sent: list[str] = []
        self.ranges: list[str] = []
        self.endpoint = ""

    def add(self, kind: str, repository: str, name: str, content: bytes) -> None:
        self.repositories.setdefault(f"{kind}/{repository}", Repository()).files[name] = content

    def model(self, name: str) -> Repository:
        return self.repositories[f"models/{name}"]

    def environment(self, folder) -> dict[str, str]:
        """What a process that is to use this hub, and nothing of the user's, finds in its environment."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(folder / "hf-home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def fault_of(self, request: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and re.search(fault.pattern, request):
                fault.times -= 1
                return fault
        return None


def is_large(name: str, content_size: int) -> bool:
    return name.endswith((".safetensors", ".bin", ".model")) or content_size >= LFS_FROM


def git_oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def entry(name: str, content: bytes) -> dict:
    """A file as the tree lists it."""
    made = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
    if is_large(name, len(content)):
        oid = hashlib.sha256(content).hexdigest()
        made["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return made


class Handler(http.server.BaseHTTPRequestHandler):
    """One request; `hub` is set by the server's own subclass."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    ROUTES = (
        (r"GET /api/whoami-v2", "whoami"),
        (r"POST /api/validate-yaml", "validate"),
        (r"POST /api/repos/create", "create"),
        (r"POST /api/(?P<key>models/[^/]+/[^/]+)/preupload/.*", "preupload"),
        (r"POST /(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        (r"PUT /storage/(?P<oid>\w+)", "store"),
        (r"POST /api/(?P<key>models/[^/]+/[^/]+)/commit/.*", "commit"),
        (r"(GET|HEAD) /api/(?P<key>(models|datasets)/[^/]+/[^/]+)/tree/.*", "tree"),
        (r"(GET|HEAD) /api/(?P<key>(models|datasets)/[^/]+/[^/]+)(/revision/.*)?", "info"),
        (r"(GET|HEAD) /(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)", "resolve"),
    )

    def log_message(self, *words):
        pass

    def do_GET(self):
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.hub.requests.append(request)
        self.fault = self.hub.fault_of(request)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.fault is not None and self.fault.status:
            echo = f"{self.fault.message} for {self.headers.get('Authorization')}"  # A careless server repeats all.
            return self.say({"error": echo}, self.fault.status, X_HF_Warning=f"careless; {echo}")
        for pattern, name in self.ROUTES:
            if found := re.fullmatch(pattern, request):
                return getattr(self, f"do_{name}")(**{k: v for k, v in found.groupdict().items() if v is not None})
        return self.missing()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.cut_after is not None:
            self.wfile.write(body[: self.fault.cut_after])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def say(self, value, status: int = 200, **headers: str) -> None:
        self.answer(json.dumps(value).encode(), status, Content_Type="application/json", **headers)

    def missing(self, code: str = "RepoNotFound") -> None:
        self.answer(b"not found", 404, X_Error_Code=code)

    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def refused(self) -> bool:
        """Whether a request that needs the user's token came without it."""
        if not self.known():
            self.say({"error": "Invalid username or password."}, 401)
        return not self.known()

    def repository(self, key: str) -> Repository | None:
        found = self.hub.repositories.get(key)
        if found is None or (found.private and not self.known()):
            self.missing()
            return None
        return found

    def do_whoami(self):
        if not self.refused():
            token = {"displayName": "planted", "role": "write"}
            self.say({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": token}})

    def do_validate(self):
        self.say({"errors": [], "warnings": []})

    def do_create(self):
        if self.refused():
            return
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        private = wanted.get("private", False) or wanted.get("visibility") == "private"
        if f"models/{name}" in self.hub.repositories:
            return self.say({"error": "exists", "url": f"{self.hub.endpoint}/{name}"}, 409)
        self.hub.repositories[f"models/{name}"] = Repository({".gitattributes": b"*.safetensors lfs\n"}, private)
        self.say({"url": f"{self.hub.endpoint}/{name}"})

    def do_preupload(self, key):
        if self.refused() or (repository := self.repository(key)) is None:
            return
        answers = []
        for file in json.loads(self.body)["files"]:
            large = is_large(file["path"], file["size"])
            made = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if (content := repository.files.get(file["path"])) is not None:
                made["oid"] = hashlib.sha256(content).hexdigest() if large else git_oid(content)
            answers.append(made)
        self.say({"files": answers})

    def do_batch(self, name):
        if self.refused():
            return
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.endpoint}/storage/{wanted['oid']}"}}
            objects.append(wanted if wanted["oid"] in self.hub.stored else wanted | {"actions": upload})
        self.say({"transfer": "basic", "objects": objects})

    def do_store(self, oid):
        content = self.body
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if hashlib.sha256(content).hexdigest() != oid:
            return self.say({"error": "checksum"}, 400)
        self.hub.stored[oid] = content
        self.hub.sent.append(oid)
        self.say({})

    def do_commit(self, key):
        if self.refused() or (repository := self.repository(key)) is None:
            return
        files = dict(repository.files)
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        repository.commits.append(json.loads(self.body.splitlines()[0])["value"]["summary"])
        url = f"{self.hub.endpoint}/{key.removeprefix('models/')}/commit/{repository.sha}"
        self.say({"success": True, "commitOid": repository.sha, "commitUrl": url})

    def do_tree(self, key):
        if (repository := self.repository(key)) is not None:
            self.say([entry(name, content) for name, content in repository.files.items()])

    def do_info(self, key):
        if (repository := self.repository(key)) is not None:
            name = key.partition("/")[2]
            listing = [{"rfilename": file} for file in repository.files]
            info = {"id": name, "modelId": name, "sha": repository.sha, "siblings": listing}
            self.say(info | {"private": repository.private})

    def do_resolve(self, name, file, kind="models/"):
        if (repository := self.repository(kind + name)) is None:
            return None
        if file not in repository.files:
            return self.missing("EntryNotFound")
        content = repository.files[file]
        made = entry(file, content)
        headers = {"ETag": f'"{made.get("lfs", made)["oid"]}"', "X_Repo_Commit": repository.sha}
        if self.command == "GET":
            self.hub.fetched.append(file)
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            first = int(found.group(1))
            self.hub.ranges.append(f"{file} from {first}")
            span = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self.answer(content[first:], 206, Content_Range=span, **headers)
        return self.answer(content, **headers)


def serve(hub: Hub) -> http.server.ThreadingHTTPServer:
    """Start serving the hub on a free port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    return server
