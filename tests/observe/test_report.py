import re

from steelyard import train
from steelyard.core.recipe import load
from steelyard.core.run import for_training
from steelyard.observe import report


def test_the_report_of_a_finished_run_is_one_file_that_needs_no_network(in_workplace):
    run = train.run(load("tiny.toml"))
    page = report.write(run).read_text()
    for part in ("Loss", "Throughput", "Recipe", "Validation perplexity", "finished", "sequence_length = 16"):
        assert part in page
    own = page[page.rindex("</script>") :] + page[: page.index("<script")]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=\s*[\"']?http", page)
    assert "http" not in own


def test_a_run_that_has_not_begun_has_a_report_too(in_workplace):
    run = for_training(load("tiny.toml"))
    assert "Nothing was recorded yet" in report.render(run)


def test_hostile_text_stays_text(in_workplace):
    run = for_training(load("tiny.toml", ["description=<script>alert(1)</script>"]))
    run.update(host="<img src=x onerror=alert(1)>")
    page = report.render(run)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
