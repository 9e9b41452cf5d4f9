import base64
import gzip
import json
import re

import numpy as np
import pytest

from steelyard import training
from steelyard.cli import main
from steelyard.cli.options import steps_in
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run, for_training
from steelyard.observe import pipeline_balance, report, run_cluster, spans
from steelyard.observe.report.timeline_data import choose, pack
from steelyard.planning import pipeline_sim
from steelyard.planning.pipeline_sim import Times
from steelyard.training.timeline import forget_after

STEP_NS = 10_000_000


def write_spans(run: Run, rank: int, rows: list[tuple]) -> None:
    """A rank's timeline from step, name, stage, micro-batch, start and end."""
    folder = run.path / "timeline"
    folder.mkdir(exist_ok=True)
    keys = ("step", "name", "stage", "micro_batch", "start_ns", "end_ns")
    text = "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
    (folder / f"rank-{rank:05d}.jsonl").write_text(text)


def piped(run: Run, steps: int = 3, stages: int = 2, micro_batches: int = 4, forward=(1e-3, 2e-3)) -> None:
    """The timetable of 1F1B with stages that take so long, as ranks would have written it."""
    times = Times(tuple(forward), tuple(2 * one for one in forward), (0.0,) * stages, (0.0,) * (stages - 1))
    events = pipeline_sim.events(times, "1f1b", stages, 1, micro_batches)
    for rank in range(stages):
        rows = []
        for step in range(1, steps + 1):
            begin = step * 100 * STEP_NS
            rows.append((step, "data", -1, -1, begin, begin + 1000))
            for at, kind, stage, micro_batch, start, end in events:
                if at == rank:
                    rows.append((step, kind, stage, micro_batch, begin + round(1e9 * start), begin + round(1e9 * end)))
        write_spans(run, rank, rows)


@pytest.fixture
def pipelined(in_workplace) -> Run:
    """A run of two stages whose second takes twice as long, without the training."""
    run = for_training(load_recipe("tiny.toml", ["parallel.pipeline=2", "train.global_batch=8", "train.micro_batch=2"]))
    run.update(world_size=2, device="cpu")
    piped(run)
    return run


def array(packed: dict, name: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed[name]), dtype)


def test_the_report_of_a_finished_run_is_one_file_that_needs_no_network(in_workplace):
    run = training.run(load_recipe("tiny.toml", ["log.timeline=[3, 5]"]))
    page = report.write(run).read_text()
    for part in ("Loss", "Throughput", "Recipe", "Validation perplexity", "finished", "sequence_length = 16"):
        assert part in page
    assert 'id="spans-0"' in page
    own = page[page.rindex("</script>") :] + page[: page.index("<script")]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=\s*[\"']?http", page)
    assert "http" not in own.replace("http-equiv", "")


def test_a_run_that_has_not_begun_has_a_report_too(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    page = report.render(run)
    assert "Nothing was recorded yet" in page
    assert "has no timeline" in page


def test_a_loss_of_preferences_has_no_perplexity(in_workplace):
    tuning = ["finetune.data=['talks.jsonl']", "train.init_from=nowhere"]
    pages = {}
    for name, words in {"answers": [], "preferences": ["finetune.dpo.beta=0.1"]}.items():
        run = for_training(load_recipe("tiny.toml", [*tuning, *words]), in_workplace.path / name)
        run.append({"step": 1, "loss": 0.69, "reward_margin": 0.1, "reward_accuracy": 0.5})
        run.append({"step": 1, "valid_loss": 0.69})
        pages[name] = report.render(run)
    assert "Validation perplexity" in pages["answers"]
    assert "nats per token" in pages["answers"]
    assert "Validation loss" in pages["preferences"]
    assert "perplexity" not in pages["preferences"]
    assert "nats per token" not in pages["preferences"]
    assert "margin of rewards" in pages["preferences"]


def test_hostile_text_stays_text(in_workplace):
    run = for_training(
        load_recipe("tiny.toml", ["description=<script>alert(1)</script>"]), in_workplace.path / "<b>&run"
    )
    run.update(host="<img src=x onerror=alert(1)>")
    (run.path / "logs" / "<i>node.err").write_text("</pre><script>alert(2)</script>\nhf_" + "a" * 30)
    write_spans(run, 0, [(1, "</script><script>alert(3)", 0, 0, 5, 9), (1, "forward", 0, 0, 9, 19)])
    page = report.render(run)
    for hostile in ("<script>alert", "<img src=x", "<i>node", "<b>&run", "hf_aaa"):
        assert hostile not in page
    assert "&lt;/pre&gt;&lt;script&gt;alert(2)" in page


def test_odd_records_torn_traces_and_passwords_in_addresses_spoil_no_report(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    run.update(versions=None, state="failed", error="no answer from https://me:hunter2hunter2@example.org/x")
    run.append({"step": 1, "loss": float("nan"), "tokens_per_second": None, "seconds": "x", "peak_memory": True})
    (run.path / "profile").mkdir()
    packed = bytearray(gzip.compress(b"{" * 4000 + bytes(range(256))))
    packed[20:40] = b"\xff" * 20
    (run.path / "profile" / "torch-rank-00000.json.gz").write_bytes(packed)
    (run.path / "profile" / "torch-rank-0-copy.json.gz").write_bytes(b"")
    write_spans(run, 0, [(1, "forward", 0, 0, 5, 1 << 70), (1, "forward", 0, 0, 9, 19)])
    with open(run.path / "timeline" / "rank-00000.jsonl", "a") as file:
        file.write('{"step": Infinity, "name": "forward", "stage": 0, "micro_batch": 0, "start_ns": 1, "end_ns": 2}\n')
    page = report.render(run)
    assert "hunter2" not in page
    assert page.count("Not read: torch-rank-0") == 2
    assert "2 lines of the timeline could not be read" in page


def test_what_a_machine_that_went_down_left_of_a_timeline_stops_no_resumed_run(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    write_spans(run, 0, [(1, "forward", 0, 0, 5, 9), (2, "forward", 0, 0, 9, 19)])
    path = run.path / "timeline" / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes() + b"\0\0\xff\0\n[]\n" + b'{"step": 1, "na')
    forget_after(path.parent, 1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


def test_several_runs_stand_side_by_side_and_what_differs_is_named(in_workplace, capsys):
    runs = [
        for_training(
            load_recipe("tiny.toml", [f"optim.learning_rate={rate}"]), in_workplace.path / "runs" / name / "run"
        )
        for rate, name in ((0.01, "one"), (0.02, "two"))
    ]
    for number, run in enumerate(runs):
        run.append({"step": 1, "loss": 2.0 + number, "tokens": 5, "tokens_per_second": 1.0, "seconds": 1.0})
    page = report.render(runs)
    assert "one/run" in page
    assert "two/run" in page
    assert "<td>optim.learning_rate</td><td>0.01</td><td>0.02</td>" in page
    assert "<td>Training loss</td><td>2.0000</td><td>3.0000</td>" in page
    assert page.count("<td>model.layers</td>") == 0
    with pytest.raises(SystemExit, match="0"):
        main(["report", *(str(run.path) for run in runs)])
    assert capsys.readouterr().out == "compare.html\n"


def test_what_ranks_did_is_read_with_its_torn_and_foreign_lines_counted(pipelined):
    path = pipelined.path / "timeline" / "rank-00001.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "name": "x"}\n{"step": 3, "na')
    found = spans.read(pipelined.path / "timeline")
    assert found.dropped == 2
    assert found.names == ["forward", "backward", "data"]
    assert list(found.steps) == [1, 2, 3]
    # Two stages: the second's four forwards take 2 ms each.
    forward, backward, _ = found.sums[0, 1] / 1e6
    assert (forward, backward) == (8.0, 16.0)


def test_a_packed_timeline_holds_every_span_of_its_whole_steps_and_the_sums_of_all(pipelined):
    found = spans.read(pipelined.path / "timeline")
    packed = pack(found, {0: 0, 1: 1}, requested=[2], most=40)
    assert packed["stages"] == [0, 1]
    assert packed["whole"] == [0, 1]  # 18 spans each: the one asked for, and the slowest that still fits
    index, start, length = array(packed, "index", "<u4"), array(packed, "start", "<u4"), array(packed, "span", "<u4")
    assert list(index) == [0, 9, 18, 27, 36]
    rank = found.ranks[1]
    here = rank.step == 2
    assert np.array_equal(start[27:36], rank.start[here] - 2 * 100 * STEP_NS)
    assert np.array_equal(length[27:36], (rank.end - rank.start)[here])
    sums = array(packed, "sums", "<f4").reshape(3, 2, len(packed["names"]))
    assert sums[2, 1, packed["names"].index("backward")] == 16.0


def test_steps_that_were_asked_for_and_the_slowest_are_carried_whole(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    rows = [(step, "forward", 0, 0, step * STEP_NS, step * STEP_NS + (900 if step == 37 else 100)) for step in
            range(1, 101)]  # fmt: skip
    write_spans(run, 0, rows)
    found = spans.read(run.path / "timeline")
    chosen = [int(found.steps[place]) for place in choose(found, requested=[55, 4000], most=10)]
    assert {37, 55} < set(chosen)
    assert len(chosen) == 10
    assert len(choose(found, [], 1000)) == 100


def test_a_step_longer_than_four_seconds_is_packed_in_coarser_ticks(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    write_spans(run, 0, [(1, "forward", 0, 0, 0, 10**10), (1, "backward", 0, 0, 10**10, 3 * 10**10)])
    packed = pack(spans.read(run.path / "timeline"), {0: 0})
    assert packed["tick"] == 7
    assert int(array(packed, "start", "<u4")[1]) * packed["tick"] == pytest.approx(10**10, rel=1e-8)


def test_the_bubble_is_that_of_the_timetable_and_the_slow_stage_is_seen(pipelined):
    found = spans.read(pipelined.path / "timeline")
    measured = pipeline_balance.measure(found, pipelined.recipe(), 2, run_cluster.of_run(pipelined))
    times = Times((1e-3, 2e-3), (2e-3, 4e-3), (0.0, 0.0), (0.0,))
    table = pipeline_sim.simulate(times, "1f1b", 2, 1, 4)
    expected = 1 - sum(table.busy) / 2 / table.makespan
    assert measured.bubble == pytest.approx(expected, rel=1e-6)
    assert measured.bubble_stages == pytest.approx(expected, rel=1e-6)
    assert measured.bubble_even < measured.bubble
    assert measured.imbalance == pytest.approx(1 / 3)
    assert [one.forward for one in measured.stages] == pytest.approx([1e-3, 2e-3])
    assert measured.predicted_seconds > 0
    assert 0 < measured.predicted_bubble < 1
    assert measured.why_no_prediction is None
    page = report.render(pipelined)
    assert f"{100 * expected:.1f}%" in page
    assert "33.3%" in page


def test_without_a_known_device_there_is_no_prediction_and_the_page_says_why(pipelined):
    pipelined.update(device="Weird Accelerator 9000")
    page = report.render(pipelined)
    assert "describe it with --cluster FILE" in page
    assert "NaN" not in page[page.rindex("</script>") :]


def test_steps_are_named_with_their_end_left_out():
    assert steps_in("10-12,500", "--steps") == [10, 11, 500]
    for wrong in ("", "12-10", "0-3", "a", "3-3", "1-", "1-999999999"):
        with pytest.raises(UserError, match="--steps"):
            steps_in(wrong, "--steps")


def test_devices_are_drawn_from_the_samples_of_each_host(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    for host, used in (("a1", 30), ("<b>a2", 90)):
        lines = [
            json.dumps({"time": 1000.0 + 5 * number, "devices": [{"utilisation": used, "temperature": 50}]})
            for number in range(3000)
        ]
        (run.path / "logs" / f"{host}.gpu").write_text("torn\n" + "\n".join([*lines, '{"time": 1']))
    page = report.render(run)
    assert "Utilisation" in page
    assert "Temperature" in page
    assert "Power" not in page  # Nobody measured it.
    assert "<b>a2" not in page
    assert len(page) < 6e6
