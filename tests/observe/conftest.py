"""A served folder of runs, and a real browser: Debian's Chromium (tools/cluster_packages), driven by Playwright."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.observe import served_runs, web_server
from tests.observe.folders import Folder

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A run that can be given troubles."""
    return Folder(tmp_path / "run")


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
    # There is no scheduler to be asked.
    monkeypatch.setattr(served_runs.SchedulerPoll, "update", lambda self, state: None)
    with web_server.make_server(runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)
