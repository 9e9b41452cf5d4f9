"""log.on_verdict: a command or a webhook that hears of each change once."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.observe.notify import Notifier
from steelyard.observe.run_view import view
from tests.observe.folders import RECIPE, Folder
from tests.observe.troubles import frozen, spike

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


def with_target(folder: Folder, target: object) -> None:
    value = json.dumps(target)
    (folder.path / "recipe.toml").write_text(RECIPE.replace("[log]", f"[log]\non_verdict = {value}"))


def look(folder: Folder, notifier: Notifier | None = None) -> None:
    state = folder.state()
    (notifier or Notifier(folder.path)).notify(state.recipe, view(state))


def heard(path: Path) -> list[tuple[str, str, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(each["before"], each["kind"], each["level"]) for each in map(json.loads, lines)]


def test_a_command_hears_of_each_change_once_whoever_watches(folder: Folder, tmp_path: Path):
    with_target(folder, [sys.executable, "-c", APPEND, str(tmp_path / "heard")])
    for _ in range(3):
        look(folder)
    spike(folder)
    look(folder)
    look(folder)
    frozen(folder)
    look(folder)
    assert heard(tmp_path / "heard") == [
        ("", "healthy", "ok"), ("healthy", "loss-spike", "warning"), ("loss-spike", "frozen", "wrong"),
    ]  # fmt: skip
    last = json.loads((tmp_path / "heard").read_text().splitlines()[-1])
    assert last["text"].startswith("run: wrong: stopped by a signal (SIGSTOP): rank 3")
    assert last["run"] == str(folder.path)
    assert last["what_to_do"].startswith("resume it")


def test_a_webhook_gets_the_same_object(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    bodies: list[dict] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("TEAM_WEBHOOK", f"http://127.0.0.1:{server.server_port}/hook")
        with_target(folder, "$TEAM_WEBHOOK")
        look(folder)
        look(folder)
    finally:
        server.shutdown()
        server.server_close()
    assert [(body["kind"], body["name"]) for body in bodies] == [("healthy", "run")]


def test_a_hook_that_fails_is_tried_three_times(folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = f"import sys; open({str(tmp_path / 'tries')!r}, 'a').write('x'); sys.exit('no')"
    with_target(folder, [sys.executable, "-c", script])
    notifier = Notifier(folder.path)
    for _ in range(6):
        look(folder, notifier)
    assert (tmp_path / "tries").read_text() == "xxx"
    assert "log.on_verdict failed: " in capfd.readouterr().err
    assert json.loads((folder.path / "verdict.json").read_text())["kind"] == "healthy"


def test_without_a_target_nothing_is_written(folder: Folder):
    look(folder)
    assert not (folder.path / "verdict.json").exists()


@pytest.mark.parametrize("target", ["./notify.sh", [], "ftp://x"])
def test_a_line_for_a_shell_is_refused(folder: Folder, target: object):
    with_target(folder, target)
    with pytest.raises(UserError, match="neither a command nor a webhook"):
        load_recipe(folder.path / "recipe.toml")
