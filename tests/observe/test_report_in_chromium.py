"""Reports as a browser shows them."""

import json
from pathlib import Path

import pytest

from steelyard.core.pages import charts, page
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run, for_training
from steelyard.observe import report
from tests.observe.test_report import piped, write_spans

pytestmark = pytest.mark.cluster


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
        return tab

    yield open_, complaints
    context.close()


def hostile(path: Path) -> Run:
    """A run all of whose names and texts try to be markup."""
    name = "<img src=x onerror=alert(1)>"
    run = for_training(
        load_recipe("tiny.toml", [f"description={name}", "parallel.pipeline=2", "train.global_batch=8"]), path
    )
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
    run = for_training(load_recipe("tiny.toml", ["parallel.pipeline=2", "train.global_batch=8"]))
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
    tip = tab.locator(".timeline .tip")
    assert "forward of micro-batch 0, stage 0" in tip.inner_text()
    assert "rank 0" in tip.inner_text()
    tab.get_by_role("button", name="next step").click()
    tab.locator(".controls input").nth(1).fill("6")
    tab.locator(".controls input").nth(1).press("Enter")
    assert tab.evaluate("timelines[0].chosen()[1]") == 5
    tab.locator(".controls select").select_option("1")
    assert complaints == []


def ranges(tab) -> dict[str, list[float]]:
    """What each curve's axis covers, by its title."""
    return dict(
        tab.evaluate(
            """steelyard.charts.filter((one) => one.range).map((one) =>
                [one.root.parentElement.querySelector("h3").textContent, one.range()])"""
        )
    )


def painted(tab, chart: int) -> list[str]:
    """The colours of a chart's canvas that are no grey and cover more than a few pixels: those of its lines."""
    return tab.locator(".chart canvas").nth(chart).evaluate(
        """(canvas) => {
            const copy = new OffscreenCanvas(canvas.width, canvas.height)
                .getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, 0, 0);
            const { data } = copy.getImageData(0, 0, canvas.width, canvas.height), counts = {};
            for (let at = 0; at < data.length; at += 4) {
                const [red, green, blue, alpha] = data.subarray(at, at + 4);
                if (alpha < 250 || Math.max(red, green, blue) - Math.min(red, green, blue) < 60) continue;
                const name = [red, green, blue].join(",");
                counts[name] = (counts[name] || 0) + 1;
            }
            return Object.keys(counts).filter((name) => counts[name] > 40);
        }"""
    )  # fmt: skip


def test_every_curve_of_a_run_on_gpus_is_drawn_and_a_flat_one_stands_at_its_value(in_workplace, opened):
    open_, complaints = opened
    run = for_training(load_recipe("tiny.toml"))
    for step in range(1, 50):
        record = {"step": step, "loss": 3 / step, "tokens": step, "tokens_per_second": 9.0 + step, "seconds": 0.1}
        record |= {"learning_rate": 1e-4, "grad_norm": 2 / step, "tflops": 300 + step, "mfu": 0.3 + step / 1e3}
        run.append(record | {"peak_memory": (60 << 30) + (step << 24)})
    tab = open_(report.write(run))
    found = ranges(tab)
    assert set(found) >= {"Loss", "Throughput", "Learning rate", "Gradient norm", "MFU", "Memory"}
    assert found["MFU"] == pytest.approx([30.1 - 0.04 * 4.8, 34.9 + 0.04 * 4.8])  # It rises over most of its figure.
    assert found["Learning rate"] == pytest.approx([0, 2e-4])
    assert [len(painted(tab, chart)) for chart in range(len(found))] == [1] * len(found)
    assert complaints == []


def test_a_report_opens_with_its_curves_and_no_utilisation_exceeds_its_axis(in_workplace, opened):
    open_, complaints = opened
    run = for_training(load_recipe("tiny.toml"))
    for step in range(1, 50):
        run.append({"step": step, "loss": 3 / step, "tokens": 64 * step, "mfu": 0.99, "time": 1000.0 + step})
    for host in ("a1", "a2"):
        lines = [{"time": 1000.0 + second, "devices": [{"utilisation": 100}]} for second in range(60)]
        (run.path / "logs" / f"{host}.gpu").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab = open_(report.write(run))
    assert tab.locator("h2").first.inner_text() == "Curves"
    first = tab.locator("h2, canvas, table").evaluate_all("all => all.map((one) => one.tagName)")
    assert first.index("CANVAS") < first.index("TABLE")
    found = ranges(tab)
    assert found["Utilisation"] == [0, 100]
    assert found["MFU"] == [0, 100]  # A flat line stands in the middle of its axis, but not above 100%.
    tab.get_by_role("button", name="time", exact=True).click()
    assert tab.evaluate("steelyard.charts[0].view()") == [0, 59]
    assert (
        tab.evaluate("steelyard.charts.find((one) => one.range && one.lines[0]?.label === 'a1').lines[0].x.length")
        == 60
    )
    assert complaints == []


def compared(folder: Path) -> list[Run]:
    """Three runs of which the second has no number for a while, and a name that tries to be markup."""
    runs = [
        for_training(load_recipe("tiny.toml"), folder / name)
        for name in ("one", "<img src=x onerror=alert(4)>", "three")
    ]
    for number, run in enumerate(runs):
        for step in range(1, 101):
            loss = float("nan") if number == 1 and 40 <= step < 60 else 3 + number + 2 / step
            run.append({"step": step, "loss": loss, "tokens_per_second": 100.0 + step, "seconds": 0.1})
    return runs


def test_curves_of_several_runs_tell_hide_zoom_and_leave_gaps(in_workplace, opened):
    open_, complaints = opened
    tab = open_(report.write(compared(in_workplace.path / "runs"), in_workplace.path / "three.html"))
    loss = tab.locator(".chart canvas").nth(0)
    loss.scroll_into_view_if_needed()
    box, tip = loss.bounding_box(), tab.locator(".chart").nth(0).locator(".tip")
    left, right = box["x"] + 54, box["x"] + box["width"] - 14  # The axis of y, and the margin.

    def at(step: int) -> float:
        return left + (right - left) * (step - 1) / 99

    assert len(painted(tab, 0)) == 3
    tab.mouse.move(at(50), box["y"] + 60)
    reported = tip.inner_text()
    assert "step 50" in reported
    for name, value in (("one", "3.04"), ("<img src=x onerror=alert(4)>", "not a number"), ("three", "5.04")):
        assert [value] == [row.split("\t")[1] for row in reported.splitlines() if row.startswith(name)]
    tab.mouse.move(at(40), box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(at(59), box["y"] + 60, steps=3)
    tab.mouse.up()
    view = tab.evaluate("steelyard.charts[0].view()")
    assert view == pytest.approx([40, 59], abs=0.5)
    assert tab.evaluate("steelyard.charts[1].view()") == view  # Charts over steps are zoomed together.
    tab.wait_for_function("document.querySelector('.tip').hidden")
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(100)  # A frame
    assert len(painted(tab, 0)) == 2  # Nothing but the gap is left of the second.
    tab.mouse.dblclick(at(50), box["y"] + 60)
    assert tab.evaluate("steelyard.charts[0].view()") == [1, 100]
    tab.locator(".chart").nth(1).get_by_role("button", name="three").click()
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(100)
    assert len(painted(tab, 0)) == 2
    assert tab.evaluate("steelyard.charts[0].shown().map((line) => line.run)") == [
        "one",
        "<img src=x onerror=alert(4)>",
    ]
    assert tab.locator(".legend button[aria-pressed=false]").count() == tab.locator(".chart").count()
    assert complaints == []


def test_a_report_is_crisp_on_fine_screens_and_readable_in_the_dark(in_workplace, browser):
    run = for_training(load_recipe("tiny.toml", ["parallel.pipeline=2", "train.global_batch=8"]))
    run.update(world_size=2, device="cpu")
    piped(run, steps=6)
    for step in range(1, 80):
        run.append({"step": step, "loss": 3000 / step, "tokens_per_second": 9.0 + step, "seconds": 0.1})
    written = report.write(run)
    context = browser.new_context(viewport={"width": 900, "height": 700}, device_scale_factor=2, color_scheme="dark")
    tab = context.new_page()
    tab.goto(written.resolve().as_uri())
    sizes = tab.locator("canvas").evaluate_all("all => all.map(one => one.width / one.clientWidth)")
    assert len(sizes) >= 5
    assert sizes == pytest.approx([2] * len(sizes), rel=0.01)
    dark = painted(tab, 0)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 23, 29)"
    tab.emulate_media(color_scheme="light")
    tab.wait_for_function("() => steelyard.theme().paper === '#fff'")
    tab.wait_for_timeout(100)
    assert painted(tab, 0) != dark
    low, high = ranges(tab)["Loss"]
    assert low > 0  # From 3000 to 38: the scale begins as one of powers.
    assert high < 4000
    context.close()


def test_two_runs_in_one_report_have_a_timeline_each(in_workplace, opened):
    open_, complaints = opened
    runs = [hostile(in_workplace.path / name) for name in ("one", "two")]
    tab = open_(report.write(runs, in_workplace.path / "both.html"))
    assert tab.evaluate("timelines.length") == 2
    assert tab.locator("h2", has_text="Timeline of two").count() == 1
    assert complaints == []


def test_points_tell_their_texts_and_parallel_coordinates_keep_what_is_dragged_over(tmp_path, opened):
    open_, complaints = opened
    name = "<img src=x onerror=alert(5)>"
    line = charts.Line(name, [3.0, 1.0, 2.0], [30.0, 10.0, None], marks="only", texts=["a <b>third</b>", "one", "two"])
    axes = [
        charts.ChartAxis(name, [0, 1, 1], [(0, "low"), (1, "<i>high")], ["low", "<i>high", "<i>high"]),
        charts.ChartAxis("loss", [1.0, 2.0, 3.0]),
    ]
    body = [
        charts.lines([line], name, "loss", points=True),
        charts.coordinates(axes, ["trial 0", name, "trial 2"], less=True),
    ]
    path = tmp_path / "page.html"
    path.write_text(page.page(name, body, (*charts.SCRIPTS, "coordinates.js")))
    tab = open_(path)
    box = tab.locator(".chart canvas").nth(0).bounding_box()
    at = (box["width"] - 68) * (0.04 + 2) / 2.08  # x goes from 1 to 3, with a fiftieth of that on both sides.
    tab.mouse.move(box["x"] + 54 + at, box["y"] + 30)
    assert tab.locator(".tip").nth(0).inner_text().splitlines() == [name, f"{name}\t3", "loss\t30", "a <b>third</b>"]
    box = tab.locator(".chart canvas").nth(1).bounding_box()
    tab.mouse.move(box["x"] + 70, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 70, box["y"] + 10, steps=3)
    tab.mouse.up()
    low, high = tab.evaluate("steelyard.charts[1].kept[0]")
    assert 0.5 < low < 1 < high
    tab.mouse.move(box["x"] + box["width"] - 70, box["y"] + 324)
    assert tab.locator(".tip").nth(1).is_hidden()  # The line that ends there was not kept.
    tab.mouse.dblclick(box["x"] + box["width"] - 75, box["y"] + 322)
    assert tab.evaluate("steelyard.charts[1].kept") == [None, None]
    tab.mouse.move(box["x"] + box["width"] - 72, box["y"] + 322)
    assert tab.locator(".tip").nth(1).inner_text().startswith("trial 0")
    assert tab.locator("b, i, img").count() == 0
    assert complaints == []
