"""The hub that `steelyard hub serve` offers: other people's clients download from it, and `hub push` uploads to it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from steelyard.checkpoint.hub import local_hub
from steelyard.checkpoint.hub.local_api import LocalHub
from steelyard.checkpoint.hub.local_store import HubStore
from tests import preloaded

SECONDS = 300
LOAD = """
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained("org/tiny")
tokenizer = transformers.AutoTokenizer.from_pretrained("org/tiny")
ids = tokenizer("def main", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0]))
"""


@pytest.fixture
def served(models, tmp_path):
    """The command, with a model that was copied into its folder, and the environment of its clients."""
    folder = tmp_path / "hub"
    shutil.copytree(models / "llama", folder / "models" / "org" / "tiny")
    words = ["hub", "serve", str(folder), "--port", "0", "--user", "me"]
    command = [sys.executable, "-m", "steelyard", *words]
    process = preloaded.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    line = next(line for line in process.stderr if "HF_ENDPOINT" in line)
    environment = dict(re.findall(r"(\w+)=(\S+)", line)) | {"HF_TOKEN": "local-rehearsal", "NO_PROXY": "127.0.0.1"}
    environment["HF_HOME"] = str(tmp_path / "home")
    yield SimpleNamespace(folder=folder, environment=environment)
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 0


def run(served, *command):
    done = preloaded.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=SECONDS,
        env=os.environ | served.environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # The model is loaded by transformers before each upload.
def test_a_pushed_model_lies_in_the_folder_and_is_pulled_again(served, models, tmp_path):
    pushed = json.loads(run(served, "-m", "steelyard", "hub", "push", models / "llama", "mine", "--json"))
    assert pushed["name"] == "me/mine"
    stored = served.folder / "models" / "me" / "mine"
    assert (stored / "model.safetensors").read_bytes() == (models / "llama" / "model.safetensors").read_bytes()
    again = json.loads(run(served, "-m", "steelyard", "hub", "push", models / "llama", "mine", "--json"))
    assert (again["sent"], again["commit"]) == ([], pushed["commit"])
    run(served, "-m", "steelyard", "hub", "pull", "org/tiny", tmp_path / "pulled")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "pulled" / name).read_bytes() == (models / "llama" / name).read_bytes()


@pytest.mark.slow
def test_transformers_and_datasets_load_from_it(served, models):
    (served.folder / "datasets" / "org" / "talks").mkdir(parents=True)
    (served.folder / "datasets" / "org" / "talks" / "train.jsonl").write_text('{"text": "一"}\n{"text": "two"}\n')
    local = LOAD.replace("org/tiny", str(models / "llama"))
    assert run(served, "-c", LOAD) == run(served, "-c", local)
    code = 'import datasets; print(list(datasets.load_dataset("org/talks")["train"]["text"]))'
    assert run(served, "-c", code) == "['一', 'two']\n"


@pytest.fixture
def hub_at(tmp_path):
    """A hub with a token in this process, and a function that sends it a request and returns the answer's status."""
    store = HubStore(tmp_path / "hub")
    store.create("models/org/tiny", private=True)
    (store.folder / "models" / "org" / "open").mkdir()
    (store.folder / "models" / "org" / "open" / "a.bin").write_bytes(bytes(range(100)))
    hub = LocalHub(store, "me", "secret")
    server = local_hub.start(hub, "127.0.0.1", 0)

    def ask(path, method="GET", body=None, **headers):
        url = f"http://127.0.0.1:{server.server_port}{path}"
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        request = urllib.request.Request(url, data=body, method=method, headers=named)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    yield hub, ask
    server.shutdown()
    server.server_close()


def test_parts_of_a_file_come_by_range(hub_at):
    _, ask = hub_at
    path = "/org/open/resolve/main/a.bin"
    assert ask(path, Range="bytes=90-") == (206, bytes(range(90, 100)))
    assert ask(path, Range="bytes=3-5") == (206, bytes(range(3, 6)))
    assert ask(path, Range="bytes=100-")[0] == 416
    assert ask("/org/open/resolve/other/a.bin")[0] == ask("/org/open/resolve/main/b.bin")[0] == 404


def test_what_only_the_owner_may_do_needs_the_token(hub_at):
    hub, ask = hub_at
    known = {"Authorization": "Bearer secret"}
    assert ask("/api/models/org/tiny")[0] == ask("/api/models/org/tiny", Authorization="Bearer other")[0] == 404
    assert ask("/api/models/org/tiny", **known)[0] == 200
    create = {"path": "/api/repos/create", "method": "POST", "body": b'{"name": "new"}'}
    assert ask(**create)[0] == 401
    assert ask(**create, **known)[0] == 200
    hub.is_writable = False
    assert ask(**create, **known)[0] == 403


def test_pages_of_other_sites_and_other_host_names_are_refused(hub_at):
    _, ask = hub_at
    assert ask("/org/open/resolve/main/a.bin", Origin="http://evil.example")[0] == 403
    assert ask("/org/open/resolve/main/a.bin", Host="evil.example:80")[0] == 403


def test_an_upload_needs_its_address_and_its_digest_and_a_commit_stays_in_its_folder(hub_at, tmp_path):
    hub, ask = hub_at
    oid = "0" * 64
    assert ask(f"/storage/{oid}", "PUT", b"x")[0] == 403
    assert ask(f"/storage/{oid}?{hub.signature(oid)}", "PUT", b"x")[0] == 400
    assert list(hub.store.objects.iterdir()) == []

    def commit(*items):
        lines = [{"key": "header", "value": {"summary": "s"}}, *items]
        body = "\n".join(map(json.dumps, lines)).encode()
        return ask("/api/models/org/tiny/commit/main", "POST", body, Authorization="Bearer secret")[0]

    for name in ("../outside", "/outside", "a/../../outside"):
        assert commit({"key": "file", "value": {"path": name, "content": "eA=="}}) == 400
    assert commit({"key": "lfsFile", "value": {"path": "m.bin", "oid": oid}}) == 400
    assert not list(tmp_path.rglob("outside"))
    assert commit({"key": "file", "value": {"path": "sub/a.txt", "content": "eA=="}}) == 200
    assert (hub.store.folder / "models/org/tiny/sub/a.txt").read_text() == "x"
    assert commit({"key": "deletedFolder", "value": {"path": "sub/"}}) == 200
    assert not (hub.store.folder / "models/org/tiny/sub").exists()
