"""Studies that are killed, resumed, interrupted and shared, with commands that take no time."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.trial import TrialState

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.launch import launch_record, supervisor
from steelyard.tune import (
    best,
    local_workers,
    outcome,
    spec,
    storage,
    study_folder,
    submitted_trial,
    trial_history,
    worker_loop,
)
from steelyard.tune.study import Study, folder_of
from steelyard.tune.this_machine import named_gpus
from tests import preloaded
from tests.conftest import kill
from tests.tune.test_trial import is_alive

# Softmax regression by gradient descent on digits that are noisy copies of ten patterns: a real problem, in numpy.
TRAIN = """
import sys
import numpy as np

def train(rate, decay, batch):
    chance = np.random.default_rng(0)
    patterns = chance.normal(size=(10, 64))
    labels = chance.integers(10, size=1200)
    images = patterns[labels] + 2.5 * chance.normal(size=(1200, 64))
    weights, (held, held_labels) = np.zeros((64, 10)), (images[800:], labels[800:])
    for step in range(60):
        rows = chance.integers(800, size=batch)
        logits = images[rows] @ weights
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(batch), labels[rows]] -= 1
        weights -= rate * (images[rows].T @ shares / batch + decay * weights)
    logits = held @ weights
    top = logits.max(1, keepdims=True)
    return float((np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(400), held_labels]).mean())

if __name__ == "__main__":
    print("loss:", train(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
"""
SPACE = {"rate": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0], "decay": [0.0, 0.01, 0.1, 1.0], "batch": [4, 16, 64]}
TUNE = """
command = "{python} train.py {{rate}} {{decay}} {{batch}}"
[space]
{space}
[[objectives]]
name = "loss"
regex = 'loss: (.+)'
goal = "minimize"
[budget]
trials = {trials}
"""
# A known valley, with a pause that a killer can hit; it notes every run that it is asked for.
VALLEY = """
import os, sys, time
x, y = int(sys.argv[1]), int(sys.argv[2])
with open(sys.argv[3] + "/runs.txt", "a") as file:
    file.write(f"{x} {y} {os.getpid()}\\n")
time.sleep(float(os.environ.get("PAUSE", "0")))
print("value:", (x - 11) ** 2 + (y - 5) ** 2)
"""
VALLEY_TUNE = """
command = "{python} valley.py {{x}} {{y}} {folder}"
seed = 3
[space]
x = {{ low = 0, high = 20 }}
y = {{ low = 0, high = 20 }}
[[objectives]]
name = "value"
regex = 'value: (.+)'
goal = "minimize"
[budget]
trials = 8
"""


@pytest.fixture
def valley(tmp_path):
    (tmp_path / "valley.py").write_text(VALLEY)
    (tmp_path / "valley.toml").write_text(VALLEY_TUNE.format(python=sys.executable, folder=tmp_path))
    return tmp_path


def tune(folder, *words, **environment):
    command = [sys.executable, "-P", "-m", "steelyard", "tune", *words]
    return preloaded.Popen(
        command, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def done(process, code=0):
    out, errors = process.communicate(timeout=100)
    assert process.returncode == code, errors
    return out, errors


def runs(folder):
    """How many runs were begun."""
    file = folder / "runs.txt"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(folder, *outcomes):
    """Settings and values of the trials with these outcomes, in the order in which they ended."""
    _, study = study_folder.opened(folder)
    trials = [trial for trial in study.get_trials() if trial_history.result_of(trial) in outcomes]
    return [(trial.params, trial.values) for trial in sorted(trials, key=lambda trial: trial.datetime_complete)]


def finished(folder):
    """How many trials of a study have finished."""
    return len(ended(folder, outcome.FINISHED)) if (folder / study_folder.SETTINGS).exists() else 0


@pytest.mark.slow
def test_the_best_of_a_real_training_problem_is_found_within_twenty_trials(tmp_path, monkeypatch):
    """96 points, of which the best is known: all of them are trained here, which chance would find one time in five."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(TRAIN, "train.py", "exec"), names)
    losses = {
        (rate, decay, batch): names["train"](rate, decay, batch)
        for rate in SPACE["rate"]
        for decay in SPACE["decay"]
        for batch in SPACE["batch"]
    }
    space = "\n".join(f"{name} = {values}" for name, values in SPACE.items())
    (tmp_path / "tune.toml").write_text(TUNE.format(python=sys.executable, space=space, trials=20))
    found = worker_loop.search(spec.load("tune.toml"), Path("study"))
    best = found["best"][0]
    assert found["trials"] == 20
    assert best["values"]["loss"] == pytest.approx(min(losses.values()))
    assert losses[tuple(best["settings"].values())] == min(losses.values())
    assert f"{best['settings']['rate']}" in (tmp_path / "study" / "best.txt").read_text()


@pytest.mark.slow
def test_a_study_that_is_killed_again_and_again_ends_as_if_it_was_not(valley):
    done(tune(valley, "valley.toml", "--study", "undisturbed"))
    chance = random.Random(0)
    for _ in range(3):
        before = finished(valley / "killed")
        process = tune(valley, "valley.toml", "--study", "killed", PAUSE="0.3")
        # The first trial repeats the one that was killed; killed again, its point would be given up.
        wait_for(lambda before=before: finished(valley / "killed") > before)
        time.sleep(0.6 * chance.random())
        assert process.poll() is None
        kill(process)
        last = int((valley / "runs.txt").read_text().split()[-1])
        wait_for(lambda last=last: not is_alive(last), 15)  # Nobody is left to end it but its guard.
    done(tune(valley, "valley.toml", "--study", "killed"))
    assert ended(valley / "killed", outcome.FINISHED) == ended(valley / "undisturbed", outcome.FINISHED)
    assert len(ended(valley / "killed", outcome.FINISHED)) == 8
    again = done(tune(valley, "valley.toml", "--study", "killed", "--json"))[0]
    assert json.loads(again)["trials"] == 8


@pytest.mark.slow
def test_an_interruption_keeps_what_was_learned(valley):
    process = tune(valley, "valley.toml", "--study", "study", PAUSE="0.2")
    wait_for(lambda: runs(valley) >= 3)
    process.send_signal(signal.SIGINT)
    _, errors = done(process, 130)
    assert re.search(r"interrupted; \d+ trials? saved in study; the same command continues the study", errors)
    assert "Traceback" not in errors
    before = ended(valley / "study", outcome.FINISHED)
    assert len(before) >= 2
    assert ended(valley / "study", "running") == []
    done(tune(valley, "valley.toml", "--study", "study"))
    assert ended(valley / "study", outcome.FINISHED)[: len(before)] == before
    assert len(ended(valley / "study", outcome.FINISHED)) == 8
    assert len(ended(valley / "study", outcome.INTERRUPTED)) == 1


@pytest.mark.slow
def test_a_changed_space_is_refused_and_a_larger_budget_is_not(valley, monkeypatch):
    monkeypatch.chdir(valley)
    worker_loop.search(spec.load("valley.toml", {"budget.trials": 2}), Path("study"))
    assert worker_loop.search(spec.load("valley.toml", {"budget.trials": 3}), Path("study"))["trials"] == 3
    (valley / "valley.toml").write_text((valley / "valley.toml").read_text().replace("high = 20 }", "high = 30 }", 1))
    with pytest.raises(UserError, match=r"was started with other settings:\n  space\.x\.high: 20 -> 30\n"):
        worker_loop.search(spec.load("valley.toml"), Path("study"))


def test_a_secret_in_the_command_that_is_tuned_is_in_no_file_of_the_study(valley, monkeypatch):
    monkeypatch.chdir(valley)
    text = (valley / "valley.toml").read_text()
    text = text.replace(f' {valley}"', f' {valley} --password sesame --url http://me:sesame@host"')
    (valley / "valley.toml").write_text(text.replace("trials = 8", "trials = 1"))
    tuned = spec.load("valley.toml")
    worker_loop.search(tuned, Path("secret"))
    assert runs(valley) == 1
    assert not [file for file in Path("secret").rglob("*") if file.is_file() and b"sesame" in file.read_bytes()]
    assert worker_loop.search(tuned, Path("secret"))["trials"] == 1


def test_a_trial_whose_worker_died_elsewhere_is_given_up_after_a_while(valley, monkeypatch):
    monkeypatch.chdir(valley)
    loaded = spec.load("valley.toml")
    study = Study(loaded, storage.url_of(valley, None))
    asked = study.next()
    asked.set_user_attr("worker", {"host": "elsewhere", "process": 1, "began": "x"})
    monkeypatch.setattr("steelyard.tune.study.HEARTBEAT_TIMEOUT", 0.2)
    assert study.fail_the_lost() == []
    time.sleep(0.3)
    asked.set_user_attr("beat", 1)
    assert study.fail_the_lost() == []
    time.sleep(0.3)
    assert study.fail_the_lost() == [asked.number]
    again = study.next()
    assert again.params == asked.params
    again.set_user_attr("worker", trial_history.me() | {"began": "before"})
    assert study.fail_the_lost() == [again.number]
    assert study.next().params != asked.params  # Twice is enough: the point may be what kills its workers.


def test_two_workers_that_see_a_dead_one_at_the_same_time_queue_its_point_once(valley, monkeypatch):
    monkeypatch.chdir(valley)
    loaded = spec.load("valley.toml")
    one, other = (Study(loaded, storage.url_of(valley, None), worker) for worker in range(2))
    one.next().set_user_attr("worker", trial_history.me() | {"began": "before"})
    failed, threads = [], []

    def is_lost(trial):
        if not threads:
            threads.append(threading.Thread(target=lambda: failed.extend(other.fail_the_lost())))
            threads[0].start()
            threads[0].join(1.0)  # Without a lock it would be done by now.
        return True

    monkeypatch.setattr(one, "_is_lost", is_lost)
    assert one.fail_the_lost() == [0]
    threads[0].join(300)
    assert failed == []
    assert [trial.state.name for trial in one.trials()] == ["FAIL", "WAITING"]


def test_a_job_that_a_worker_follows_is_not_left_over_if_its_point_is_also_queued(valley, monkeypatch):
    monkeypatch.chdir(valley)
    study = Study(spec.load("valley.toml"), storage.url_of(valley, None))
    first = study.next()
    study.again(first, 0, takes_up=first.number)
    study.again(first, 0, takes_up=first.number)
    assert study.left_by_the_lost() == [first.number]
    first.set_user_attr("ended", {"outcome": "lost"})
    study.optuna.tell(first, state=TrialState.FAIL)
    assert study.next().user_attrs["takes_up"] == first.number
    assert study.left_by_the_lost() == []


def test_a_worker_that_others_took_for_dead_before_it_registered_takes_another_trial(valley, monkeypatch):
    monkeypatch.chdir(valley)
    monkeypatch.setattr("steelyard.tune.study.REGISTER_TIMEOUT", 0.1)
    slow, other = (Study(spec.load("valley.toml"), storage.url_of(valley, None), worker) for worker in range(2))
    other.file = None  # As with a database server: workers wait for each other only if the study is a file.
    me, failed = trial_history.me, []

    def slowly():
        if not failed:
            assert other.fail_the_lost() == []
            time.sleep(0.2)
            failed.extend(other.fail_the_lost())
        return me()

    monkeypatch.setattr(trial_history, "me", slowly)
    asked = slow.next()
    assert failed == [0]
    assert asked.number == 1
    assert asked.params == slow.trials()[0].params
    assert [trial.state.name for trial in slow.trials()] == ["FAIL", "RUNNING"]


def test_one_worker_at_a_time_takes_a_trial_from_the_queue_of_a_file(valley, monkeypatch):
    """In an SQLite file two of them could start the same one."""
    monkeypatch.chdir(valley)
    study = Study(spec.load("valley.toml"), storage.url_of(valley, None))
    with ThreadPoolExecutor(1) as pool:
        with files.locked(valley / "study.lock", wait=True):
            chosen = pool.submit(study.next)
            time.sleep(0.3)
            assert not study.trials()
        assert chosen.result(timeout=60).number == 0


@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_workers_that_choose_at_the_same_time_choose_different_points(valley, monkeypatch, sampler):
    monkeypatch.chdir(valley)
    tuned = spec.load("valley.toml", {"sampler": sampler})
    chosen = [Study(tuned, storage.url_of(valley, None), worker)._left() for worker in range(3)]
    assert all(first != second for first, second in itertools.combinations(chosen, 2))


def test_hours_count_only_while_trials_run():
    def at(first, last, result="finished"):
        state = SimpleNamespace(is_finished=lambda: last is not None, name="RUNNING")
        start, end = (
            None if minute is None else datetime(2026, 1, 1, 0, minute, tzinfo=UTC) for minute in (first, last)
        )
        # Optuna's own moments are those of a host elsewhere, hours away.
        reported = {"worker": {"since": start.isoformat()}, "ended": {"outcome": result, "at": end and end.isoformat()}}
        naive = datetime(2025, 12, 31, 19, first)
        return SimpleNamespace(state=state, user_attrs=reported, datetime_start=naive, datetime_complete=end and naive)

    trials = [at(0, 10), at(5, 15), at(6, 7), at(30, 31, "cut_short"), at(33, 40, "lost"), at(41, None)]
    assert trial_history.seconds_used(trials, datetime(2026, 1, 1, 0, 43, tzinfo=UTC)) == 60 * (15 + 1 + 2)


def test_workers_without_gpus_have_equal_shares_of_the_cores(monkeypatch):
    monkeypatch.setattr("steelyard.tune.local_workers.visible_gpus", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5, 6})
    assert [share.cores for share in local_workers.shares(2)] == [[0, 1], [4, 5]]
    assert [share.cores for share in local_workers.shares(6)] == [[0], [1], [4], [5], [6], [0]]


def test_workers_run_on_their_own_cores(monkeypatch, capfd):
    """What a worker starts runs there too, and whoever started the workers keeps all cores."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core cannot be shared out")
    show = "import os; os.write(1, f'cores {sorted(os.sched_getaffinity(0))}\\n'.encode())"  # a line at once
    monkeypatch.setattr("steelyard.tune.local_workers.steelyard", lambda *words: [sys.executable, "-c", show])
    monkeypatch.setattr("steelyard.tune.local_workers.visible_gpus", list)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    local_workers.run([], 2)
    lines = capfd.readouterr().err.splitlines()
    reported = [set(json.loads(line[len("cores ") :])) for line in lines if line.startswith("cores ")]
    assert [len(each) for each in reported] == [len(before) // 2] * 2
    assert not reported[0] & reported[1]
    assert os.sched_getaffinity(0) == before


def test_hidden_gpus_are_not_shared_out():
    assert named_gpus("0, 2,GPU-1a") == ["0", "2", "GPU-1a"]
    assert named_gpus("1,-1,0") == ["1"]
    assert named_gpus("-1") == named_gpus("") == []


def test_a_trial_that_the_hours_cut_short_is_tried_again_when_there_are_more(valley, monkeypatch):
    monkeypatch.chdir(valley)
    monkeypatch.setenv("PAUSE", "30")
    summary = worker_loop.search(spec.load("valley.toml", {"budget.hours": 0.6 / 3600}), Path("study"))
    assert (summary["trials"], summary["outcomes"]["cut_short"]) == (0, 1)
    monkeypatch.setenv("PAUSE", "0")
    worker_loop.search(spec.load("valley.toml", {"budget.trials": 1}), Path("study"))
    _, study = study_folder.opened(Path("study"))
    first, second = (trial.params for trial in study.get_trials())
    assert first == second


def test_a_study_whose_trials_all_crash_ends_and_says_why(valley, monkeypatch):
    monkeypatch.chdir(valley)
    (valley / "valley.py").write_text("raise ValueError('no such thing')")
    with pytest.raises(RuntimeFailure, match="first 3 trials all crashed, the last with: ValueError: no such thing"):
        worker_loop.search(spec.load("valley.toml"), Path("study"))


def test_a_study_of_one_trial_that_crashed_has_failed(valley, monkeypatch):
    monkeypatch.chdir(valley)
    (valley / "valley.py").write_text("raise ValueError('no such thing')")
    with pytest.raises(RuntimeFailure, match="the only trial crashed with: ValueError"):
        worker_loop.search(spec.load("valley.toml", {"budget.trials": 1}), Path("study"))


def test_a_study_that_only_crashed_begins_anew_with_what_was_mended(valley, monkeypatch):
    monkeypatch.chdir(valley)
    good = (valley / "valley.toml").read_text()
    (valley / "valley.toml").write_text(good.replace("value: (.+)", "valu.*"))
    with pytest.raises(RuntimeFailure, match=r"value matched 'value: \d+', which is not a number: put a group"):
        worker_loop.search(spec.load("valley.toml"), Path("study"))
    (valley / "valley.toml").write_text(good)
    assert worker_loop.search(spec.load("valley.toml", {"budget.trials": 2}), Path("study"))["outcomes"] == {
        "finished": 2
    }


def test_a_study_in_which_no_trial_ran_begins_anew_with_an_edited_file(valley, monkeypatch):
    monkeypatch.chdir(valley)
    good = (valley / "valley.toml").read_text()
    (valley / "valley.toml").write_text(good.replace("seed = 3", 'seed = 3\nconstraints = ["x > 100"]'))
    with pytest.raises(UserError, match="no point of the space can run"):
        worker_loop.search(spec.load("valley.toml"), Path("study"))
    (valley / "valley.toml").write_text(good.replace("high = 20", "high = 10"))
    assert worker_loop.search(spec.load("valley.toml", {"budget.trials": 1}), Path("study"))["outcomes"] == {
        "finished": 1
    }


def test_an_edited_file_is_refused_while_a_job_of_the_study_may_be_taken_up(valley, monkeypatch):
    monkeypatch.chdir(valley)
    folder = Path("study")
    folder.mkdir()
    study = Study(spec.load("valley.toml"), storage.url_of(folder, None))
    study.optuna.enqueue_trial({"x": 1, "y": 2}, user_attrs={"takes_up": 0})
    text = (valley / "valley.toml").read_text()
    (valley / "valley.toml").write_text(text.replace("high = 20", "high = 10"))
    with pytest.raises(UserError, match="was started with other settings"):
        Study(spec.load("valley.toml"), storage.url_of(folder, None))


def test_a_database_that_is_gone_is_told(valley, monkeypatch, capsys):
    monkeypatch.chdir(valley)
    worker_loop.search(spec.load("valley.toml", {"budget.trials": 1}), Path("study"))
    Path("study/study.db").unlink()
    with pytest.raises(UserError, match=r"study.db is missing\n  hint: each trial's trial.json still has"):
        study_folder.opened(Path("study"))
    assert not Path("study/study.db").exists()
    (valley / "valley.py").write_text(f"import os; os.unlink({str(valley / 'study/study.db')!r}); print('value: 1')")
    with pytest.raises(RuntimeFailure, match=r"study.db is missing"):
        worker_loop.search(spec.load("valley.toml", {"budget.trials": 1}), Path("study"))
    assert "study.db is missing: a new study starts" in capsys.readouterr().err


def test_what_is_beaten_later_leaves_the_frontier(tmp_path):
    (tmp_path / "two.toml").write_text(
        "command = 'true {x}'\nspace.x = [0, 1, 2]\n"
        + "".join(f"[[objectives]]\nregex = '{name}'\ngoal = 'minimize'\n" for name in "ab")
    )
    two = spec.load(tmp_path / "two.toml")
    state = SimpleNamespace(is_finished=lambda: True)
    trials = [
        SimpleNamespace(
            number=n, params={"x": n}, values=values, state=state, user_attrs={"ended": {"outcome": "finished"}}
        )
        for n, values in enumerate([(0, 3), (3, 2), (2, 1)])
    ]
    assert "no trial has finished" in best.as_text(best.write_best(two, [], tmp_path))
    best.write_best(two, trials[:2], tmp_path)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["trial-00000.txt", "trial-00001.txt"]
    best.write_best(two, trials, tmp_path)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["trial-00000.txt", "trial-00002.txt"]


def test_of_trials_that_are_equal_the_first_is_listed_and_the_others_are_counted(tmp_path):
    (tmp_path / "one.toml").write_text(
        "command = 'true {x}'\nspace.x = [0, 1, 2, 3]\n[[objectives]]\nregex = 'a'\ngoal = 'minimize'\n"
        "[[objectives]]\nregex = 'b'\ngoal = 'minimize'\n"
    )
    two = spec.load(tmp_path / "one.toml")
    state = SimpleNamespace(is_finished=lambda: True)
    trials = [
        SimpleNamespace(
            number=n, params={"x": n}, values=values, state=state, user_attrs={"ended": {"outcome": "finished"}}
        )
        for n, values in enumerate([(5, 5), (1, 2), (1, 2), (1, 2)])
    ]
    summary = best.write_best(two, trials, tmp_path)
    assert [(each["trial"], each["ties"]) for each in summary["best"]] == [(1, [2, 3])]
    assert "2 more tied: trials 2, 3" in best.as_text(summary)


@pytest.mark.slow
def test_several_objectives_bring_a_frontier(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(
        "import sys; x = int(sys.argv[1]); print('speed:', x % 5, 'memory:', x % 5 + x // 5)"
    )
    text = f"""
command = "{sys.executable} two.py {{x}}"
sampler = "grid"
space.x = {{ low = 0, high = 9 }}
[[objectives]]
name = "speed"
regex = 'speed: (\\d+)'
goal = "maximize"
[[objectives]]
name = "memory"
regex = 'memory: (\\d+)'
goal = "minimize"
"""
    (tmp_path / "two.toml").write_text(text)
    found = worker_loop.search(spec.load("two.toml"), Path("study"))
    assert found["trials"] == 10
    assert [each["settings"]["x"] for each in found["best"]] == [4, 3, 2, 1, 0]
    assert len(list((tmp_path / "study" / "best").iterdir())) == 5


def test_a_job_that_a_killed_tuner_left_is_cancelled_where_nobody_may_take_it_up(in_workplace, monkeypatch):
    """The study's hours are over: what still runs would run for nobody."""
    Path("jobs.toml").write_text('recipe = "tiny.toml"\nspace.train.seed = [1, 2]\nlaunch.on = "local"\n')
    loaded = spec.load("jobs.toml")
    folder = Path("study")
    folder.mkdir()
    lost = Study(loaded, storage.url_of(folder, None)).next()
    lost.set_user_attr("worker", trial_history.me() | {"began": "before"})
    run = folder_of(folder, lost.number) / "run"
    (run / "logs").mkdir(parents=True)
    process = supervisor.start(run, ["sleep", "600"])
    launch_record.write(
        run, launch_record.Launch("local", "x", [str(process["pid"])], ["sleep"], 1, 1, process=process)
    )
    assert submitted_trial.can_be_taken_up(run)
    monkeypatch.setattr(Study, "seconds_left", lambda study: 0.0)
    worker_loop.search(spec.load("jobs.toml", {"budget.hours": 1.0}), folder)
    assert not supervisor.is_alive(process)
    assert [each["state"] for each in launch_record.read_records(run)][-1] == "cancelled"
