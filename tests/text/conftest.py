"""A hub on this machine that speaks the parts of the real one's API that downloading uses."""

import hashlib
import http.server
import json
import threading
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "a" * 40


class Hub:
    """Repositories in memory, served over HTTP."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.fetched: list[str] = []

    def add(self, kind: str, repository: str, name: str, content: bytes) -> None:
        self.files.setdefault(f"{kind}/{repository}", {})[name] = content


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *words):
            pass

        def answer(self, body, status=200, **headers):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            for key, contents in made.files.items():
                kind, repository = key.split("/", 1)
                listing = [{"rfilename": name} for name in contents]
                if path.startswith(f"/api/{key}/tree/"):
                    tree = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in contents.items()]
                    return self.answer(json.dumps(tree).encode(), Content_Type="application/json")
                if path.startswith(f"/api/{key}"):
                    info = {
                        "id": repository,
                        "modelId": repository,
                        "sha": COMMIT,
                        "siblings": listing,
                        "private": False,
                    }
                    return self.answer(json.dumps(info).encode(), Content_Type="application/json")
                base = f"/{repository}/resolve/" if kind == "models" else f"/{key}/resolve/"
                if path.startswith(base):
                    name = path.removeprefix(base).partition("/")[2]
                    if name in contents:
                        if self.command == "GET":
                            made.fetched.append(name)
                        tag = hashlib.sha256(contents[name]).hexdigest()
                        return self.answer(contents[name], ETag=f'"{tag}"', X_Repo_Commit=COMMIT)
            return self.answer(b"not found", 404, X_Error_Code="RepoNotFound")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    import huggingface_hub.constants as constants
    from huggingface_hub import hf_api

    for name, value in {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub-cache")}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    yield made
    server.shutdown()
    server.server_close()
