"""The live page as a browser shows it, on a wide screen and on a phone, light and dark."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard.core.run import Run
from tests.observe.conftest import HOSTILE
from tests.observe.folders import Folder
from tests.observe.test_report import piped

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WIDE, PHONE = 1400, 400
PATIENCE = 60_000  # ms


@pytest.fixture
def tab(browser):
    """Opens a tab of a width; at the end of the test nothing may have complained."""
    said: list[str] = []
    contexts = []

    def open_(address: str, width: int = WIDE, scheme: str = "light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []


def grow(folder: Path, step: int) -> None:
    """Add a record to a run, as a training step does."""
    record = Folder(folder.parent / f"unused-{step}", time.time()).record(step, time=time.time())
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def drag(page, title: str, first: float, last: float) -> None:
    """Drag over a chart, from one share of its width to another."""
    canvas = page.locator(".charts > div", has=page.locator("h3", has_text=title)).locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    left, width = box["x"] + 54, box["width"] - 68
    page.mouse.move(left + first * width, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(left + last * width, box["y"] + 60, steps=3)
    page.mouse.up()


def curve(title: str, what: str) -> str:
    return f"runPage.curves.chart('{title}').{what}"


def overflow(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def test_a_live_run_keeps_zoom_axis_smoothing_and_scale_while_it_grows(address: str, runs: Path, tab: Callable):
    page = tab(f"{address}/#good")
    page.wait_for_selector(".charts canvas")
    page.locator(".curves input[type=range]").fill("0.6")
    page.get_by_role("button", name="tokens", exact=True).click()
    page.locator(".charts > div", has_text="Loss").get_by_role("button", name="log scale").click()
    drag(page, "Loss", 0.3, 0.7)
    zoomed = page.evaluate(curve("Loss", "view()"))
    assert 64 * 10 < zoomed[0] < zoomed[1] < 64 * 300
    assert page.evaluate(curve("Throughput", "view()")) == zoomed
    assert page.evaluate(curve("Utilisation", "view()")) == zoomed
    grow(runs / "good", 310)
    page.get_by_text("310 of 1000").wait_for()  # without a reload
    page.wait_for_function(curve("Loss", f"lines[0].x.at(-1) === {64 * 310}"))
    assert page.evaluate(curve("Loss", "view()")) == zoomed
    assert page.evaluate(curve("Loss", "isLog()"))
    assert page.evaluate("runPage.curves.axis()") == "tokens"
    assert page.locator(".curves output").inner_text() == "0.6"
    assert page.evaluate("runPage.curves.group.smoothed(runPage.curves.chart('Loss').lines[0]).length") == 31
    page.get_by_role("button", name="show all").click()
    assert page.evaluate(curve("Loss", "view()"))[1] == 64 * 310


def test_the_zoom_follows_to_another_axis_and_every_required_curve_is_there(address: str, tab: Callable):
    page = tab(f"{address}/#good")
    page.wait_for_selector(".charts canvas")
    titles = set(page.locator(".charts h3").all_inner_texts())
    assert titles >= {"Loss", "Throughput", "Gradient norm", "Learning rate", "Utilisation", "Temperature", "Power"}
    low, high = page.evaluate(curve("Utilisation", "range()"))
    assert (low, high) == (0, 100)
    drag(page, "Loss", 0.5, 0.9)
    first, last = page.evaluate(curve("Loss", "view()"))
    page.get_by_role("button", name="time", exact=True).click()
    begin, end = page.evaluate(curve("Loss", "view()"))
    assert end - begin == pytest.approx(last - first, rel=0.05)  # A step of this run takes a second.
    page.get_by_role("button", name="step", exact=True).click()
    assert page.evaluate(curve("Loss", "view()")) == pytest.approx([first, last], abs=1)


def test_attempts_and_markers_tell_what_happened(address: str, runs: Path, tab: Callable):
    now = time.time()
    attempts = [
        {"time": now - 400 + 100 * number, "step": 150 * number, "repeated": 7 * number, "hosts": ["n0", "n1"],
         "devices": "NVIDIA H200", "layout": {"world": 8 // (number + 1), "data": 4 // (number + 1)}}
        for number in range(2)
    ]  # fmt: skip
    (runs / "good" / "sessions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in attempts))
    (runs / "good" / "checkpoints" / "step-00000200").mkdir(parents=True)
    known = {"kind": "errors", "level": "wrong", "message": f"trouble {HOSTILE}", "step": 100, "time": None}
    (runs / "good" / "verdicts.jsonl").write_text(json.dumps(known) + "\n")
    page = tab(f"{address}/#good")
    page.wait_for_selector(".charts canvas")
    rows = page.locator("h2:has-text('Attempts') + div tbody tr")
    assert rows.count() == 2
    assert "replan" in rows.nth(1).inner_text()
    assert "world 8 -> 4" in rows.nth(1).inner_text()
    found = page.evaluate("runPage.curves.markers().map((each) => [each.kind, each.x])")
    assert sorted(found) == [["checkpoint", 200], ["replan", 150], ["verdict", 100]]
    canvas = page.locator(".charts canvas").first
    box, view = canvas.bounding_box(), page.evaluate(curve("Loss", "view()"))
    share = (100 - view[0]) / (view[1] - view[0])
    page.mouse.move(box["x"] + 54 + share * (box["width"] - 68), box["y"] + 50)
    assert "trouble <img" in page.locator(".tip").first.inner_text()
    page.get_by_role("button", name="checkpoints").click()
    assert page.get_by_role("button", name="checkpoints").get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_pages_fit_a_wide_screen_and_a_phone(
    address: str, runs: Path, tab: Callable, tmp_path: Path, width: int, scheme: str
):
    folder = Folder(runs / "a-run-with-a-long-name-that-somebody-gave-it-for-a-sweep", time.time())
    folder.launch["backend"] = "none"
    folder.manifest |= {"state": "failed", "error": "torch.OutOfMemoryError: CUDA out of memory"}
    folder.jobs.append(folder.job("FAILED"))
    folder.write()
    page = tab(address, width, scheme)
    page.wait_for_selector("tbody tr")
    page.screenshot(path=str(tmp_path / "list.png"))
    assert overflow(page) <= 0
    for row in page.locator("tbody tr").all():
        for cell in (".state", ".said"):
            box = row.locator(cell).bounding_box()
            assert box["width"] > 20
            assert box["x"] + box["width"] <= width
    for asked in ("#good", f"#good&{folder.path.name}"):
        page.goto(f"{address}/{asked}")
        page.wait_for_selector(".charts canvas")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=str(tmp_path / "run.png"), full_page=True)
        assert overflow(page) <= 0
        for box in (canvas.bounding_box() for canvas in page.locator("canvas").all()):
            assert box["x"] + box["width"] <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(17, 23, 29)")


def test_ticked_runs_are_compared_with_overlaid_curves_and_what_differs(address: str, runs: Path, tab: Callable):
    other = Folder(runs / "other", time.time()).write()
    recipe = other / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("learning_rate = 1e-2", "learning_rate = 5e-3"))
    page = tab(address, PHONE)
    page.wait_for_selector("tbody tr")
    for name in ("good", "other"):
        page.get_by_role("checkbox", name=f"compare {name}").check()
    page.get_by_role("link", name="compare 2 runs").click()
    page.wait_for_selector(".charts canvas")
    assert page.evaluate(curve("Loss", "lines.map((line) => line.run)")) == ["good", "other"]
    page.get_by_text("optim.learning_rate").wait_for()
    assert page.locator("tr", has_text="optim.learning_rate").inner_text().split() == [
        "optim.learning_rate",
        "0.01",
        "0.005",
    ]
    page.locator(".charts > div", has_text="Loss").get_by_role("button", name="other").click()
    assert page.evaluate(curve("Throughput", "shown().map((line) => line.run)")) == ["good"]


def test_logs_of_a_host_are_searched_and_the_timeline_has_hosts_and_a_prediction(
    address: str, runs: Path, tab: Callable
):
    (runs / "good" / "logs" / "n1.err").write_text("a first line\nWarning: the Needle\n")
    recipe = runs / "good" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("global_batch = 4", "global_batch = 16"))
    piped(Run(runs / "good"))
    page = tab(f"{address}/#good")
    page.wait_for_selector(".timeline canvas")
    page.get_by_label("host", exact=True).select_option("n1")
    page.get_by_label("search the logs").fill("needle")
    page.get_by_text("1 line found").wait_for()
    assert page.locator(".logs mark").inner_text() == "Needle"
    assert page.locator(".logs pre.err").inner_text().strip() == "Warning: the Needle"
    grow(runs / "good", 320)
    page.get_by_text("320 of 1000").wait_for()
    assert page.get_by_label("search the logs").input_value() == "needle"
    assert page.locator(".timeline .legend span", has_text="predicted").count() == 1
    lanes = page.locator(".lanes canvas")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 152, box["y"] + 22 + 35)  # the fourth lane of rank 0
    tip = page.locator(".timeline .tip").inner_text()
    assert "predicted forward of micro-batch 0, stage 0" in tip
    assert "rank 0 on n0 (H200)" in tip


def test_a_timeline_that_has_grown_shows_the_same_steps_and_time(address: str, runs: Path, tab: Callable):
    piped(Run(runs / "good"))
    page = tab(f"{address}/#good")
    page.wait_for_selector(".timeline canvas")
    page.evaluate("window.before = timelinePart.shown; before.choose(1, 1)")
    page.locator(".lanes canvas").press("+")
    shown = page.evaluate("before.place()")
    assert shown["steps"] == [1, 1]
    assert shown["view"][0] > 0
    piped(Run(runs / "good"), steps=6)
    deadline = time.monotonic() + 120
    while page.evaluate("timelinePart.shown === before"):
        assert time.monotonic() < deadline, "the timeline was not fetched again"
        page.wait_for_timeout(100)
    assert page.evaluate("timelinePart.shown.place()") == shown


def test_a_run_is_found_among_many(address: str, runs: Path, tab: Callable):
    for number in range(20):
        Folder(runs / f"more-{number}", time.time()).write()
    page = tab(address)
    page.get_by_text("22 runs").wait_for()
    page.get_by_role("searchbox").fill("MORE-1")
    page.get_by_text("11 runs").wait_for()
    assert page.locator("tbody tr").count() == 11
    page.wait_for_timeout(2500)  # It has renewed itself.
    assert page.locator("tbody tr").count() == 11


def test_hostile_text_stays_text(address: str, tab: Callable):
    page = tab(address)
    page.wait_for_selector("tbody tr")
    page.get_by_role("link", name="evil").click()
    page.wait_for_selector(".verdict.wrong")
    page.wait_for_selector(".logs pre.err")
    assert HOSTILE in page.locator(".logs pre.err").first.inner_text()
    assert page.locator("main img").count() == 0
    assert page.locator("main script").count() == 0
    assert page.title() != "owned"


def test_a_run_that_was_killed_and_is_resumed_goes_on_without_a_reload(address: str, runs: Path, tab: Callable):
    manifest = runs / "good" / "run.json"
    before = manifest.read_text()
    jobs = runs / "good" / "scheduler.jsonl"
    running = jobs.read_text()
    manifest.write_text(json.dumps(json.loads(before) | {"state": "failed", "error": "killed"}))
    jobs.write_text("")
    page = tab(f"{address}/#good")
    page.locator("h1", has_text="failed").wait_for()
    page.wait_for_selector(".charts canvas")
    page.wait_for_timeout(2500)  # The page has seen twice that it ended.
    manifest.write_text(before)
    jobs.write_text(running)
    grow(runs / "good", 310)
    page.locator("h1", has_text="running").wait_for()
    page.locator(".facts", has_text="310 of 1000").wait_for()
    page.wait_for_function(curve("Loss", "lines[0].x.at(-1) === 310"))
    assert "failed" not in page.locator("h1").inner_text()
