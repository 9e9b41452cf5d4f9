"""Questions to the programs of a scheduler."""

from __future__ import annotations

import subprocess

SECONDS_TO_ANSWER = 30


def answer(command: list[str]) -> str:
    """What a program of Slurm's answers; nothing where it complains or is not there."""
    return ask(command)[0]


def ask(command: list[str]) -> tuple[str, str]:
    """What a program answers, and what it complains of; an answer with a complaint counts for nothing."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return (answer.stdout, "") if answer.returncode == 0 else ("", answer.stderr)
