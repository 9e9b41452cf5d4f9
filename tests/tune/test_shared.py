"""Two workers and one PostgreSQL, which this test starts and ends."""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from steelyard.tune import outcome, study_folder, trial_history
from tests import preloaded
from tests.conftest import free_port

PROGRAMS = ("/usr/lib/postgresql/*/bin", "/usr/bin", "/usr/local/pgsql/bin")
SECRET = "pass-word-of-nobody"
SLOW = """
import os, sys, time
time.sleep(0.3)
print("value:", (int(sys.argv[1]) - 30) ** 2, os.environ.get("STEELYARD_TUNE_STORAGE"))
"""
TUNE = """
command = "{python} slow.py {{x}}"
[space]
x = {{ low = 0, high = 100 }}
[[objectives]]
name = "value"
regex = 'value: (\\d+)'
goal = "minimize"
[budget]
trials = 12
"""


def _program(name: str) -> Path | None:
    found = [path for place in PROGRAMS for path in Path("/").glob(f"{place[1:]}/{name}")]
    return found[-1] if found else None


@pytest.fixture(scope="module")
def database():
    """The address of an empty database of a server of our own."""
    initdb, postgres = _program("initdb"), _program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg")
    folder = Path(tempfile.mkdtemp(prefix="yard-postgres-"))  # Pytest's own folders are closed to other users.
    options = {}
    if os.geteuid() == 0:  # The server refuses to run as root.
        try:
            nobody = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        options = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    secret, data, port = folder / "secret", folder / "data", free_port()
    secret.write_text(SECRET)
    secret.chmod(0o644)
    words = [initdb, "-D", data, "-U", "tuner", "--auth=scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--no-sync"]
    subprocess.run(words, check=True, capture_output=True, timeout=600, cwd=folder, **options)
    settings = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-k", str(folder)]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen([postgres, "-D", data, *settings], stdout=log, stderr=log, cwd=folder, **options)
    address = f"postgresql://tuner:{SECRET}@127.0.0.1:{port}/postgres"
    try:
        _wait(address, server)
        yield address
    finally:
        server.send_signal(signal.SIGINT)  # Its fast way to end; at SIGTERM it waits for its clients.
        server.wait(30)
        shutil.rmtree(folder)


def _wait(address: str, server: subprocess.Popen) -> None:
    import psycopg

    for _ in range(200):
        assert server.poll() is None
        try:
            psycopg.connect(address, connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise AssertionError("PostgreSQL did not begin to answer")


def start(folder: Path, address: str, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", "steelyard", "tune", "slow.toml", *words]
    environment = os.environ | {"STEELYARD_TUNE_STORAGE": address}
    return preloaded.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_two_workers_share_a_study_on_postgresql(database, tmp_path):
    """Each with a folder of its own, as on two hosts; no trial is done twice, and none beyond the budget."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "slow.toml").write_text(TUNE.format(python=sys.executable))
    workers = [start(tmp_path, database, "--study", name, "--json") for name in ("here", "there")]
    reported = [worker.communicate(timeout=150) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], reported
    tune, study = study_folder.opened(tmp_path / "here", database)
    trials = study.get_trials()
    ran = trial_history.ran(trials)
    assert len(ran) == tune.budget.trials == 12
    assert len({trial.params["x"] for trial in ran}) == 12
    processes = {trial.user_attrs["worker"]["process"] for trial in ran}
    assert processes == {worker.pid for worker in workers}
    assert {trial_history.result_of(trial) for trial in ran} == {outcome.FINISHED}
    assert json.loads(reported[0][0])["trials"] >= 11
    for file in [*tmp_path.glob("*here/**/*"), *tmp_path.glob("there/**/*")]:
        assert not file.is_file() or SECRET not in file.read_text(errors="replace"), file
    assert SECRET not in "".join(out + errors for out, errors in reported)
    words = [sys.executable, "-P", "-m", "steelyard", "tune", "report", "here"]
    done = preloaded.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "whose password is not stored" in done.stderr
    shutil.rmtree(tmp_path / "there")


@pytest.mark.cluster
def test_a_database_that_does_not_answer_is_told_in_one_message(database, tmp_path):
    (tmp_path / "slow.toml").write_text(TUNE.format(python=sys.executable))
    worker = start(tmp_path, database.replace(SECRET, "wrong-password"))
    _, errors = worker.communicate(timeout=600)
    assert worker.returncode == 1
    assert errors.startswith("error: the study's database: ")
    assert "wrong-password" not in errors
    assert "Traceback" not in errors
