"""The local hub of the package with what tests need: files in memory's terms, faults, and a record of all requests."""

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.checkpoint.hub import local_hub
from steelyard.checkpoint.hub.local_api import HubHandler, LocalHub
from steelyard.checkpoint.hub.local_store import HubStore, Repository

USER, TOKEN = "someone", "hf_" + "Planted0" * 4 + "Tk"


@dataclass
class Fault:
    """What goes wrong with requests whose method and path match: a status, or a connection cut after so many bytes."""

    pattern: str
    status: int = 0
    cut_after: int | None = None
    times: int = 1
    message: str = "this is a fault"


class Files(MutableMapping):
    """The files of a repository by name, which can be written."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def __getitem__(self, name: str) -> bytes:
        return self.repository.paths()[name].read_bytes()

    def __setitem__(self, name: str, content: bytes) -> None:
        path = self.repository.folder / name
        assert path.resolve().is_relative_to(self.repository.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def __delitem__(self, name: str) -> None:
        self.repository.paths()[name].unlink()

    def __iter__(self) -> Iterator[str]:
        return iter(self.repository.paths())

    def __len__(self) -> int:
        return len(self.repository.paths())


class HostileStore(HubStore):
    """A store that also lists names which no honest hub lists, such as `../outside`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lies: dict[str, dict[str, Path]] = {}

    def lie(self, key: str, name: str, content: bytes) -> None:
        path = self.folder / ".hub" / f"lie-{len(self.lies)}"
        path.write_bytes(content)
        self.lies.setdefault(key, {})[name] = path

    def find(self, key: str, revision: str = "main") -> Repository | None:
        if key not in self.lies:
            return super().find(key, revision)
        hostile = HostileRepository(self, key, self.folder / key)
        hostile.lies = self.lies[key]
        return hostile


class HostileRepository(Repository):
    """A repository with more names than files."""

    lies: dict[str, Path]

    def paths(self) -> dict[str, Path]:
        return super().paths() | self.lies


class Stocked:
    """A repository of the hub."""

    def __init__(self, store: HubStore, key: str) -> None:
        self.settings = store.settings.setdefault(key, {"private": False, "commits": []})
        self.files = Files(Repository(store, key, store.folder / key))

    @property
    def sha(self) -> str:
        return self.files.repository.sha

    @property
    def commits(self) -> list[str]:
        return self.settings["commits"]

    @property
    def private(self) -> bool:
        return self.settings["private"]

    @private.setter
    def private(self, value: bool) -> None:
        self.settings["private"] = value


class Hub(LocalHub):
    """A hub in a folder, with one user."""

    def __init__(self, folder: Path) -> None:
        super().__init__(HostileStore(folder), USER, TOKEN)
        self.faults: list[Fault] = []
        self.fetched: list[str] = []
        self.requests: list[str] = []
        self.sent: list[str] = []
        self.ranges: list[str] = []
        self.endpoint = ""

    @property
    def repositories(self) -> dict[str, Stocked]:
        return {key: Stocked(self.store, key) for key in self.store.names()}

    def add(self, kind: str, repository: str, name: str, content: bytes) -> None:
        key = f"{kind}/{repository}"
        if name.startswith("/") or ".." in name.split("/"):
            self.store.lie(key, name, content)
        else:
            Stocked(self.store, key).files[name] = content

    def model(self, name: str) -> Stocked:
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


class Handler(HubHandler):
    """One request, which may go wrong."""

    hub: Hub

    def begin(self, request: str) -> bool:
        self.hub.requests.append(request)
        self.fault = self.hub.fault_of(request)
        if self.fault is not None and self.fault.status:
            echo = f"{self.fault.message} for {self.headers.get('Authorization')}"  # A careless server repeats all.
            self.say({"error": echo}, self.fault.status, X_HF_Warning=f"careless; {echo}")
            return False
        return super().begin(request)

    def do_resolve(self, name: str, revision: str, file: str, kind: str = "models/") -> None:
        if self.command == "GET":
            self.hub.fetched.append(file)
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            self.hub.ranges.append(f"{file} from {found[1]}")
        super().do_resolve(name, revision, file, kind)

    def send_file(self, path: Path, first: int, end: int) -> None:
        if self.fault is not None and self.fault.cut_after is not None:
            self.wfile.write(path.read_bytes()[first:end][: self.fault.cut_after])
            self.close_connection = True
        else:
            super().send_file(path, first, end)

    def do_store(self, oid: str) -> None:
        super().do_store(oid)
        if (self.hub.store.objects / oid).is_file():
            self.hub.sent.append(oid)


def serve(hub: Hub):
    """Start serving the hub on a free port."""
    server = local_hub.start(hub, "127.0.0.1", 0, Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    return server
