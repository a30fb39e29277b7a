"""Lines for the user go where the entry point says, once and as they are."""

import logging
import subprocess
import sys

import pytest

from launcher.base.output import held_back, lines_to, warn_once

ROOT = logging.getLogger("launcher")
LOG = logging.getLogger("launcher.some.module")


@pytest.fixture(autouse=True)
def _as_it_was():
    before = ROOT.handlers[:], ROOT.level, ROOT.propagate
    yield
    assert (ROOT.handlers, ROOT.level, ROOT.propagate) == before


def test_lines_go_to_the_entry_point_as_they_are_and_nowhere_else(caplog, capsys):
    lines, outer = [], []
    with lines_to(outer.append):
        with lines_to(lines.append):
            LOG.info("100% of [bold]it[/bold]")
            LOG.warning("%s of %d", "one", 2)
            LOG.debug("not for the user")
            logging.getLogger("another.library").warning("its own")
        LOG.warning("outer")
    assert lines == ["100% of [bold]it[/bold]", "one of 2"]
    assert outer == ["outer"]
    assert caplog.messages == ["its own"]  # the root's handler
    assert capsys.readouterr() == ("", "")


def test_an_error_of_printing_is_raised_where_the_line_was_logged():
    def full(text):
        raise OSError("disk full")

    with lines_to(full), pytest.raises(OSError, match="disk full"):
        LOG.warning("text")


def test_lines_are_held_back_to_the_end_whatever_it_is():
    lines = []

    def interrupted():
        with held_back():
            LOG.info("a %s", "b")
            LOG.warning("c")
            assert lines == []
            raise KeyboardInterrupt

    with lines_to(lines.append):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert lines == ["a b", "c"]


def test_what_was_held_back_is_not_lost_if_the_logger_is_disabled(monkeypatch):
    """As `logging.config.dictConfig` in a user's module does to loggers that it does not name."""
    lines = []
    with lines_to(lines.append), held_back():
        LOG.warning("kept")
        monkeypatch.setattr(ROOT, "disabled", True)
    assert lines == ["kept"]


def test_a_warning_is_given_once(caplog):
    warn_once.cache_clear()
    for _ in range(2):
        warn_once(LOG, "it is ignored")
    assert caplog.messages == ["it is ignored"]


def printed(*lines):
    """What a program prints on standard output and standard error."""
    command = [sys.executable, "-c", "\n".join(["import logging", *lines])]
    told = subprocess.run(command, capture_output=True, text=True)
    return told.stdout, told.stderr


@pytest.mark.parametrize("configured", [True, False])
def test_without_an_entry_point_the_users_configuration_holds(configured):
    own = 'logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")'
    told = printed(
        own if configured else "",
        'log = logging.getLogger("launcher.base.files")',
        'log.info("fact")',
        'log.warning("ignored")',
    )
    assert told == ("", "INFO fact\nWARNING ignored\n" if configured else "ignored\n")


def test_a_worker_prints_them_for_its_life_whatever_a_library_configures():
    assert printed(
        "from launcher.base.output import take_over",
        "take_over(logging.StreamHandler())",
        'logging.basicConfig(level="INFO")',
        'logging.getLogger("launcher.x").info("once")',
    ) == ("", "once\n")
