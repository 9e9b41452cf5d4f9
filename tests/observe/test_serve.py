"""`steelyard serve`: who may ask for what, and what a browser makes of it."""

import json
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.observe import web_server
from tests.observe.folders import Folder

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A healthy run and one whose name and logs try to be more than text."""
    now = time.time()
    for name in ("good", f"evil {HOSTILE.replace('/', '')}"):
        folder = Folder(tmp_path / "runs" / name, now)
        folder.launch["backend"] = "none"
        if name != "good":
            folder.logs["n0.out"] = folder.logs["n0.err"] = f"ValueError: {HOSTILE}\n"
            folder.jobs[0]["reason"] = folder.hosts["n0"]["device"] = HOSTILE
            folder.hosts["n0"]["layout"]["schedule"] = HOSTILE
            folder.manifest["error"] = HOSTILE
        folder.write()
    return tmp_path / "runs"


@pytest.fixture
def address(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(web_server.Asking, "ask", lambda self, state: None)  # There is no scheduler to be asked.
    with web_server.make_server(runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


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
    monkeypatch.setattr(web_server.Asking, "ask", lambda self, state: None)
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
    monkeypatch.setattr(web_server.Asking, "ask", lambda self, state: asked.append(self.path))
    for name in (os.fsdecode(b"old-\xff"), "new"):
        folder = Folder(tmp_path / name, time.time())
        if name != "new":
            folder.jobs.append(folder.job("COMPLETED"))
            folder.manifest["state"] = "finished"
        folder.write()
    listed = web_server.Runs(tmp_path).listed()["runs"]
    assert {run["id"] for run in listed} == {"old-\ufffd", "new"}
    assert asked == [tmp_path / "new"]
    json.dumps(listed, ensure_ascii=False).encode()


def test_the_newest_run_stands_first_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web_server.Asking, "ask", lambda self, state: None)
    for name, age in (("a", 9000), ("b", 0), ("c", 5000)):
        Folder(tmp_path / name, time.time() - age).write()
    assert [run["id"] for run in web_server.Runs(tmp_path).listed()["runs"]] == ["b", "c", "a"]


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_run_is_found_among_many(address: str, runs: Path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    for number in range(20):
        Folder(runs / f"more-{number}", time.time()).write()
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.get_by_text("22 runs").wait_for(timeout=15000)
        page.get_by_role("searchbox").fill("MORE-1")
        page.get_by_text("11 runs").wait_for(timeout=15000)
        assert page.locator("tbody tr").count() == 11
        page.wait_for_timeout(2500)  # It has renewed itself.
        assert page.locator("tbody tr").count() == 11
        browser.close()


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
    monkeypatch.setattr(web_server, "SECONDS_LISTED", -1.0)
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


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_browser_shows_the_runs_without_a_complaint_and_hostile_text_stays_text(
    address: str, runs: Path, tmp_path: Path
):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        page.wait_for_selector("tbody tr")
        page.screenshot(path=str(tmp_path / "list.png"))
        assert page.locator("tbody tr").count() == 2
        page.get_by_role("link", name="evil").click()
        page.wait_for_selector(".verdict.wrong")
        page.screenshot(path=str(tmp_path / "evil.png"), full_page=True)
        assert page.locator("main img").count() == 0
        assert page.locator("main script").count() == 0
        assert page.title() != "owned"
        assert HOSTILE in page.locator("pre.err").first.inner_text()
        page.goto(f"{address}/#good")
        page.wait_for_selector(".verdict.ok")
        page.wait_for_selector("canvas")
        assert "300 of 1000" in page.locator(".facts").inner_text()
        page.screenshot(path=str(tmp_path / "good.png"), full_page=True)
        record = json.dumps(Folder(tmp_path / "more", time.time()).record(310, time=time.time())) + "\n"
        with open(runs / "good" / "metrics.jsonl", "a") as file:
            file.write(record)
        box = page.locator(".chart canvas").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 60, steps=3)
        page.mouse.up()
        zoomed = page.evaluate("kept.chart.view()")
        page.get_by_text("310 of 1000").wait_for(timeout=15000)  # Without a reload.
        assert page.evaluate("kept.chart.view()") == zoomed  # Whoever zoomed in stays there.
        assert page.evaluate("kept.chart.lines[0].x.at(-1)") == 310
        assert 10 < zoomed[0] < zoomed[1] < 300
        browser.close()
        assert said == []
