"""The script for a lease that may end at any moment: what was measured is kept, and the rest goes on."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "owed_on_gpu.py"


@pytest.fixture(scope="module")
def owed():
    spec = importlib.util.spec_from_file_location("owed_on_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def step(owed, folder, name, program, limit=20):
    (folder / f"{name}.py").write_text(program)
    return owed.Step(name, [str(folder / f"{name}.py")], "docs/x.md", "1", limit, lambda lines: lines[0]["n"] > 1)


@pytest.mark.timeout(300)
def test_what_was_printed_is_kept_when_a_measurement_runs_out_of_time_or_fails(owed, tmp_path):
    late = step(owed, tmp_path, "late", "import time; print('{\"n\": 2}', flush=True); time.sleep(99)", limit=1)
    broken = step(owed, tmp_path, "broken", "print('{\"n\": 1}'); raise SystemExit(3)")
    fine = step(owed, tmp_path, "fine", "print('some words'); print('{\"n\": 1}')")
    record = owed.Record(tmp_path / "out.json", "steps")
    for each in (late, broken, fine):
        owed.take(each, record)
    found = {each["name"]: each for each in json.loads((tmp_path / "out.json").read_text())["steps"]}
    assert [found[name]["state"] for name in ("late", "broken", "fine")] == ["out of time", "failed: 3", "done"]
    assert [found[name]["lines"] for name in ("late", "broken", "fine")] == [[{"n": 2}], [{"n": 1}], [{"n": 1}]]
    assert [found[name]["reached"] for name in ("late", "fine")] == [True, False]
    silent = step(owed, tmp_path, "silent", "raise SystemExit(1)")
    owed.take(silent, record)
    assert record.state("silent") == "failed: 1"
    again = owed.Record(tmp_path / "out.json", "steps")
    assert [again.is_due(each.name, again=False) for each in (late, broken, fine)] == [False, False, False]
    assert [again.is_due(each.name, again=True) for each in (late, broken, fine)] == [True, True, False]
    made = replace(fine, makes=tmp_path / "made.bin")
    assert owed.is_due(made, again, again=False), "another machine has not what this step makes"
    made.makes.touch()
    assert not owed.is_due(made, owed.Record(tmp_path / "other.json", "steps"), again=False)
    owed.put(again, fine, state="running")  # as a kill in the midst of it leaves it
    assert owed.Record(tmp_path / "out.json", "steps").is_due(fine.name, again=False)
    assert "out of time" in owed.table(again)
