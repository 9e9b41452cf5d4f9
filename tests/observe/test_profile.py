import gzip
import json
import os
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

from steelyard import training
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run, for_training
from steelyard.observe import report
from steelyard.observe.profile import nsight, nsight_tools, profile_run, trace, trace_cache
from steelyard.observe.profile.events import Stretch, both, gaps, length, own_time, union
from steelyard.observe.profile.summary import reported
from steelyard.observe.profile.trace_analysis import analyze
from steelyard.training.profiler import refuse_absent

# One step of 1000 us as a GPU's trace would have it. Computation 0-300 and 400-700, a sum of gradients 600-800, a copy
# 900-950; the host waits 700-900. So busy is 300 + 400 + 50, communication 200, of which 100 beside computation.
KERNELS = [("gemm", 0, 200), ("gemm", 200, 300), ("softmax", 400, 700), ("ncclDevKernel_AllReduce_Sum", 600, 800)]
COPIES = [("Memcpy HtoD", 900, 950)]
CALLS = [("cudaLaunchKernel", 0, 10), ("cudaStreamSynchronize", 700, 900), ("cudaDeviceSynchronize", 1500, 1600)]
OPS = [("aten::_foreach_add_", 690, 910), ("aten::item", 695, 905)]
RANGES = [("step 10", 0, 1000), ("data", 0, 50), ("forward 0", 50, 650), ("optimizer", 650, 1000)]


def gpu_trace(path: Path) -> Path:
    categories = {
        "kernel": KERNELS, "gpu_memcpy": COPIES, "cuda_runtime": CALLS, "user_annotation": RANGES, "cpu_op": OPS,
    }  # fmt: skip
    entries = [
        {"ph": "X", "cat": category, "name": name, "ts": 5e9 + start, "dur": end - start, "tid": 1}
        for category, rows in categories.items()
        for name, start, end in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*entries, {"ph": "M", "name": "process_name"}]}, file)
    return path


def gpu_database(path: Path) -> Path:
    """The same as nsys exports it: names in a table of their own, nanoseconds."""
    database = sqlite3.connect(path)
    names: dict[str, int] = {}
    database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (demangledName INTEGER, start INTEGER, end INTEGER)")
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (copyKind INTEGER, start INTEGER, end INTEGER)")
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (nameId INTEGER, start INTEGER, end INTEGER)")
    database.execute("CREATE TABLE NVTX_EVENTS (text TEXT, textId INTEGER, start INTEGER, end INTEGER)")

    def number(name: str) -> int:
        return names.setdefault(name, len(names) + 100)

    for table, rows in (("KERNEL", KERNELS), ("RUNTIME", CALLS)):
        for name, start, end in rows:
            values = (number(name), 1000 * start, 1000 * end)
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES (?, ?, ?)", values)  # noqa: S608
    for _, start, end in COPIES:
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, ?, ?)", (1000 * start, 1000 * end))
    for place, (name, start, end) in enumerate([*RANGES, ("somebody else's", 0, 10**6), ("mark", 5, None)]):
        text = (name, None) if place % 2 else (None, number(name))
        stop = None if end is None else 1000 * end
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", (*text, 1000 * start, stop))
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(value, name) for name, value in names.items()])
    database.commit()
    database.close()
    return path


def test_intervals_are_joined_met_and_left_open_exactly():
    def rows(*pairs):
        return union(Stretch("", *pair) for pair in pairs)

    joined = rows((5, 7), (0, 2), (1, 3), (6, 6.5), (7, 8))
    assert joined.tolist() == [[0, 3], [5, 8]]
    assert length(joined) == 6
    assert both(joined, rows((2, 6), (7.5, 20))) == 1 + 1 + 0.5
    assert gaps(joined, -1, 9).tolist() == [[-1, 0], [3, 5], [8, 9]]
    assert gaps(rows(), 0, 4).tolist() == [[0, 4]]
    nested = [Stretch("outer", 0, 10), Stretch("inner", 1, 4), Stretch("deep", 2, 3), Stretch("inner", 5, 6)]
    assert own_time(nested) == [("outer", 6), ("inner", 2), ("deep", 1), ("inner", 1)]


@pytest.mark.parametrize("source", ["torch", "nsys"])
def test_a_gpu_s_time_is_told_apart_to_the_microsecond(tmp_path, source):
    events = (
        trace.read(gpu_trace(tmp_path / "a.json.gz")) if source == "torch" else
        nsight.read_nsys(gpu_database(tmp_path / "a.sqlite"))
    )  # fmt: skip
    seen = analyze(events, 3, source)
    assert (seen.device, seen.steps, seen.rank) == ("gpu", 1, 3)
    expected = {"seconds": 1000, "busy": 750, "idle": 250, "communication": 200, "overlapped": 100, "copies": 50,
                "waiting": 200}  # fmt: skip
    for name, microseconds in expected.items():
        assert 1e6 * getattr(seen, name) == pytest.approx(microseconds, abs=1e-3), name
    assert [(each.name, each.count) for each in seen.kernels] == [
        ("gemm", 2), ("softmax", 1), ("ncclDevKernel_AllReduce_Sum", 1),
    ]  # fmt: skip
    assert [each.name for each in seen.waits] == ["cudaStreamSynchronize"]  # The other is after the step.
    assert {name: round(1e6 * each) for name, each in seen.idle_by_part.items()} == {"optimizer": 150, "forward": 100}
    assert [(part, round(1e6 * each), doing) for part, each, doing in seen.longest_gaps] == [
        ("forward", 100, ""), ("optimizer", 100, "cudaStreamSynchronize"), ("optimizer", 50, ""),
    ]  # fmt: skip
    words = "\n".join(reported([seen]))
    assert "was busy 75.0% of it and idle 0.25 ms (25.0%), mostly during optimizer 0.15 ms" in words
    assert "50.0% of that overlapped with compute" in words
    asker = "by aten::_foreach_add_ in optimizer" if source == "torch" else "in optimizer"  # nsys sees no operators.
    assert f"mostly in cudaStreamSynchronize (1 calls, 0.20 ms), mostly called {asker}." in words
    assert "reads a value from the GPU" in words


def test_kernels_that_ncu_measured_are_summed_up_with_what_bounds_them():
    columns = ["ID", "Kernel Name", nsight.DURATION, *nsight.SPEEDS.values()]
    kernels = [
        ("void at::native::gemm<4, at::Half>(int, T2)", "1,200.5", "20", "90"),
        ("void at::native::gemm<4, at::Half>(int, T2)", "10", "20", "90"),
        ("add", "4", "80.5", "1.5"),
        ("add", "12", "60.5", "1.5"),
        *((f"small {number}", "1", "3", "4") for number in range(30)),
    ]
    rows = [columns, ["", "", "usecond", "%", "%"], *([str(number), *each] for number, each in enumerate(kernels))]
    text = "==PROF== Connected\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)
    seen = nsight.kernels_of(text, 0)
    assert [(each.name[:3], each.count, round(1e6 * each.amount, 1)) for each in seen.kernels[1:3]] == [
        ("add", 2, 16.0), ("sma", 1, 1.0),
    ]  # fmt: skip
    assert sum(each.count for each in seen.kernels) == 34
    assert seen.kernels[-1].name == "7 more"
    words = reported([seen])
    assert words[:4] == [
        "Rank 0: ncu measured 34 kernels, each alone: 1.26 ms in total.",
        "  gemm<4, Half>: 1.21 ms in 2, memory at 20% of peak, compute at 90%: bound by compute.",
        "  add: 0.02 ms in 2, memory at 66% of peak, compute at 2%: bound by memory.",
        "  small 0: 0.00 ms in 1, memory at 3% of peak, compute at 4%: bound by neither; it may be too small, "
        "or bound by latency.",
    ]
    assert nsight.kernels_of("", 0).kernels == []


def test_steps_under_torch_s_profiler_leave_a_trace_that_is_read_into_the_report(in_workplace):
    recipe = profile_run.asked_for(load_recipe("tiny.toml"), "memory", [3, 4], [])
    run = training.run(recipe)
    assert run.path.name == "tiny-profile"
    assert [record["step"] for record in run.metrics() if "loss" in record] == [1, 2, 3, 4]
    assert list(run.checkpoints.iterdir()) == []
    assert run.state == "finished"
    [seen], problems = trace_cache.read(run)
    assert problems == []
    assert (seen.device, seen.steps, seen.tool) == ("cpu", 2, "memory")
    assert 0 < seen.busy < seen.seconds
    assert any(each.name == "aten::mm" for each in seen.kernels)
    assert {"forward", "backward", "optimizer", "data"} <= seen.idle_by_part.keys()
    assert seen.peak_bytes > 61_700 * 4  # The weights alone.
    page = report.render(run)
    assert "Rank 0: 2 steps" in page
    assert "aten::mm" in page
    assert 'id="spans-0"' in page


def test_traces_are_read_once_and_again_when_they_change(in_workplace, monkeypatch):
    run = for_training(load_recipe("tiny.toml"))
    path = gpu_trace(nsight_tools.trace(run.path / nsight_tools.PROFILE, "torch", 0))
    first, _ = trace_cache.read(run)
    with monkeypatch.context() as patched:
        patched.setattr(trace_cache, "_read", lambda *_: pytest.fail("it was read again"))
        assert trace_cache.read(run)[0] == first
    path.write_bytes(b"not a trace")
    looks, [problem] = trace_cache.read(run)
    assert looks == []
    assert problem.startswith("torch-rank-00000.json.gz")
    assert "Not read: torch-rank-00000.json.gz" in report.render(run)


def test_a_hostile_kernel_name_stays_text(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    path = nsight_tools.trace(run.path / nsight_tools.PROFILE, "torch", 0)
    path.parent.mkdir()
    event = {"ph": "X", "cat": "kernel", "name": "<img src=x onerror=alert(1)>", "ts": 1, "dur": 5}
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    page = report.render(run)
    assert "<img" not in page
    assert "&lt;img src=x" in page


def test_a_rank_starts_itself_under_nsight_only_where_it_is_meant(in_workplace, monkeypatch):
    program = in_workplace.path / "nsys"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(in_workplace.path))
    started = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "steelyard", "train", "a b.toml"])
    recipe = profile_run.asked_for(load_recipe("tiny.toml", ["train.device=cuda"]), "nsys", [10, 11], [0, 4])
    run = profile_run.prepare(recipe, None)
    nsight_tools.go_under(recipe, run.path, 1)
    assert started == []
    nsight_tools.go_under(recipe, run.path, 4)
    [(name, words, environment)] = started
    assert name == str(program)
    assert words[1:8] == ["profile", "-s", "none", "-t", "nvtx,cuda", "--capture-range=cudaProfilerApi",
                          "--capture-range-end=stop"]  # fmt: skip
    assert words[-5:] == [sys.executable, "-m", "steelyard", "train", "a b.toml"]
    assert words[words.index("-o") + 1] == str((run.path / "profile" / "nsys-rank-00004").resolve())
    monkeypatch.setenv(nsight_tools.UNDER, environment[nsight_tools.UNDER])
    nsight_tools.go_under(recipe, run.path, 4)
    assert len(started) == 1
    monkeypatch.delenv(nsight_tools.UNDER)
    with pytest.raises(UserError, match="steelyard profile starts"):
        nsight_tools.go_under(recipe, in_workplace.path, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "12-10"], "12-10 is not a range of steps"),
        (["--steps", "3,7"], "must be consecutive"),
        (["--ranks", "0,1"], "there is no rank 1; the run has 1"),
        (["--ranks", "zero"], "is not a list of ranks"),
        (["--tool", "nsys"], "nsys is not installed here"),
        (["--tool", "ncu"], "ncu is not installed here"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused_before_anything_is_written(
    in_workplace, monkeypatch, capsys, words, said
):
    from steelyard.cli import main

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit) as ended:
        main(["profile", "tiny.toml", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_without_a_profile_says_how_to_make_one(in_workplace):
    with pytest.raises(UserError, match="has no profile"):
        profile_run.seen(for_training(load_recipe("tiny.toml")))


@pytest.mark.slow
def test_two_ranks_are_profiled_by_the_command_and_one_of_them_under_nsight(workplace):
    layout = ("parallel.pipeline=2", "train.global_batch=8")
    done = workplace.steelyard("profile", "tiny.toml", *layout, "--steps", "3-5", "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [one["rank"] for one in result["ranks"]] == [0, 1]
    assert all(one["steps"] == 2 and one["communication"] > 0 for one in result["ranks"])
    assert "Profile" in Path(workplace.path / result["report"]).read_text()
    assert (
        json.loads(workplace.steelyard("profile", "show", result["run"], "--json").stdout)["words"] == result["words"]
    )
    # A program that stands in for nsys: it notes that it was there and runs what it was given.
    fake = workplace.path / "bin" / "nsys"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho raw > "$2.qdstrm"; shift 2\nexec "$@"\n')
    fake.chmod(0o755)
    path = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    done = workplace.steelyard("profile", "tiny.toml", *layout, "--steps", "3-4", "--nproc", "2", "--tool", "nsys",
                               "--ranks", "1", env=path)  # fmt: skip
    run = Run.open(workplace.path / "runs" / "tiny-profile-2")
    assert run.state == "finished"
    assert sorted(each.name for each in (run.path / "profile").iterdir()) == ["nsys-rank-00001.qdstrm", "summary.json"]
    assert "importer is missing" in done.stdout
    assert done.returncode == 1


def test_steps_that_are_not_taken_are_refused_before_the_run(in_workplace):
    recipe = load_recipe("tiny.toml", ["log.profile=[15, 30]", "log.profile_tool=torch"])
    with pytest.raises(UserError, match="the run ends at step 20"):
        refuse_absent(recipe, 1)


def test_a_run_that_is_stopped_inside_the_steps_to_profile_leaves_those_it_took(in_workplace, capsys):
    run = training.run(
        load_recipe("tiny.toml", ["log.profile=[1, 20]", "log.profile_tool=torch", "train.max_hours=1e-9"])
    )
    assert "the trace holds the steps up to here" in capsys.readouterr().err
    [seen], problems = trace_cache.read(run)
    assert (seen.steps, problems) == (1, [])
