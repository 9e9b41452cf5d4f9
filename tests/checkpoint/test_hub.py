import fcntl
import os
import subprocess

import pytest

from steelyard.checkpoint import hub as hubs
from steelyard.core.errors import RuntimeFailure, SteelyardError, UserError
from tests.hub import TOKEN, USER
from tests.hub import Fault as Trouble

NAME = "someone/small"
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 2000,
    "tokenizer.json": b"{}" * 15_000,
    "README.md": b"# a card\n",
}


@pytest.fixture
def stocked(hub):
    for name, content in MODEL.items():
        hub.add("models", NAME, name, content)
    return hub


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_pulled_model_is_what_lies_on_the_hub(stocked, tmp_path):
    result = hubs.pull(NAME, tmp_path / "deep" / "model")
    assert contents(tmp_path / "deep" / "model") == MODEL
    assert result["commit"] == stocked.model(NAME).sha


def test_a_second_pull_fetches_nothing_and_a_changed_file_alone(stocked, tmp_path):
    hubs.pull(NAME, tmp_path / "model")
    stocked.fetched.clear()
    assert hubs.pull(NAME, tmp_path / "model")["fetched"] == []
    stocked.add("models", NAME, "config.json", b'{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"other files with these names: config\.json"):
        hubs.pull(NAME, tmp_path / "model")
    assert hubs.pull(NAME, tmp_path / "model", overwrite=True)["fetched"] == ["config.json"]
    assert stocked.fetched == ["config.json"]


def test_only_one_kind_of_weights_is_pulled_and_nothing_that_is_no_model(stocked, tmp_path):
    others = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "model.gguf",
        "original/params.json",
        "run.py",
        "x.msgpack",
    ]
    for name in others:
        stocked.add("models", NAME, name, b"x")
    result = hubs.pull(NAME, tmp_path / "model")
    assert set(result["files"]) == set(MODEL)
    assert result["left_out"] == sorted(others)
    picked = hubs.pull(NAME, tmp_path / "picked", include=["*.gguf", "original/*"])
    assert picked["files"] == ["model.gguf", "original/params.json"]


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json", "consolidated.safetensors"], 2),
        (["pytorch_model.bin", "model.gguf"], 1),
        (["a.gguf", "b.gguf"], 2),
        (["adapter_model.safetensors", "optimizer.pt"], 1),
    ],
)
def test_the_weights_of_a_model_are_told_from_copies_of_them(names, weights):
    assert hubs.model_files(["config.json", *names]) == sorted(["config.json", *names[:weights]])


def test_a_connection_that_breaks_is_taken_up_where_it_broke(stocked, tmp_path):
    stocked.faults = [Trouble("GET .*model.safetensors", cut_after=100_000)]
    hubs.pull(NAME, tmp_path / "model")
    assert contents(tmp_path / "model") == MODEL
    assert stocked.ranges == ["model.safetensors from 100000"]


def test_a_pull_that_failed_goes_on_in_the_next_command(stocked, tmp_path):
    stocked.faults = [
        Trouble("GET .*model.safetensors", cut_after=100_000),
        Trouble("GET .*model.safetensors", status=500),
    ]
    with pytest.raises(RuntimeFailure, match="500") as caught:
        hubs.pull(NAME, tmp_path / "model")
    assert "run the same command again to resume" in caught.value.hint
    assert not (tmp_path / "model" / "model.safetensors").exists()
    stocked.ranges.clear()
    assert "model.safetensors" in hubs.pull(NAME, tmp_path / "model")["fetched"]
    assert stocked.ranges == ["model.safetensors from 100000"]
    assert contents(tmp_path / "model") == MODEL


def test_what_arrives_damaged_is_refused_and_fetched_anew(stocked, tmp_path):
    with pytest.raises(RuntimeFailure):
        stocked.faults = [
            Trouble("GET .*model.safetensors", cut_after=100_000),
            Trouble("GET .*model.safetensors", status=500),
        ]
        hubs.pull(NAME, tmp_path / "model")
    [part] = (tmp_path / "model").glob(".tmp-*model.safetensors")
    part.write_bytes(b"y" * part.stat().st_size)
    with pytest.raises(RuntimeFailure, match="does not match its digest"):
        hubs.pull(NAME, tmp_path / "model")
    hubs.pull(NAME, tmp_path / "model")
    assert contents(tmp_path / "model") == MODEL


def test_two_pulls_into_one_folder_do_not_mix(stocked, tmp_path):
    stocked.faults = [
        Trouble("GET .*model.safetensors", cut_after=100),
        Trouble("GET .*model.safetensors", status=500),
    ]
    with pytest.raises(RuntimeFailure):
        hubs.pull(NAME, tmp_path / "model")
    [part] = (tmp_path / "model").glob(".tmp-*model.safetensors")
    with open(part, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another command is downloading"):
            hubs.pull(NAME, tmp_path / "model")


@pytest.mark.parametrize("name", ["../outside.json", "/etc/outside.json", "a/../../outside.json"])
def test_a_name_that_leads_outside_of_the_folder_is_refused(stocked, tmp_path, name):
    stocked.add("models", NAME, name, b"x")
    with pytest.raises(RuntimeFailure, match="outside of its folder"):
        hubs.pull(NAME, tmp_path / "model", include=["*"])
    assert not (tmp_path / "model").exists()


def test_a_model_that_has_no_room_is_refused_before_it_comes(stocked, small_disk):
    with pytest.raises(RuntimeFailure, match="free, but needs"):
        stocked.add("models", NAME, "model.safetensors", b"x" * (3 << 20))
        hubs.pull(NAME, small_disk / "model")
    assert stocked.fetched == []


def test_a_disk_that_fills_up_keeps_what_has_come(stocked, small_disk, monkeypatch):
    stocked.add("models", NAME, "model.safetensors", os.urandom(3 << 20))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 40}))  # Filled meanwhile.
    with pytest.raises(RuntimeFailure, match="No space left on device"):
        hubs.pull(NAME, small_disk / "model")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    hubs.pull(NAME, small_disk / "model")
    assert contents(small_disk / "model") == stocked.model(NAME).files


@pytest.mark.parametrize(
    ("status", "kind", "reported"),
    [
        (401, UserError, "does not accept the token"),
        (403, UserError, "does not allow this"),
        (404, UserError, "is not on"),
        (429, RuntimeFailure, "429"),
        (500, RuntimeFailure, "the hub answered 500"),
    ],
)
def test_an_answer_of_the_hub_becomes_one_error_without_the_token(stocked, tmp_path, capsys, status, kind, reported):
    stocked.faults = [Trouble("GET /api/models", status=status, times=99)]
    with pytest.raises(kind, match=reported) as caught:
        hubs.pull(NAME, tmp_path / "model")
    assert TOKEN not in f"{caught.value!r} {caught.value} {capsys.readouterr()}"


def test_a_hub_that_is_not_there_is_one_error(stocked, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RuntimeFailure, match=r"the request to http://127\.0\.0\.1:9 failed"):
        hubs.pull(NAME, tmp_path / "model")


@pytest.mark.parametrize("name", ["a/b/c", "../x", "/etc/passwd", "", "a b", "a/b?x=1", "-x/y"])
def test_what_is_no_name_is_refused_without_asking(hub, tmp_path, name):
    with pytest.raises(UserError, match="not a valid model name on the hub"):
        hubs.pull(name, tmp_path / "model")
    assert hub.requests == []


def test_a_model_is_fetched_into_the_cache_once_and_found_there_offline(stocked, monkeypatch):
    from huggingface_hub import constants

    stocked.add("models", NAME, "pytorch_model.bin", b"x")
    folder = hubs.fetch(NAME)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL
    assert str(folder).startswith(constants.HF_HUB_CACHE)
    stocked.fetched.clear()
    assert hubs.fetch(NAME) == folder
    assert stocked.fetched == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hubs.fetch(NAME) == folder


def test_a_private_model_is_for_its_owner(stocked, tmp_path, monkeypatch):
    stocked.model(NAME).private = True
    hubs.pull(NAME, tmp_path / "mine")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "0" * 34)
    with pytest.raises(UserError, match="the token has no access"):
        hubs.pull(NAME, tmp_path / "theirs")


def test_a_token_is_kept_only_if_the_hub_knows_it_and_only_for_its_owner(hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="not logged in"):
        hubs.whoami()
    wrong = "hf_" + "Wrong" * 7
    with pytest.raises(UserError, match="does not accept") as caught:
        hubs.login(wrong)
    assert wrong not in f"{caught.value!r}"
    assert not (tmp_path / "hf-home" / "token").exists()
    assert hubs.login(TOKEN) == USER
    kept = tmp_path / "hf-home" / "token"
    assert kept.read_text() == TOKEN
    assert kept.stat().st_mode & 0o077 == 0
    assert hubs.whoami() == {"name": USER, "organizations": []}


@pytest.mark.parametrize("text", ["", "\n", "two words", "hf_\x00x", "hf_é"])
def test_what_is_no_token_is_not_repeated(tmp_path, text):
    (tmp_path / "token.txt").write_text(text)
    with pytest.raises(SteelyardError, match="this is not a token") as caught:
        hubs.read_token(tmp_path / "token.txt")
    assert not text.strip() or text.strip() not in str(caught.value)


def test_where_nothing_was_fetched_nothing_is_said_to_be_kept(stocked, monkeypatch):
    from huggingface_hub import constants

    stocked.faults = [Trouble("/api/models/", status=500, times=99)]
    with pytest.raises(RuntimeFailure) as reported:
        hubs.fetch(NAME)
    assert "kept" not in str(reported.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SteelyardError) as reported:
        hubs.fetch(NAME)
    assert "kept" not in str(reported.value)
