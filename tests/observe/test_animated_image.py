"""The animated image of the live page in the README, made from a real run: trained, killed, resumed.

STEELYARD_IMAGES=docs/images pytest tests/observe/test_animated_image.py
"""

import io
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from steelyard.launch.gpu_monitor import Sampler
from steelyard.observe import web_server
from tests.conftest import kill
from tests.observe.test_page_in_chromium import drag

SIZE = {"width": 1100, "height": 760}
SHOWN = 820  # pixels of the image's width
HOST = "node-1"
MOST_BYTES, MOST_FRAMES = 1 << 20, 36
IMAGES = Path(os.environ["STEELYARD_IMAGES"]).resolve() if "STEELYARD_IMAGES" in os.environ else None
STEPS, KILLED_AFTER = (360, 150) if IMAGES else (60, 24)  # A test needs no pretty curve.
RUN = f"train.steps={STEPS} log.every=3 eval.every=30 checkpoint.every=15 optim.learning_rate=3e-3".split()


def reached(run: Path) -> int:
    """The last recorded step."""
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


def anonymise(run: Path) -> None:
    """Remove the name of this machine, which does not belong into an image."""
    own = socket.gethostname()
    (run / "hosts" / f"{own}.json").rename(run / "hosts" / f"{HOST}.json")
    sessions = run / "sessions.jsonl"
    sessions.write_text(sessions.read_text().replace(json.dumps(own), json.dumps(HOST)))


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_animated_image_shows_a_run_that_is_killed_and_resumed(in_workplace, browser, tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    frames: list[tuple[bytes, int]] = []
    workplace, run = in_workplace, Path("runs") / "tiny"
    run.parent.mkdir()
    with web_server.make_server(run.parent) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        page = browser.new_context(viewport=SIZE, color_scheme="light").new_page()
        page.set_default_timeout(120_000)

        def shoot(milliseconds: int) -> None:
            frames.append((page.screenshot(), milliseconds))

        def follow(process, until: int) -> None:
            """Take a frame for each change until a step is reached or the run ends."""
            seen, limit = -1, time.monotonic() + 200
            while process.poll() is None and (step := reached(run)) < until and time.monotonic() < limit:
                if step > seen:
                    seen = step
                    shoot(250)
                time.sleep(0.5)

        def stop_at(process, step: int) -> None:
            """Stop the run at a step: it must not end while the browser draws."""
            while process.poll() is None and reached(run) < step:
                time.sleep(0.02)
            process.send_signal(signal.SIGSTOP)

        process = workplace.start("train", "tiny.toml", *RUN)
        threading.Thread(target=stop_at, args=(process, KILLED_AFTER), daemon=True).start()
        try:
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
            page.get_by_role("link", name="tiny").wait_for()
            shoot(900)
            page.get_by_role("link", name="tiny").click()
            page.wait_for_selector(".charts canvas")
            with Sampler(run, lambda: [process.pid], host=HOST, every=0.5):
                follow(process, KILLED_AFTER)
                kill(process)
                assert KILLED_AFTER <= reached(run) < STEPS
                process = workplace.start("train", "tiny.toml", *RUN)
                follow(process, STEPS)
                process.communicate(timeout=200)
        finally:
            kill(process)
        page.locator(".facts", has_text=f"{STEPS} of {STEPS}").wait_for()
        page.wait_for_selector(".verdict.ok")
        page.get_by_role("button", name="restarts").wait_for()
        anonymise(run)
        shoot(1500)
        page.locator(".curves input[type=range]").fill("0.85")
        shoot(1200)
        drag(page, "Loss", 0.3, 0.75)
        page.mouse.move(5, 5)
        page.wait_for_timeout(200)
        shoot(1500)
        page.get_by_role("button", name="time", exact=True).click()
        page.wait_for_timeout(200)
        shoot(1500)
        rows = page.locator("h2:has-text('Attempts') + div tbody tr", has_text=HOST)
        rows.nth(1).wait_for()
        assert rows.count() == 2
        rows.nth(1).evaluate("(row) => row.scrollIntoView({ block: 'end' })")
        shoot(2000)
        server.shutdown()
    every = -(-len(frames) // MOST_FRAMES)
    shown = [frame for place, frame in enumerate(frames) if frame[1] != 250 or place % every == 0]
    pictures = [image.open(io.BytesIO(data)).convert("RGB") for data, _ in shown]
    high = SHOWN * SIZE["height"] // SIZE["width"]
    first, *others = [picture.resize((SHOWN, high), image.Resampling.LANCZOS) for picture in pictures]
    path = (IMAGES or tmp_path) / "serve.webp"
    durations = [milliseconds for _, milliseconds in shown]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, quality=72, method=4)
    assert path.stat().st_size < MOST_BYTES
    assert image.open(path).n_frames >= 6  # the list, the run at its end, smoothed, zoomed, by time, its attempts
