"""Files that others write, read by offset."""

import json
import os
from pathlib import Path

import pytest

from steelyard.observe import run_state as states
from steelyard.observe.error_scan import ErrorScan, clean, is_error
from steelyard.observe.run_state import RunState
from steelyard.observe.tail import CachedJson, Tail
from tests.observe.folders import NOW, Folder


def append(path: Path, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(text)


def test_each_look_gives_what_is_new_in_whole_lines(tmp_path: Path):
    path = tmp_path / "log"
    tail = Tail(path, 1000, 1000)
    assert tail.lines() == ([], False)
    append(path, b"one\ntw")
    assert tail.lines() == ([b"one"], True)
    append(path, b"o\nthree\n")
    assert tail.lines() == ([b"two", b"three"], False)
    assert tail.lines() == ([], False)


def test_of_a_file_met_for_the_first_time_only_the_end_is_read_and_no_half_line_is_told(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %04d\n" % number for number in range(1000)))
    tail = Tail(path, 25, 35)
    assert tail.lines() == ([b"line 0998", b"line 0999"], True)
    assert tail.gaps == [(0, 9980)]
    append(path, b"".join(b"line %04d\n" % number for number in range(1000, 1100)))
    assert tail.lines() == ([b"line 1097", b"line 1098", b"line 1099"], False)


def test_a_log_of_a_tebibyte_is_read_where_it_ends(tmp_path: Path):
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # Holes: nobody could read it whole within a test's time.
    append(path, b"\nlast\n")
    tail = Tail(path, 1000, 1000)
    assert tail.lines()[0] == [b"last"]
    os.truncate(path, 0)


def test_a_file_that_was_replaced_or_cut_is_met_anew(tmp_path: Path):
    path = tmp_path / "log"
    tail = Tail(path, 1000, 1000)
    append(path, b"one\ntwo\n")
    tail.lines()
    (tmp_path / "other").write_bytes(b"other, and longer\n")
    os.replace(tmp_path / "other", path)
    assert tail.lines() == ([b"other, and longer"], True)
    path.write_bytes(b"cut\n")
    assert tail.lines() == ([b"cut"], True)


def test_a_small_file_keeps_its_value_while_it_is_being_spoiled(tmp_path: Path):
    path = tmp_path / "run.json"
    small = CachedJson(path)
    assert small.read() == {}
    path.write_text('{"state": "running"}')
    assert small.read() == {"state": "running"}
    path.write_text('{"state": "runn')
    assert small.read() == {"state": "running"}
    path.unlink()
    assert small.read() == {}


def test_a_state_that_grew_with_the_run_is_the_one_that_met_it_late(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    folder.logs["n1.err"] = "ValueError: first\n" + "all is well\n" * 50
    final = {name: (folder.write() / name).read_bytes() for name in ("metrics.jsonl", "logs/n1.err", "logs/n1.gpu")}
    for name in final:
        (folder.path / name).write_bytes(b"")
    growing = RunState(folder.path).refresh(NOW)
    for share in range(1, 8):
        for name, whole in final.items():
            append(folder.path / name, whole[(share - 1) * len(whole) // 7 : share * len(whole) // 7])
        growing.refresh(NOW)
    late = RunState(folder.path).refresh(NOW)
    assert list(growing.metrics) == list(late.metrics) == folder.records
    assert growing.errors_of("n1") == late.errors_of("n1") == [(0, "ValueError: first")]
    assert growing.err["n1"].last(5) == late.err["n1"].last(5)
    assert list(growing.devices["n1"].samples) == list(late.devices["n1"].samples)


def test_records_that_a_resumed_run_took_back_are_forgotten(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    state = folder.state()
    kept = "".join(json.dumps(record) + "\n" for record in folder.records[:5])
    (folder.path / "new").write_text(kept)
    os.replace(folder.path / "new", folder.path / "metrics.jsonl")
    assert [record["step"] for record in state.refresh(NOW).metrics] == [10, 20, 30, 40, 50]


def test_many_hosts_share_what_a_look_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(states, "LEAST_ERRORS", 100)
    monkeypatch.setattr(states, "FIRST_ERRORS", 6400)
    monkeypatch.setattr(states, "MOST_EARLIER", 6400)
    folder = Folder(tmp_path / "run")
    folder.logs = {f"n{number}.err": "ValueError: early\n" + "x" * 98 + "\n" + "later\n" for number in range(64)}
    state = folder.state()
    assert all(log.tail.gaps for log in state.err.values())
    assert {log.last(1)[0] for log in state.err.values()} == {"later"}


def test_of_a_long_log_the_end_is_read_first_and_then_the_rest_from_the_beginning(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(states, "MOST_EARLIER", 0)  # Then it is no less than this:
    monkeypatch.setattr(states, "LEAST_ERRORS", 10_000)
    monkeypatch.setattr(states, "FIRST_OF_ONE", 10_000)
    filler = "UserWarning: the usual talk\n" * 1000
    trace = "Traceback (most recent call last):\n  File\nmine.Trouble: in the middle\n"
    folder = Folder(tmp_path / "run")
    folder.logs = {"n0.err": f"KeyError: of an earlier attempt\n{filler}{trace}{filler}ValueError: last\n"}
    whole = folder.logs["n0.err"]
    folder.hosts["n0"]["logged"] = len("KeyError: of an earlier attempt\n")
    state = folder.state()
    assert [text for _, text in state.errors_of("n0")] == ["ValueError: last"]
    looks = [state.unread("n0")]
    while looks[-1]:
        looks.append(state.refresh(NOW).unread("n0"))
        assert looks[-1] < looks[-2], looks
    assert len(looks) > 3
    assert state.errors_of("n0") == [
        (whole.index("mine.Trouble"), "mine.Trouble: in the middle"), (whole.index("ValueError"), "ValueError: last")
    ]  # fmt: skip
    assert RunState(folder.path).refresh(NOW).search(60).errors_of("n0") == state.errors_of("n0")
    (folder.path / "logs" / "n0.err").write_text("KeyError: another file\n")
    assert [text for _, text in state.refresh(NOW).errors_of("n0")] == ["KeyError: another file"]


ERRORS = [
    "ValueError: x",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "[rank3]: RuntimeError: CUDA error: device-side assert triggered",
    "[1,0]<stderr>:ValueError: from mpirun",
    "error: the data contains token id 99",
    "srun: error: n1: task 3: Killed",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0",
    "bash: line 1: steelyard: command not found",
    "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
    "OSError: [Errno 28] No space left on device",
    "Segmentation fault (core dumped)",
    "terminate called after throwing an instance of 'c10::Error'",
    "mpirun noticed that process rank 2 with PID 0 on node n1 exited on signal 9 (Killed).",
    "Fatal Python error: Segmentation fault",
    "/bin/sh: 1: nvidia-smi: not found: Permission denied",
]


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_an_error(line: str):
    assert is_error(line)
    found = ErrorScan()
    found.scan(f"all is well\n{line}\nstep 3\n".encode())
    assert len(found.found) == 1


def test_of_a_traceback_the_error_is_named_even_if_it_comes_in_pieces():
    found = ErrorScan()
    for piece in ("[rank1]: Traceback (most recent call last):\n", '[rank1]:   File "x.py"\n[rank1]:     f(x)\n',
                  "[rank1]: steelyard.core.errors.RuntimeFailure: the disk is gone\n", "step 4\n"):  # fmt: skip
        found.scan(piece.encode())
    assert [text for _, text in found.found] == ["steelyard.core.errors.RuntimeFailure: the disk is gone"]


def test_harmless_lines_are_no_errors():
    found = ErrorScan()
    found.scan((Path(__file__).parent / "harmless.txt").read_bytes())
    assert found.found == []


def test_a_line_can_do_nothing_to_a_terminal():
    assert clean(b"\x1b[2J\x1b]0;title\x07red\x1b[31m \x08ok\r\n") == "red ok"
    assert clean(b"10%\r50%\r100%") == "100%"
    assert clean("a\u202eb\x9b") == "ab"


def test_an_errors_place_in_the_file_is_known_however_it_is_read(tmp_path: Path):
    path = tmp_path / "log"
    tail, found = Tail(path, 60, 1000), ErrorScan()
    for piece in (b"x" * 100 + b"\nValueError: o", b"ne\nall is well\n", b"KeyError: two\n"):
        append(path, piece)
        chunk, _ = tail.chunk()
        found.scan(chunk, tail.begins)
    whole = path.read_bytes()
    assert [whole[at:].split(b"\n")[0].decode() for at, _ in found.found] == ["ValueError: one", "KeyError: two"]


def test_of_very_many_errors_the_first_and_the_last_are_kept():
    found = ErrorScan()
    for number in range(5000):
        found.scan(f"ValueError: {number}\n".encode(), number)
    kept = [text for _, text in found.found]
    assert (kept[0], kept[-1]) == ("ValueError: 0", "ValueError: 4999")
    assert len(kept) <= 1000
