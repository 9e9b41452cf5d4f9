"""Reports as a browser shows them."""

import shutil
from pathlib import Path

import pytest

from steelyard.core.recipe import load
from steelyard.core.run import Run, for_training
from steelyard.observe import report
from tests.observe.test_report import piped, write_spans

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser):
    """Opens a page, with everything that its console or its scripts complain of, and without a network."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    complaints: list[str] = []

    def open_(path: Path):
        tab = context.new_page()
        tab.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else
               complaints.append(f"asked for {request.url}"))  # fmt: skip
        tab.goto(path.resolve().as_uri())
        tab.wait_for_selector(".plotly-graph-div .main-svg", timeout=30_000)
        return tab

    yield open_, complaints
    context.close()


def hostile(path: Path) -> Run:
    """A run all of whose names and texts try to be markup."""
    name = "<img src=x onerror=alert(1)>"
    run = for_training(load("tiny.toml", [f"description={name}", "parallel.pipeline=2", "train.global_batch=8"]), path)
    run.update(world_size=2, device="cpu", host=name, state="failed", error="</div><script>alert(2)</script>")
    (run.path / "logs" / "<i>n.err").write_text("</pre><script>alert(3)</script>")
    for step in range(1, 30):
        run.append({"step": step, "loss": 3 / step, "tokens": step, "tokens_per_second": 9.0, "seconds": 0.1})
    piped(run, steps=6)
    return run


def test_a_report_opens_without_a_complaint_and_hostile_text_stays_text(in_workplace, opened):
    open_, complaints = opened
    run = hostile(in_workplace.path / "<b>run&")
    rows = [(step, "</script><b>odd", -1, -1, step * 10**9, step * 10**9 + 5000) for step in range(1, 7)]
    write_spans(run, 2, rows)
    tab = open_(report.write(run))
    assert tab.title() == "<b>run&"
    assert tab.locator(".timeline canvas").count() == 2
    assert tab.locator(".timeline .legend span", has_text="</script><b>odd").count() == 1
    found = tab.locator("b, i, img").evaluate_all("all => all.map(one => one.outerHTML)")
    assert set(found) == {"<b>&lt;b&gt;run&amp;</b>"}  # The verdicts' own.
    assert complaints == []


def test_the_timeline_zooms_moves_tells_and_chooses(in_workplace, opened):
    open_, complaints = opened
    run = for_training(load("tiny.toml", ["parallel.pipeline=2", "train.global_batch=8"]))
    run.update(world_size=2, device="cpu")
    piped(run, steps=6)
    tab = open_(report.write(run))
    lanes = tab.locator(".lanes canvas")
    lanes.scroll_into_view_if_needed()
    box = lanes.bounding_box()
    width = "timelines[0].view()[1] - timelines[0].view()[0]"
    whole = tab.evaluate(width)
    tab.mouse.move(box["x"] + 300, box["y"] + 26)
    tab.mouse.wheel(0, -400)
    tab.wait_for_function(f"{width} < {whole} * 0.5")
    first = tab.evaluate("timelines[0].view()[0]")
    tab.mouse.down()
    tab.mouse.move(box["x"] + 200, box["y"] + 26, steps=3)
    tab.mouse.up()
    assert tab.evaluate("timelines[0].view()[0]") > first
    tab.mouse.dblclick(box["x"] + 300, box["y"] + 26)
    assert tab.evaluate(width) == pytest.approx(whole)
    tab.mouse.move(box["x"] + 96, box["y"] + 26)
    tip = tab.locator(".tip")
    assert "forward of micro-batch 0, stage 0" in tip.inner_text()
    assert "rank 0" in tip.inner_text()
    tab.get_by_role("button", name="next step").click()
    tab.locator(".controls input").nth(1).fill("6")
    tab.locator(".controls input").nth(1).press("Enter")
    assert tab.evaluate("timelines[0].chosen()[1]") == 5
    tab.locator(".controls select").select_option("1")
    assert complaints == []


def test_every_curve_of_a_run_on_gpus_is_drawn_and_a_flat_one_stands_at_its_value(in_workplace, opened):
    open_, complaints = opened
    run = for_training(load("tiny.toml"))
    for step in range(1, 50):
        record = {"step": step, "loss": 3 / step, "tokens": step, "tokens_per_second": 9.0 + step, "seconds": 0.1}
        record |= {"learning_rate": 1e-4, "grad_norm": 2 / step, "tflops": 300 + step, "mfu": 0.3 + step / 1e3}
        run.append(record | {"peak_memory": (60 << 30) + (step << 24)})
    tab = open_(report.write(run))
    tab.wait_for_selector("#figure-7 .main-svg")
    drawn = tab.locator(".charts > div").evaluate_all(
        """all => all.map(one => {
            const place = one.querySelector(".plotly-graph-div"), line = one.querySelector(".js-line");
            const title = one.querySelector("h3").textContent, range = place.layout.yaxis.range;
            return [title, place.data[0].y[48], line.getBBox().height, range];
        })"""
    )
    curves = {title: (last, height, tuple(range_)) for title, last, height, range_ in drawn}
    assert set(curves) >= {"Loss", "Throughput", "Learning rate", "Gradient norm", "MFU", "Memory"}
    assert curves["MFU"][0] == pytest.approx(34.9)
    assert curves["MFU"][1] > 50  # It rises over most of its figure.
    assert curves["MFU"][2][0] > 29
    assert curves["Learning rate"][2] == pytest.approx((0, 2e-4))
    assert complaints == []


def test_two_runs_in_one_report_have_a_timeline_each(in_workplace, opened):
    open_, complaints = opened
    runs = [hostile(in_workplace.path / name) for name in ("one", "two")]
    tab = open_(report.write(runs, in_workplace.path / "both.html"))
    assert tab.evaluate("timelines.length") == 2
    assert tab.locator("h2", has_text="Timeline of two").count() == 1
    assert complaints == []
