"""The measured timeline: one clock, and a trace whose events are balanced."""

import itertools
import json

import pytest

from launcher.base.spans import Clock, Span, SpanRecorder, clock_of
from launcher.report.pages import plots
from launcher.report.pages.plots import measured_picture, plot_timeline
from launcher.report.pages.timeline import ProcessSpans, Timeline, chrome_trace, read_timeline
from launcher.schedule import SCHEDULES, simulate

ORIGIN = 1_700_000_000_000_000_000
HALF = {"src_mesh": 0, "dst_mesh": 1, "number": 0}


def span(lane, start, end, name="a", kind="forward", **about):
    return Span(lane, name, ORIGIN + start, ORIGIN + end, kind, about)


def apart_or_nested(events):
    """Whether no two events of a thread of the trace overlap but by nesting."""
    lanes = {}
    for event in events:
        if event["ph"] == "X":
            times = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            lanes.setdefault((event["pid"], event["tid"]), []).append(times)
    return all(
        b <= c or (a <= c and d <= b) or (c <= a and b <= d)
        for found in lanes.values()
        for (a, b), (c, d) in itertools.combinations(sorted(found), 2)
    )


def trace_of(*parts):
    return chrome_trace(Timeline().with_step(7, parts))


def test_a_clock_is_read_in_the_middle_of_the_fastest_round_trip():
    rounds = [(100, 1_150, 180), (200, 1_215, 220), (300, 1_399, 400)]
    assert clock_of(rounds) == Clock(offset=1_005, uncertainty=10)


def test_processes_are_on_one_clock():
    ahead, behind = Clock(500), Clock(-300)
    parts = [
        ProcessSpans("worker 0", [span("device 0", 1_500, 1_600)], ahead),
        ProcessSpans("worker 1", [span("device 1", 700, 800)], behind),
    ]
    first, second = Timeline().with_step(1, parts).spans()
    assert (
        (first.start, first.end) == (second.start, second.end) == (ORIGIN + 1_000, ORIGIN + 1_100)
    )


def test_a_transfer_begins_when_its_sender_sent_it_off():
    sent = span("transfers", 400, 400, kind="transfer", known="start", **HALF)
    received = span("transfers", 1_100, 1_900, kind="transfer", known="end", **HALF)
    parts = [
        ProcessSpans("worker 0", [sent], Clock()),
        ProcessSpans("worker 1", [received], Clock(1_000)),
    ]
    (found,) = Timeline().with_step(1, parts).spans()
    assert (found.start, found.end) == (ORIGIN + 400, ORIGIN + 900)
    late = ProcessSpans("worker 0", [sent], Clock(-10_000))  # a clock that was read badly
    (found,) = Timeline().with_step(1, [late, parts[1]]).spans()
    assert found.start == found.end


def test_events_of_a_thread_are_apart_or_nested_and_none_is_lost():
    times = [(0, 10), (2, 8), (3, 5), (4, 12), (8, 9), (10, 20), (10, 10), (11, 30), (0, 40)]
    spans = [span("put", *each) for each in times] + [span("get", 5, 6)]
    trace = trace_of(ProcessSpans("worker 0", spans, Clock()))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(spans)
    assert apart_or_nested(events)
    assert all(event["dur"] >= 0 for event in events)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"put", "put (2)", "put (3)", "get"}


def test_every_process_and_lane_has_a_name_and_devices_come_in_order():
    lanes = "dispatch", "device 10", "device 2 gradient sums", "device 2"
    parts = [
        ProcessSpans("driver", [span("loop", 0, 1)], Clock()),
        ProcessSpans("worker 0", [span(lane, 0, 1) for lane in lanes], Clock()),
    ]
    events = trace_of(*parts)["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named.keys()
    assert [named[1, tid] for tid in range(4)] == [
        "device 2",
        "device 2 gradient sums",
        "device 10",
        "dispatch",
    ]


def test_the_file_keeps_the_steps_of_an_earlier_start(tmp_path):
    path = tmp_path / "timeline.json"
    assert read_timeline(path) == Timeline()
    first = Timeline().with_step(
        3, [ProcessSpans("worker 0", (span("device 0", 0, 1_234_567, microbatch=2),), Clock(5, 9))]
    )
    first.save(path)
    both = read_timeline(path).with_step(
        12, [ProcessSpans("worker 0", (span("device 0", 10**10, 10**10 + 7),), Clock())]
    )
    both.save(path)
    again = read_timeline(path)
    assert again.spans(3) == first.spans(3)
    assert again.spans(12) == both.spans(12)
    assert again.steps[3][0].clock == Clock(5, 9)
    assert json.loads(path.read_text())["otherData"]["steps"] == [3, 12]
    path.write_text('{"traceEvents": [{}], "otherData": 3}')
    assert read_timeline(path) == Timeline()


def test_what_is_recorded_is_what_ran_while_it_was_recorded():
    recorder = SpanRecorder()
    recorder.add("put", "before", 0, 1)
    with recorder.span("save", "goes on before"):
        recorder.start()
        recorder.add("put", "backwards", 5, 3, server=1)
    with recorder.span("save", "goes on after"):
        found = recorder.take()
    recorder.add("put", "after", 8, 9)
    assert [each.name for each in found] == ["backwards", "goes on before", "goes on after"]
    assert (found[0].start, found[0].end, found[0].about) == (5, 5, {"server": 1})
    assert found[0].kind == "put"
    assert found[2].about == {"goes_on": True}
    assert not recorder.is_on
    assert recorder.take() == []


def device(mesh, start, end, name="a", kind="forward", **about):
    return span(f"device {mesh}", start, end, name, kind, mesh=mesh, program=name, **about)


def test_a_mesh_is_busy_from_its_first_device_to_its_last_and_idle_where_nothing_runs():
    task = {"stage": 0, "microbatch": 0}
    spans = [
        device(0, 0, 400_000_000, "f", **task),
        span("device 1", 0, 500_000_000, "f", mesh=0, program="f", **task),
        device(2, 500_000_000, 1_000_000_000, "b", "backward", stage=1, microbatch=0),
        device(2, 800_000_000, 1_100_000_000, "bucket 0", "gradient sum", stage=1, microbatch=0),
        device(2, 1_100_000_000, 1_200_000_000, "update.0", "update"),
    ]
    picture = measured_picture(spans, "measured")
    assert picture.title == "measured: 1.20 s a step, 50.0% idle"
    assert picture.rows == ["stage 0", "stage 1"]
    assert [(b.row, b.start, b.end) for b in picture.boxes[:2]] == [(0, 0.0, 0.5), (1, 0.5, 1.0)]
    assert measured_picture([span("dispatch", 0, 1)], "measured") is None


@pytest.fixture
def figures(monkeypatch):
    """What is drawn."""
    drawn = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure))
    return drawn


@pytest.mark.parametrize("measured", [{}, {3: [device(0, 0, 10**9, stage=0, microbatch=0)]}])
def test_the_measured_step_is_drawn_below_the_predicted_one(tmp_path, figures, measured):
    timeline = simulate(SCHEDULES["gpipe"].tasks(2, 4), lambda task: 0.01)
    plot_timeline(timeline, tmp_path / "t.png", "run", 0.125, measured)
    axes = figures[0].axes
    titles = [each.get_title(loc="left") for each in axes]
    assert titles[0].startswith("run, predicted: 125 ms" if measured else "run: 125 ms")
    assert [title.split(":")[0] for title in titles[1:]] == ["measured, step 3"] * len(measured)
    assert len({each.get_xlim() for each in axes}) == 1


def test_the_legend_has_transfers_where_there_are_some(tmp_path, figures):
    timeline = simulate(SCHEDULES["gpipe"].tasks(2, 1), lambda task: 0.01)
    ran = [device(mesh, mesh, mesh + 1, stage=mesh, microbatch=0) for mesh in (0, 1)]
    sent = span("transfers", 1, 2, kind="transfer", **HALF)
    for spans in (ran, [*ran, sent]):
        plot_timeline(timeline, tmp_path / "t.png", "run", 0.125, {3: spans})
    shown = [[text.get_text() for text in f.legends[0].get_texts()] for f in figures]
    assert ["transfer" in names for names in shown] == [False, True]
