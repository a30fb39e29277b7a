"""A run's report: one file that a real browser opens without an error and without a request."""

import html
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launcher.base.spans import Clock, Span
from launcher.config.compose import load, to_dict
from launcher.driver.planning.plan_from_config import plan_of
from launcher.plan import Advice, local_shape, timeline
from launcher.report.breakdown import Goodput, Known, StepBreakdown, StepPart, break_down
from launcher.report.pages.run_page import Reported, run_report
from launcher.report.pages.timeline import ProcessSpans
from launcher.report.summary import Summary
from launcher.train.program import build_program

sys.path.insert(0, str(Path(__file__).parent))
import browser

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
WORDS = ["recipe=smoke", "parallel=manual", "parallel.num_stages=2", "cluster=emulated"]


@pytest.fixture(scope="module")
def plan():
    config = load([*WORDS, "cluster.gpus=2"])
    return plan_of(config.parallel, build_program(config).train, local_shape(2, 1, "cpu"))


@pytest.fixture(scope="module")
def found(plan):
    """A run with all that a report may have, and markup wherever text is free."""
    spans = [
        Span(
            f"device {timed.mesh}",
            f"stage.{timed.task.stage}.{timed.task.kind.value}",
            round(timed.start * 2e9),
            round(timed.end * 2e9),
            timed.task.kind.value,
            {
                "stage": timed.task.stage,
                "mesh": timed.mesh,
                "microbatch": timed.task.microbatch,
                "program": number,
            },
        )
        for number, timed in enumerate(timeline(plan))
    ]
    parts = [ProcessSpans("worker 0", spans, Clock())]
    goodput = Goodput(training_seconds=60, compiling_seconds=20, starting_seconds=20)
    records = [
        {"step": s, "train/loss": 4.0 / s, "perf/step_seconds": 0.5 + 0.01 * (s % 7)}
        for s in range(1, 1001)
    ]
    records[500]["train/loss"] = float("nan")
    records[9]["eval/loss"] = 0.5
    summary = Summary(
        HOSTILE,
        f"worker 1 died {HOSTILE}",
        steps=1000,
        first_loss=4.0,
        final_loss=0.004,
        step_seconds_median=0.5,
        predicted_step_seconds=plan.predicted_step_seconds,
        samples_per_second=16.0,
        total_seconds=600.0,
        restarts=1,
    )
    settings = to_dict(load(WORDS)) | {HOSTILE: HOSTILE}
    gains = (0.5, 0.0, -0.5, None)
    advice = [
        Advice(HOSTILE, (HOSTILE,), True, g, g, HOSTILE, 9, 2, 0.1, 9.0, None, 90.0, 3.0, g is None)
        for g in gains
    ]
    return Reported(
        summary,
        replace(plan, advice=tuple(advice)),
        timeline(plan),
        settings,
        records,
        {3: spans},
        break_down(plan, Known(8), 3, parts, goodput),
        [f"worker 1 died\n{HOSTILE}"],
    )


class Tags(HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_nothing_of_a_run_becomes_markup(found):
    page = Tags(run_report(found))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page.tags]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert HOSTILE in page.text


def test_a_page_refers_to_nothing_outside(found):
    page = Tags(run_report(found))
    for _, attrs in page.tags:
        assert not attrs.get("src")
        assert attrs.get("href", "data:").startswith("data:")
    assert "@import" not in run_report(found)
    assert "url(" not in run_report(found)


def test_all_parts_of_a_run_are_there(found):
    page = run_report(found)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Promise and outcome",
        "Timeline of a step",
        "Curves",
        "Where the step went",
        "Where the wall time went",
        "Plan",
        "Advice",
        "What went wrong",
        "Settings",
    ]
    tasks = len(found.timeline)
    assert len(re.findall(r"<title>stage.*?microbatch", page)) == 2 * tasks
    assert "train.global_batch_size" in page
    assert "± 25% a step" in page
    gains = re.findall(r"<td>([+-][^<]*%[^<]*)</td>", page[page.index("<h2>Advice") :])
    assert gains == ["+50.0%"] * 2 + ["+0.0% ~"] * 2 + ["-50.0%"] * 2
    assert "~ within the predictions' ± 25%: perhaps none." in html.unescape(page)


def test_boxes_lie_where_their_tasks_ran_on_one_axis(found):
    page = run_report(found)
    _, predicted, measured = page.split('<div class="heading"><span>')
    ends = {}
    for name, part in (("predicted", predicted), ("measured", measured)):
        boxes = re.findall(
            r'<rect class="(?:forward|backward|both)[^"]*" x="([\d.]+)%" width="([\d.]+)%"', part
        )
        assert len(boxes) == len(found.timeline)
        ends[name] = max(float(x) + float(width) for x, width in boxes)
    assert ends["measured"] == pytest.approx(100, abs=0.01)  # the longer one, twice as slow
    assert ends["predicted"] == pytest.approx(50, abs=0.01)


def test_a_run_without_steps_timeline_or_accounting_has_a_report(plan):
    bare = Reported(Summary("mine", "planned", predicted_step_seconds=0.5), plan, timeline(plan))
    headings = re.findall(r"<h2>(.*?)</h2>", run_report(bare))
    assert headings == ["Timeline of a step", "Plan"]
    assert "<h2>Timeline" not in run_report(replace(bare, timeline=()))
    card = "<span>step time</span><strong>500 ms</strong><small>predicted</small>"
    assert card in run_report(bare)


@pytest.mark.parametrize(("least", "step", "shown"), [(0.3, 100.0, True), (0.1, 100.0, False)])
def test_parts_of_two_thousandths_of_the_step_are_shown(least, step, shown, found):
    parts = StepPart("forward", step, step - least), StepPart("data", 0.0, least)
    page = run_report(replace(found, accounting=StepBreakdown(step, 3, step, parts=parts)))
    assert ('<td class="left">data</td>' in page) == shown


def test_a_step_that_takes_no_time_has_a_report(found):
    nothing = StepBreakdown(0.0, 3, 0.0, parts=(StepPart("forward", 0.0, 0.0),))
    assert "<h2>Where the step went" in run_report(replace(found, accounting=nothing))


needs_browser = pytest.mark.skipif(not browser.FOUND, reason="no browser is here")


@pytest.fixture(scope="module")
def opened():
    chromium = browser.Browser()
    yield chromium
    chromium.close()


@needs_browser
@pytest.mark.devices
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_opens_it_without_an_error_and_without_a_request(
    found, opened, width, dark, tmp_path
):
    path = tmp_path / "report.html"
    path.write_text(run_report(found))
    errors, asked = opened.open(path, width, dark)
    assert errors == []
    assert asked == [path.as_uri()]
    assert opened.ask("document.documentElement.scrollWidth") <= width  # nothing sticks out
    background = opened.ask("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    kept = Path(os.environ.get("LAUNCHER_TEST_SCREENSHOTS", tmp_path))
    opened.screenshot(kept / f"run-{width}-{'dark' if dark else 'light'}.png")
    assert (kept / f"run-{width}-{'dark' if dark else 'light'}.png").stat().st_size > 20_000


@needs_browser
@pytest.mark.devices
def test_the_timelines_zoom_together(found, opened, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(run_report(found))
    opened.open(path, 1400)
    width = "document.querySelector('.canvas').clientWidth"
    box = "document.querySelector('rect.forward').getBoundingClientRect().width"
    before, box_before = opened.ask(width), opened.ask(box)
    opened.ask("document.querySelector('[data-zoom=\"2\"]').click()")
    assert opened.ask(width) == pytest.approx(2 * before, rel=0.01)
    assert opened.ask(box) == pytest.approx(2 * box_before, rel=0.02)
    opened.ask("document.querySelector('[data-zoom=\"0\"]').click()")
    assert opened.ask(width) == before
