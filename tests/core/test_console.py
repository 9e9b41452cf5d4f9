"""Progress on terminals and in logs: no running task is silent."""

import io
import sys
import time

import pytest

from steelyard import cli
from steelyard.core import console as module
from steelyard.core.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal. Not a fixture: pytest's capture would replace it before the test begins."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    return sys.stderr


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any silence is too long."""
    monkeypatch.setattr(module, "SILENT_IN_LOG", 0.0)
    monkeypatch.setattr(module, "SILENT_ON_TERMINAL", 0.0)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOOKS", 0.01)


def printed_by_the_thread(stream, text: str) -> bool:
    deadline = time.monotonic() + 60
    while text not in stream() and time.monotonic() < deadline:
        time.sleep(0.01)
    return text in stream()


@pytest.mark.usefixtures("impatient")
def test_work_that_prints_nothing_is_reported_until_it_ends(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Console().working("tokenizer train"):
        assert printed_by_the_thread(log.getvalue, "tokenizer train: running for 0:0")


@pytest.mark.usefixtures("impatient")
def test_the_innermost_task_is_reported_with_what_it_has_done(capsys):
    console = Console()
    with console.working("eval ppl"), console.progress("perplexity", 200, "tokens", lines=False) as progress:
        progress.advance(50, note="window 3")
        assert printed_by_the_thread(everything(capsys), "perplexity 50/200  25%")
    assert not console._tasks


def everything(capsys):
    """A function that returns everything printed so far."""
    parts = []

    def read() -> str:
        parts.append(capsys.readouterr().err)
        return "".join(parts)

    return read


def test_a_task_of_unknown_length_says_how_far_it_is(capsys):
    console = Console()
    with console.progress("documents", 0, "documents") as progress:
        progress.advance(1500)
        assert progress.line().startswith("documents 1.50k  ")
    assert "left" not in progress.line()


@pytest.mark.parametrize("reason", ["quiet", "others print", "nothing runs"])
def test_nothing_is_reported_when_it_should_not(capsys, reason):
    console = Console()
    console.quiet = reason == "quiet"
    with console.working("train"):
        if reason == "others print":
            console.let_others_print()
        console._printed = -1e9
        if reason != "nothing runs":
            console.tick()
    if reason == "nothing runs":
        capsys.readouterr()
        console.tick()
    assert capsys.readouterr().err == ""


def test_a_recent_message_is_no_silence(capsys):
    console = Console()
    with console.working("train"):
        console.say("step 1")
        console.tick()
    assert capsys.readouterr().err == "step 1\n"


def test_a_task_within_another_has_a_bar_of_its_own_on_a_terminal(monkeypatch):
    screen, console = terminal(monkeypatch), Console()
    with console.progress("train", 100, "tokens") as outer:
        outer.advance(10)
        with console.progress("validation", 8, "samples") as inner:
            inner.advance(2)
            console._bar.refresh()
            assert [task.description for task in console._bar.tasks] == ["train", "validation"]
            assert [task.completed for task in console._bar.tasks] == [10, 2]
        assert [task.description for task in console._bar.tasks] == ["train"]
    assert "validation" in screen.getvalue()


def test_the_bar_of_a_slow_step_shows_the_elapsed_time(monkeypatch):
    screen = terminal(monkeypatch)
    with Console().progress("train", 100, "tokens") as progress:
        progress.bar.tasks[0].start_time -= 75
        progress.bar.refresh()
    assert "0:01:15" in screen.getvalue()


@pytest.mark.usefixtures("impatient")
def test_a_command_that_works_in_silence_says_that_it_runs(monkeypatch, capsys):
    said = []

    def app(words):
        return lambda **options: said.append(printed_by_the_thread(everything(capsys), "data merge: running for"))

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit):
        cli.main(["data", "merge", "a", "b", "c"])
    assert said == [True]


def test_only_commands_that_show_something_themselves_may_be_silent():
    silent = {name for name in cli.COMMANDS if not hasattr(cli._never_silent([name, "x"]), "gen")}
    assert silent == {"chat", "logs", "serve", "shell", "submit", "watch"}
