"""`steelyard serve`: who may ask for what, and what is answered."""

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.observe import log_search, served_runs, web_server
from tests.observe.folders import Folder


def get(address: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=150) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_all_runs_are_listed_and_each_can_be_read(address: str):
    listed = json.loads(get(f"{address}/api/runs")[1])["runs"]
    assert {run["verdict"]["kind"] for run in listed} == {"healthy", "errors"}
    one = json.loads(get(f"{address}/api/run?id=good")[1])
    assert one["progress"] == {"step": 300, "steps": 1000, "seconds_left": 700.0}
    assert one["hosts"][0]["devices"][0]["utilisation"] == 98


@pytest.mark.parametrize("asked", ["../elsewhere", "/etc", "good/logs", "good/../good", "", "..", "%2e%2e", "good%00"])
def test_nothing_but_the_runs_can_be_asked_for(address: str, runs: Path, asked: str):
    Folder(runs.parent / "elsewhere").write()
    assert get(f"{address}/api/run?id={asked}")[0] == 404
    assert get(f"{address}/{asked.lstrip('/') or 'x'}")[0] == 404


def test_another_hosts_name_is_refused(address: str):
    assert get(f"{address}/api/runs", Host="evil.example")[0] == 421
    assert get(f"{address}/api/runs", Host="localhost:1")[0] == 200


@pytest.mark.parametrize(
    ("host", "asked", "status"),
    [
        ("LocalHost", "localhost", 200),
        ("0.0.0.0", "10.1.2.3", 200),
        ("0.0.0.0", "localhost", 200),
        ("0.0.0.0", "evil.example", 421),
        ("0.0.0.0", "[", 421),
    ],
)
def test_a_foreign_name_is_refused_on_every_address_and_the_given_one_never(
    runs: Path, host: str, asked: str, status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served_runs.SchedulerPoll, "update", lambda self, state: None)
    with web_server.make_server(runs, host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        port = server.server_address[1]
        assert get(f"http://127.0.0.1:{port}/api/runs", Host=f"{asked}:{port}")[0] == status
        server.shutdown()
        thread.join(10)


def test_it_listens_on_ipv6_too_and_a_host_that_is_not_there_is_a_mistake(runs: Path):
    if socket.has_ipv6:
        web_server.make_server(runs, "::1").server_close()
    with pytest.raises(UserError) as caught:
        web_server.make_server(runs, "no-such-host.invalid")
    assert "--host" in str(caught.value.hint)


def test_runs_that_have_ended_are_not_asked_for_again_and_names_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    monkeypatch.setattr(served_runs.SchedulerPoll, "update", lambda self, state: asked.append(self.path))
    for name in (os.fsdecode(b"old-\xff"), "new"):
        folder = Folder(tmp_path / name, time.time())
        if name != "new":
            folder.jobs.append(folder.job("COMPLETED"))
            folder.manifest["state"] = "finished"
        folder.write()
    listed = served_runs.Runs(tmp_path).listed()["runs"]
    assert {run["id"] for run in listed} == {"old-\ufffd", "new"}
    assert asked == [tmp_path / "new"]
    json.dumps(listed, ensure_ascii=False).encode()


def test_the_newest_run_stands_first_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_runs.SchedulerPoll, "update", lambda self, state: None)
    for name, age in (("a", 9000), ("b", 0), ("c", 5000)):
        Folder(tmp_path / name, time.time() - age).write()
    assert [run["id"] for run in served_runs.Runs(tmp_path).listed()["runs"]] == ["b", "c", "a"]


def test_nothing_can_be_changed(address: str, runs: Path):
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        request = urllib.request.Request(f"{address}/api/run?id=good", data=b"{}", method=method)
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=150)
    get(f"{address}/api/runs")
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before


def test_a_run_that_appears_is_seen_and_one_that_cannot_be_read_hides_no_other(
    address: str, runs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served_runs, "SECONDS_LISTED", -1.0)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    (runs / "broken" / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "learning_rate": Infinity}\n')
    listed = json.loads(get(f"{address}/api/runs")[1])["runs"]
    assert {"broken", "good"} <= {run["id"] for run in listed}
    assert get(f"{address}/api/run?id=broken")[0] == 200


def test_a_port_that_is_taken_and_a_folder_that_is_not_there_are_mistakes(address: str, runs: Path):
    with pytest.raises(UserError, match="cannot listen"):
        web_server.make_server(runs, port=int(address.rpartition(":")[2]))
    with pytest.raises(UserError, match="there is no folder"):
        web_server.make_server(runs / "none")


def test_curves_come_with_their_axes_and_markers(address: str, runs: Path):
    (runs / "good" / "checkpoints" / "step-00000200").mkdir(parents=True)
    answer = json.loads(get(f"{address}/api/curves?id=good")[1])
    charts = {chart["title"]: chart for chart in answer["charts"]}
    assert charts["Loss"]["lines"][0]["x"][-1] == 300
    assert [line["label"] for line in charts["Utilisation"]["lines"]] == ["n0", "n1"]
    assert charts["Utilisation"]["limits"] == [0, 100]
    assert answer["axes"]["tokens"][-1] == 64 * 300
    assert [marker["step"] for marker in answer["markers"] if marker["kind"] == "checkpoint"] == [200]


def test_a_verdict_that_changes_while_somebody_looks_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served_runs.SchedulerPoll, "update", lambda self, state: None)
    for name in ("SECONDS_FRESH", "SECONDS_LISTED"):
        monkeypatch.setattr(served_runs, name, -1.0)
    folder = Folder(tmp_path / "run", time.time())
    folder.write()
    run = served_runs.Runs(tmp_path).found()["run"]
    assert run.view()["verdicts"][0]["kind"] == "healthy"
    assert run.curve_data()["markers"] == []
    (folder.path / "logs" / "n1.err").write_text("ValueError: no such thing\n")
    run.summary()
    marker = run.curve_data()["markers"][-1]
    assert (marker["kind"], marker["level"], marker["step"]) == ("verdict", "wrong", 300)
    assert "ValueError" in marker["text"]


def test_logs_are_searched_by_host_and_tell_no_secret(address: str, runs: Path):
    secret = "hf_" + "a" * 30
    (runs / "good" / "logs" / "n1.err").write_text(f"first\nToken {secret}\nTOKENS are counted\n")
    (runs / "good" / "logs" / "n0.err").write_text("token of another host\n")
    log = json.loads(get(f"{address}/api/logs?id=good&host=n1&find=token&stream=err")[1])["logs"][0]
    assert (log["found"], log["lines"][1]) == (2, "TOKENS are counted")
    assert secret not in str(log)
    assert json.loads(get(f"{address}/api/logs?id=good&host=n1&find={secret}")[1])["logs"][0]["lines"] == []
    for host in ("../n1", "n2", "", "logs/n1", "n1.err"):
        assert get(f"{address}/api/logs?id=good&host={host}")[0] == 404


def test_only_the_end_of_a_long_log_is_searched_and_the_answer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_search, "MOST_BYTES", 4096)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "n0.out").write_bytes(b"early needle\n" + b"hay\n" * 2000 + b"late needle\n")
    found = log_search.search(tmp_path, "n0", "NEEDLE")["logs"][0]
    assert found["lines"] == ["late needle"]
    assert found["searched"] < found["size"] == (tmp_path / "logs" / "n0.out").stat().st_size


def test_recipes_are_compared_key_by_key(address: str, runs: Path):
    path = runs / "good" / "recipe.toml"
    Folder(runs / "other", time.time()).write()
    path.write_text(path.read_text().replace("learning_rate = 1e-2", "learning_rate = 5e-3"))
    other = urllib.parse.urlencode([("id", "good"), ("id", "other")])
    assert json.loads(get(f"{address}/api/recipes?{other}")[1])["rows"] == [["optim.learning_rate", "0.005", "0.01"]]
    assert get(f"{address}/api/recipes?id=good&id=nowhere")[0] == 404
