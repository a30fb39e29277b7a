"""Off a terminal: few plain lines. On one: a live display that leaves only such lines."""

import io
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from launcher.report import console as console_module
from launcher.report.console import ConsoleTracker, Phase, make_console, round_up, status

ESCAPE = "\x1b"


def metrics(step, **more):
    return {
        "train/loss": 5.0 - step / 100,
        "perf/tokens_per_second": 12345.0,
        "perf/samples_per_second": 96.4,
        "perf/step_seconds": 0.0852,
        **more,
    }


def plain_lines(steps, log_every=1, last=None, evals=(), seconds_a_step=0.1):
    """What a run prints off a terminal, its clock going on evenly."""
    file, now = io.StringIO(), iter(range(10**9))
    tracker = ConsoleTracker(make_console(file), steps, clock=lambda: next(now) * seconds_a_step)
    for step in range(log_every, (last or steps) + 1, log_every):
        tracker.log(step, metrics(step, **({"eval/loss": 4.5} if step in evals else {})))
    tracker.finish({})
    return file.getvalue().splitlines()


def test_the_exact_lines():
    assert plain_lines(3, evals=[2]) == [
        "step 1/3  loss 4.9900  12,345 tokens/s  85.2 ms/step",
        "step 2/3  loss 4.9800  12,345 tokens/s  85.2 ms/step  eval 4.5000  0:00 left",
        "step 3/3  loss 4.9700  12,345 tokens/s  85.2 ms/step",
    ]


def test_samples_stand_in_where_there_are_no_tokens():
    file = io.StringIO()
    tracker = ConsoleTracker(make_console(file), 10)
    tracker.log(1, metrics(1, **{"perf/tokens_per_second": None, "train/loss": float("nan")}))
    assert file.getvalue() == "step  1/10  loss nan     96 samples/s  85.2 ms/step\n"


def step_numbers(lines):
    return [int(re.match(r"step +(\d+)/", line)[1]) for line in lines]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps", [1, 7, 50, 60, 200, 1000])
@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_lines_are_few_and_hold_the_first_and_the_last_logged_step(steps, log_every):
    logged = range(log_every, steps + 1, log_every)
    numbers = step_numbers(plain_lines(steps, log_every, seconds_a_step=1e-6))
    assert numbers[:1] == list(logged[:1])
    assert numbers[-1:] == list(logged[-1:])
    assert len(numbers) == len(set(numbers)) <= 52


def test_steps_of_lines_are_round():
    assert step_numbers(plain_lines(200))[:5] == [1, 5, 10, 15, 20]


def test_a_slow_run_is_not_silent_for_minutes():
    numbers = step_numbers(plain_lines(100_000, last=30, seconds_a_step=20))
    assert numbers == [1, *range(4, 31, 3), 30]


def test_every_evaluation_has_its_line():
    numbers = step_numbers(plain_lines(1000, evals=[33, 501]))
    assert {33, 501} <= set(numbers)


def test_an_interrupted_run_still_shows_its_last_step():
    assert step_numbers(plain_lines(1000, last=57))[-1] == 57


def test_time_left_is_the_recent_pace_times_the_steps_that_remain():
    assert plain_lines(200, last=100, seconds_a_step=1.5)[-1].endswith("  2:30 left")


def test_off_a_terminal_there_are_no_escapes_even_when_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    console = make_console(file)
    with status(console, "compiling"):
        pass
    tracker = ConsoleTracker(console, 123_456, clock=lambda: 0.0)
    console.print("[data] stays as it is: [bold] :smile:")
    console.print("a heading", style="bold red")
    tracker.log(123_455, metrics(123_455, **{"eval/loss": 4.5}))
    tracker.finish({})
    text = file.getvalue()
    assert ESCAPE not in text
    assert "\r" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert "[data] stays as it is: [bold] :smile:\n" in text


def test_a_phase_is_one_line_with_its_time():
    file = io.StringIO()
    with status(make_console(file), "compiling"):
        assert file.getvalue() == "compiling ... "
    assert re.fullmatch(r"compiling \.\.\. [\d.]+ m?s\n", file.getvalue())


def test_a_phase_that_fails_says_so_and_passes_the_error_on():
    file = io.StringIO()
    with pytest.raises(KeyError), status(make_console(file), "compiling"):
        raise KeyError
    assert re.fullmatch(r"compiling \.\.\. failed after [\d.]+ m?s\n", file.getvalue())


def said_every_16_seconds(monkeypatch, text, *how_far):
    """What a phase of this name says that is told this, 16 seconds apart."""
    now = [0.0]
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    file = io.StringIO()
    with status(make_console(file), text) as advance:
        for number, far in enumerate(how_far):
            now[0] = number * 16.0
            advance(*far)
    return file.getvalue().splitlines()


def test_a_long_phase_says_now_and_then_how_far_it_is(monkeypatch):
    how_far = [(done, 8, "programs") for done in range(9)]
    assert said_every_16_seconds(monkeypatch, "compiling", *how_far) == [
        "compiling ... ",
        "compiling: 2 of 8 programs in 0:32, about 1:36 left",
        "compiling: 4 of 8 programs in 1:04, about 1:04 left",
        "compiling: 6 of 8 programs in 1:36, about 0:32 left",
        "compiling ... 2:08",
    ]


def test_a_phase_of_unknown_length_says_how_much_is_done(monkeypatch):
    how_far = [(done * 1000, None, "MiB read") for done in range(4)]
    assert said_every_16_seconds(monkeypatch, "reading the checkpoint", *how_far) == [
        "reading the checkpoint ... ",
        "reading the checkpoint: 2,000 MiB read in 0:32",
        "reading the checkpoint ... 48.0 s",
    ]


def test_what_is_said_during_a_phase_has_lines_of_its_own():
    file = io.StringIO()
    console = make_console(file)
    with status(console, "starting"):
        console.print("still waiting")
        with status(console, "measuring"):
            pass
    lines = file.getvalue().splitlines()
    assert lines[:2] == ["starting ... ", "still waiting"]
    assert [line.partition(" ... ")[0] for line in lines[2:]] == ["measuring", "starting"]


def test_a_runs_console_hears_of_each_phase():
    heard, console = [], make_console(io.StringIO())
    console.phases = (lambda *how_far: heard.append(how_far),)
    with status(console, "compiling all of it", Phase.COMPILING) as advance:
        advance(1, 4, "programs")
    with status(console, "planning", Phase.PLANNING) as advance:
        advance(0.5)
    with status(console, "of no run"):
        pass
    assert heard == [
        ("compiling", None, None, ""),
        ("compiling", 1, 4, "programs"),
        ("planning", None, None, ""),
        ("planning", 0.5, 1.0, ""),
    ]


def test_intervals_are_round():
    numbers = [0.02, 1, 1.2, 4, 5, 6, 20, 21, 99, 501]
    assert [round_up(n) for n in numbers] == [1, 1, 2, 5, 5, 10, 20, 50, 100, 1000]


PRINTS = """
import sys
from launcher.report.console import make_console, status
from launcher.report.console import ConsoleTracker
console = make_console()
with status(console, "compiling"):
    pass
tracker = ConsoleTracker(console, 50)
for step in range(1, 51):
    tracker.log(step, {"train/loss": 1.0})
tracker.finish({})
print("trained", file=sys.stderr)
"""


@pytest.mark.devices
def test_a_closed_standard_output_ends_nothing():
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", PRINTS]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "trained\n")


@pytest.mark.devices
def test_a_full_disk_behind_standard_output_ends_nothing():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "trained\n")


@pytest.fixture
def terminal(monkeypatch):
    """A function that runs its argument with a console on a terminal: what was written to it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def run(action):
        master, slave = os.openpty()
        written = []

        def read():
            try:
                while chunk := os.read(master, 1 << 16):
                    written.append(chunk)
            except OSError:  # the other end is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with open(slave, "w", encoding="utf-8") as file:
            action(make_console(file))
        reader.join()
        os.close(master)
        return b"".join(written).decode()

    return run


def train_on(console):
    with status(console, "compiling"):
        pass
    tracker = ConsoleTracker(console, 20, clock=lambda: 0.0)
    for step in range(1, 16):
        tracker.log(step, metrics(step))
    tracker.finish({})


COLOUR = re.compile(r"\x1b\[[\d;]*3[1-8]")


def test_a_terminal_shows_a_bar_and_gets_its_cursor_back(terminal):
    text = terminal(train_on)
    assert "training" in text
    assert "15/20" in text
    assert COLOUR.search(text)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > 0  # shown again after it was hidden
    last_line = text.replace("\r", "").rstrip("\n").splitlines()[-1]
    assert last_line.endswith("step 15/20  loss 4.8500  12,345 tokens/s  85.2 ms/step")


def test_no_color_is_obeyed(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = terminal(train_on)
    assert "training" in text
    assert not COLOUR.search(text)


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert ESCAPE not in terminal(train_on)


def compile_on(console):
    heard = []
    console.phases = (lambda *how_far: heard.append(how_far),)
    with status(console, "compiling", Phase.COMPILING) as advance:
        for done in range(13):
            advance(done, 12, "programs")
            console.print(f"{done}")  # draws what is below it anew
    assert len(heard) == 14
    train_on(console)


SEQUENCES = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]")


def test_a_terminal_shows_which_program_is_compiled(terminal):
    text = SEQUENCES.sub("", terminal(compile_on)).replace("\r", "")
    assert "compiling 3 of 12 programs" in text
    assert re.search(r"^compiling 12 programs \.\.\. [\d.]+ m?s$", text, re.MULTILINE)


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_what_changes_fits_a_narrow_terminal(terminal, monkeypatch, columns):
    """A line that wraps would not be taken back; those that stay may wrap."""
    monkeypatch.setenv("COLUMNS", f"{columns}")
    drawn = re.split(r"[\r\n]+", SEQUENCES.sub("", terminal(compile_on)))
    stays = re.compile(r"step +\d+/|compiling (12 programs )?\.\.\.")
    assert [line for line in drawn if len(line) > columns and not stays.match(line)] == []
    assert any(len(line) == columns for line in drawn)
