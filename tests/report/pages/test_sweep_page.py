"""A sweep's report: every point, predicted beside measured, the fastest one marked."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launcher.report.sweep import report_sweep

sys.path.insert(0, str(Path(__file__).parent))
import browser

HOSTILE = "</style><script>alert(1)</script>"


@pytest.fixture
def swept(tmp_path):
    """A sweep of two settings with four runs, of which one failed and one has not ended."""
    folder = tmp_path / "sweep-1"
    points = [(2, "gpipe", 0.5), (10, "gpipe", 0.25), (4, "1f1b", None), (4, HOSTILE, None)]
    for number, (batches, schedule, seconds) in enumerate(points):
        run = folder / f"sweep-1-{number}"
        run.mkdir(parents=True)
        parallel = {"num_micro_batches": batches, "schedule": schedule}
        (run / "config.yaml").write_text(yaml.safe_dump({"parallel": parallel}))
        summary = {
            "exit_reason": "done" if seconds else f"it failed {HOSTILE}",
            "final_loss": 2.0,
            "step_seconds_median": seconds,
            "predicted_step_seconds": 0.4,
            "peak_memory_bytes": 2**30,
            "predicted_peak_memory_bytes": 2**29,
        }
        if number != 2:
            (run / "summary.json").write_text(json.dumps(summary))
    runs = sorted(folder.iterdir())
    report_sweep(Console(quiet=True), folder, runs)
    return folder / "report.html"


def test_every_point_is_there_and_the_fastest_is_marked(swept):
    page = swept.read_text()
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>")[:-1]]
    assert [row[0] for row in rows] == ["0", "1 <b>fastest</b>", "2", "3"]
    assert rows[0][1:] == [
        *("2", "gpipe", "2.0000", "-", "500 ms", "400 ms", "1.00 GiB", "512 MiB", "done")
    ]
    assert rows[2][-1] == "not finished"
    assert "<script>alert" not in page
    assert page.count("<script>") == 1


def test_step_time_and_memory_stand_against_what_was_swept_in_its_order(swept):
    charts = swept.read_text().split('<figure class="chart">')[1:]
    titles = [re.search(r"<figcaption>(.*)", chart).group(1).strip() for chart in charts]
    assert titles == ["step time", "memory", "step time", "memory"]
    axis = re.search(r'<div class="x-axis">(.*?)<em>(.*?)</em>', charts[0])
    assert re.findall(r">([^<>]+)</span>", axis.group(1)) == ["2", "4", "10"]
    assert axis.group(2) == "parallel.num_micro_batches"
    dots = re.findall(r'class="dot (\w+)( best)?".*?title="(.*?)"', charts[0])
    assert [(css, bool(best), text) for css, best, text in dots] == [
        ("hollow", False, "predicted, parallel.num_micro_batches 2: 400 ms"),
        ("hollow", False, "predicted, parallel.num_micro_batches 10: 400 ms"),
        ("first", False, "measured, parallel.num_micro_batches 2: 500 ms"),
        ("first", True, "measured, parallel.num_micro_batches 10: 250 ms"),
    ]


@pytest.mark.skipif(not browser.FOUND, reason="no browser is here")
@pytest.mark.devices
def test_a_browser_opens_it_without_an_error_and_without_a_request(swept):
    chromium = browser.Browser()
    try:
        for width in (400, 1400):
            errors, asked = chromium.open(swept, width)
            assert errors == []
            assert asked == [swept.as_uri()]
            assert chromium.ask("document.documentElement.scrollWidth") <= width
            kept = Path(os.environ.get("LAUNCHER_TEST_SCREENSHOTS", swept.parent))
            chromium.screenshot(kept / f"sweep-{width}.png")
    finally:
        chromium.close()
