"""Samples of a run: when the model writes, what is shown and kept of it, and when it does not."""

import logging

import pytest

from launcher.config.compose import load
from launcher.driver.record import samples
from launcher.driver.record.samples import LARGEST, MOST_LINES, Samples, printable
from launcher.train.sampling import Sample


class Told:
    """Samples of a run, and what became of them."""

    def __init__(self, folder, *words, num_parameters=1000):
        self.lines, self.tables = [], []
        config = load(["train.steps=10", "train.eval_every=4", *words])
        self.samples = Samples(
            config,
            folder,
            num_parameters,
            self.lines.append,
            lambda name, columns, rows: self.tables.append((name, tuple(columns), [*rows])),
        )

    def due(self):
        return [step for step in range(1, 11) if self.samples.is_due(step)]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], [4, 8, 10]),
        (["train.eval_every=0"], []),
        (["train.sample_every=0"], []),
        (["train.sample_every=3"], [3, 6, 9, 10]),
        (["train.sample_every=5", "train.eval_every=0"], [5, 10]),
    ],
)
def test_samples_are_made_at_evaluations_or_as_often_as_is_said(tmp_path, words, steps):
    assert Told(tmp_path, *words).due() == steps


def test_a_sample_is_shown_kept_and_handed_to_trackers(tmp_path):
    told = Told(tmp_path, "prompt=[a,b]")
    assert told.due()
    assert told.samples.prompts == [[97], [98]]
    told.samples.take(Sample(4, (tuple(b"bc\n\tdef"), tuple(b"\x1b[31m"))))
    assert told.lines == [
        "sample after step 4:",
        "  abc",
        "      def",
        "  b\ufffd[31m",  # nothing that a terminal would obey
    ]
    assert (tmp_path / "samples" / "4.txt").read_text() == "abc\n\tdef\n\nb\x1b[31m\n"
    told.samples.take(Sample(8, (tuple(b"!"), tuple(b"?"))))
    rows = [(4, "abc\n\tdef"), (4, "b\x1b[31m"), (8, "a!"), (8, "b?")]
    assert told.tables[-1] == ("samples", ("step", "text"), rows)
    told.samples.take(Sample(8, (tuple(b"."), tuple(b","))))  # again, after a restart
    assert (tmp_path / "samples" / "8.txt").read_text() == "a.\n\nb,\n"
    assert told.tables[-1][2] == [*rows[:2], (8, "a."), (8, "b,")]


def test_the_last_sample_is_the_last_thing_shown(tmp_path):
    told = Told(tmp_path, "prompt=a")
    assert told.due()
    told.samples.take(Sample(10, (tuple(b"\n" * 30),)))
    assert told.lines == []
    told.samples.on_end(10, "done")
    assert told.lines == ["", "sample after step 10:", "  a", *["  "] * (MOST_LINES - 1)]
    told.samples.on_end(10, "done")
    assert len(told.lines) == MOST_LINES + 2


def test_no_text_outgrows_what_the_model_reads(tmp_path):
    told = Told(tmp_path, "model.sequence_length=16", "prompt=abcd", "generate.max_new_tokens=99")
    assert told.due()
    assert told.samples.most == 12


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model=mlp", "dataset=synthetic"], "dataset.name=synthetic is not text to continue"),
        (["model=bert"], "model.name=bert cannot generate text"),
    ],
)
def test_a_model_that_cannot_write_does_not_and_says_so_where_it_was_asked(
    tmp_path, caplog, words, problem
):
    caplog.set_level(logging.INFO, logger="launcher")
    assert Told(tmp_path, *words).due() == []
    assert caplog.messages == []
    assert Told(tmp_path, *words, "train.sample_every=2").due() == []
    (line,) = caplog.messages  # once
    assert line.startswith(f"no samples: {problem}")


def test_a_large_model_is_gathered_only_where_that_is_asked(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="launcher")
    assert Told(tmp_path, num_parameters=LARGEST // 2).due() == []
    (line,) = caplog.messages
    assert line == (
        "no samples: the model has 4.0 GiB of parameters, which would be moved for each; "
        "train.sample_every=… asks for them all the same"
    )
    asked = Told(tmp_path, "train.sample_every=5", num_parameters=LARGEST // 2)
    assert asked.due() == [5, 10]


def test_what_is_shown_holds_no_control_characters():
    assert printable("a\r\x00\u202eb\n\x9bc") == ["a\ufffd\ufffd\ufffdb", "\ufffdc"]


def test_a_sample_that_cannot_be_kept_ends_no_run(tmp_path, caplog):
    told = Told(tmp_path, "prompt=a")
    assert told.due()
    (tmp_path / "samples").write_text("a file")
    told.samples.take(Sample(4, (tuple(b"bc"),)))
    assert told.lines == ["sample after step 4:", "  abc"]
    assert "the sample is not kept (File exists); the run continues" in caplog.text


def failing(problem):
    """A function that raises `problem`."""

    def fail(*_):
        raise problem

    return fail


def test_a_text_that_cannot_be_decoded_ends_no_run(tmp_path, caplog):
    told = Told(tmp_path, "prompt=a")
    assert told.due()
    whole = told.samples._tokenizer
    told.samples._tokenizer = whole._replace(decode=failing(KeyError("Invalid token: 737")))
    told.samples.take(Sample(4, ((98, 737),)))
    assert told.lines == []
    (line,) = caplog.messages
    assert line == (
        "the sample after step 4 cannot be shown (KeyError: 'Invalid token: 737'); "
        "the run continues"
    )
    told.samples._tokenizer = whole
    told.samples.take(Sample(8, ((98,),)))
    assert told.lines == ["sample after step 8:", "  ab"]


def test_a_model_that_fails_to_write_is_not_asked_again(tmp_path, caplog):
    told = Told(tmp_path, "prompt=a")
    assert told.samples.is_due(4)
    told.samples.take(Sample(4, problem="TypeError: no such shape"))
    assert caplog.messages == [
        "the model writes no samples (TypeError: no such shape); the run continues"
    ]
    assert (told.lines, told.due()) == ([], [])


def test_a_tokenizer_that_fails_ends_no_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(samples, "tokenizer_of", failing(ValueError("not mine\nat all")))
    assert Told(tmp_path).due() == []
    assert caplog.messages == ["no samples: ValueError: not mine; the run continues"]
