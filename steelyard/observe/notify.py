"""`log.on_verdict`: calls a command or a webhook when the worst verdict on a run changes, once per change.

    on_verdict = ["./page-me.sh", "ops"]              # a command: its words, not a line for a shell
    on_verdict = "https://chat.example.org/hooks/1"   # a webhook: an HTTP POST
    on_verdict = "$TEAM_WEBHOOK"                      # a webhook whose URL, which may be a secret, is in a variable

Both get one JSON object, the command on standard input:

    {"run": "/data/runs/mine", "name": "mine", "kind": "lost-node", "level": "wrong", "message": ..., "what_to_do": ...,
     "before": "healthy", "time": 1700000000.0, "text": "mine: wrong: b2 does not answer since 12:03:07"}

`verdict.json` in the run folder has the last verdict that was reported, so that several watchers report a change once.
`verdicts.jsonl` has all of them, with the step: the live page and the report mark them in the curves.
Only the run's own node agent and `steelyard watch --notify` call it: to look at a run of somebody else must not start
what their recipe names.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.recipe import Recipe
from steelyard.core.safe_parse import read_object
from steelyard.observe.attempts import VERDICTS

REPORTED, LOCK = "verdict.json", "verdict.lock"
SECONDS_TO_ANSWER = 30.0
MOST_TRIES = 3


class Notifier:
    """Reports changes of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tries = 0
        self._failed: tuple[str, str] | None = None

    def notify(self, recipe: Recipe | None, seen: dict[str, Any]) -> None:
        """Report the worst verdict of a view, if it is another one than the last reported."""
        target = recipe.log.on_verdict if recipe is not None else None
        if not target:
            return
        verdict = seen["verdicts"][0]
        change = verdict["kind"], verdict["level"]
        with files.locked(self.path / LOCK, wait=True):
            before = read_object(self.path / REPORTED)
            if change == (before.get("kind"), before.get("level")):
                return
            self._tries = self._tries + 1 if change == self._failed else 1
            try:
                _send(target, seen, verdict, str(before.get("kind") or ""))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._failed = change
                console.warn(f"log.on_verdict failed: {error}")
                if self._tries < MOST_TRIES:
                    return
            known = verdict | {"time": seen["time"], "step": seen["progress"]["step"]}
            with open(self.path / VERDICTS, "a", encoding="utf-8") as history:
                history.write(json.dumps(known) + "\n")
            files.write_json(self.path / REPORTED, known)


def _send(target: str | list[str], seen: dict[str, Any], verdict: dict[str, str], before: str) -> None:
    reported = verdict | {"run": seen["path"], "name": seen["name"], "before": before, "time": seen["time"]}
    reported["text"] = f"{seen['name']}: {verdict['level']}: {verdict['message']}"
    body = json.dumps(reported).encode()
    if isinstance(target, list):
        done = subprocess.run(target, input=body, capture_output=True, timeout=SECONDS_TO_ANSWER)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise ValueError(f"{target[0]} ended with exit code {done.returncode}{f': {said[:300]}' if said else ''}")
        return
    url = os.environ.get(target[1:], "") if target.startswith("$") else target
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{target} is not the URL of a webhook")
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER):
        pass
