"""Size of a report, and the time to write and to open it, for a synthetic run of 1,000 steps on 64 ranks.

    PYTHONPATH=. python benchmarks/report.py [FOLDER] [--steps 1000] [--ranks 64] [--beside PAGE] [--screenshot FILE]

The run has eight stages of eight data-parallel ranks, eight micro-batches, a 1F1B schedule with noise, and a few steps
in which one rank is slow. Opening is timed in Chromium through Playwright, from the request until the first curve, the
timeline, and everything is drawn. `--beside` alternates with another report of the same run, such as one of an older
checkout. The medians of `--times` openings are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run, for_training
from steelyard.observe import report
from steelyard.planning import pipeline_sim
from steelyard.planning.pipeline_sim import Times

STAGES, MICRO_BATCHES = 8, 8


def make(folder: Path, steps: int, ranks: int) -> Run:
    """A synthetic run folder."""
    data = ranks // STAGES
    recipe = load_recipe(
        "gpt2-xl",
        [
            "name=synthetic", f"train.steps={steps}", f"train.global_batch={data * MICRO_BATCHES}",
            "train.micro_batch=1", f"parallel.pipeline={STAGES}", f"parallel.data={data}", "parallel.tensor=1",
            f"log.timeline=[1, {steps}]", "log.every=1",
        ],
    )  # fmt: skip
    run = for_training(recipe, folder / "synthetic-run")
    run.update(
        state="finished", world_size=ranks, device="NVIDIA A10", host="synthetic", started="never", ended="never"
    )
    _metrics(run, steps)
    (run.path / "timeline").mkdir()
    chance = random.Random(0)
    for rank in range(ranks):
        _timeline(run.path / "timeline" / f"rank-{rank:05d}.jsonl", rank // data, rank, steps, chance)
    return run


def _metrics(run: Run, steps: int) -> None:
    with open(run.path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            loss = 4 + 7 * math.exp(-step / 150) + 0.05 * math.sin(step)
            record = {
                "step": step, "loss": loss, "grad_norm": 1 + 3 / step, "learning_rate": 1e-4, "tokens": step * 65536,
                "tokens_per_second": 2e5 + 100 * math.sin(step / 9), "seconds": 0.3, "tflops": 40.0,
                "mfu": 0.32 + 0.01 * math.sin(step / 30), "peak_memory": 18 << 30,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def _timeline(path: Path, stage: int, rank: int, steps: int, chance: random.Random) -> None:
    """Write a rank's spans by the simulated schedule; the time between passes is `receive`."""
    forward = tuple(8e-3 if one in (0, STAGES - 1) else 7e-3 for one in range(STAGES))
    times = Times(forward, tuple(2 * one for one in forward), (0.0,) * STAGES, (4e-4,) * (STAGES - 1))
    events = pipeline_sim.events(times, "1f1b", STAGES, 1, MICRO_BATCHES)
    mine = sorted((event for event in events if event[0] == stage), key=lambda event: event[4])
    with open(path, "w", encoding="utf-8") as file:
        begin = 1_700_000_000_000_000_000
        for step in range(1, steps + 1):
            slow = 1.6 if step % 97 == 0 and rank == 5 else 1.0
            at = begin + 2_000_000
            spans = [("data", -1, -1, begin, at)]
            for _, kind, stage_, micro_batch, start, end in mine:
                starts = max(at, begin + 3_000_000 + int(1e9 * start))
                ends = starts + int(1e9 * (end - start) * slow * chance.uniform(0.95, 1.03))
                spans.append(("receive", stage_, micro_batch, at, starts))
                spans.append((kind, stage_, micro_batch, starts, ends))
                spans.append(("send", stage_, micro_batch, ends, ends + 150_000))
                at = ends + 150_000
            close = begin + 380_000_000 if step % 97 else begin + 560_000_000
            spans += [("gradients", -1, -1, at, close - 20_000_000), ("optimizer", -1, -1, close - 20_000_000, close)]
            for name, stage_, micro_batch, start, end in spans:
                entry = {"step": step, "name": name, "stage": stage_, "micro_batch": micro_batch,
                         "start_ns": start, "end_ns": end}  # fmt: skip
                file.write(json.dumps(entry) + "\n")
            begin = close + 1_000_000


# Checked at every frame, so that what exists has been painted. Older reports draw their curves with plotly.
CLOCK = """
window.seen = {};
const place = (name) => document.querySelector(name);
const parts = {
    first_curve: () => place(".chart canvas") || place(".plotly-graph-div .main-svg"),
    timeline: () => window.timelines,
    all: () => document.readyState === "complete" && document.querySelectorAll(".plotly-graph-div").length ===
        document.querySelectorAll(".plotly-graph-div .main-svg:first-child").length,
};
(function look() {
    for (const name in parts) if (!(name in seen) && parts[name]()) seen[name] = performance.now() / 1000;
    if (!seen.all) requestAnimationFrame(look);
})();
"""


def opened(page: Path, screenshot: Path | None = None) -> tuple[dict[str, float], list[str]]:
    """Seconds until Chromium has drawn the parts of a page, and the errors of its console."""
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        # The page's Content-Security-Policy would block evaluate().
        tab = browser.new_page(viewport={"width": 1300, "height": 900}, bypass_csp=True)
        tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.add_init_script(CLOCK)
        tab.goto(page.resolve().as_uri(), wait_until="commit")
        tab.wait_for_function("window.seen.all")
        seconds: dict[str, float] = tab.evaluate("window.seen")
        if screenshot is not None:
            tab.screenshot(path=str(screenshot), full_page=True)
        browser.close()
    return seconds, complaints


def timed(pages: list[Path], times: int, screenshot: Path | None) -> dict[str, object]:
    """Open the pages alternately; returns their sizes, and the median seconds until each part is drawn."""
    found: dict[Path, list[dict[str, float]]] = {page: [] for page in pages}
    complaints: list[str] = []
    for number in range(times):
        for page in pages:
            seconds, errors = opened(page, screenshot if (number, page) == (0, pages[0]) else None)
            found[page].append(seconds)
            complaints += errors
    reported: dict[str, object] = {
        str(page): {"MB": round(page.stat().st_size / 1e6, 2)}
        | {f"{part}_seconds": round(statistics.median(one[part] for one in each), 2) for part in each[0]}
        for page, each in found.items()
    }
    return reported | {"console_errors": complaints}


def main() -> None:
    """Create the run, write its report, open it, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--screenshot", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        there = folder / "synthetic-run"
        run = Run.open(there) if there.exists() else make(folder, given.steps, given.ranks)
        spans = sum(path.stat().st_size for path in (run.path / "timeline").iterdir())
        began = time.perf_counter()
        page = report.write(run)
        wrote = time.perf_counter() - began
        figures: dict[str, object] = {
            "timeline_MB": round(spans / 1e6, 1),
            "write_seconds": round(wrote, 2),
        }
        if shutil.which("chromium"):
            beside = [given.beside] if given.beside else []
            figures |= timed([page, *beside], given.times, given.screenshot)
        json.dump(figures, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
