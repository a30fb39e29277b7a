"""Trials of a sweep by Optuna, in a journal in the sweep's folder (Optuna's ask and tell).

Each process of a sweep opens the journal for itself. A trial has a *place* among those that are
wanted. It runs in the folder of its place, and its result is recorded once: by its owner or, where
that is lost, by another process. The place of a lost trial gets a second one, with its settings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from launcher.config.compose import Asked
from launcher.config.errors import ConfigError
from launcher.config.search import Space
from launcher.config.sweep import MakePoint
from launcher.submit.points import JOURNAL

# Notes of a trial: its place (last, so that what has one is whole), who runs it, that this one was
# lost and is to be tried again, that it is the second one of its place.
_PLACE, _OWNER, _LOST, _SECOND = "place", "owner", "lost", "second"
_SETTINGS = "settings"  # a note of the study
_GRACE = 30  # seconds after which a lock is known to be of a dead process


class StudyTrial(NamedTuple):
    """A trial that runs: its number in the journal, its place, and the settings to try."""

    number: int
    place: int
    swept: tuple[str, ...]


class Study:
    """The journal of a sweep.

    Args:
        folder: the sweep's folder.
        space: what is searched.
        settings: a digest of the other settings, and the objective.

    Raises:
        ConfigError: the journal is of other settings, or damaged.
    """

    def __init__(self, folder: Path, space: Space, settings: str) -> None:
        self.space, self._path = space, folder / JOURNAL
        with self._alone():
            journal = JournalFileBackend(str(self._path), _Lock(self._path))
            self._storage = JournalStorage(journal)
            self._study = optuna.create_study(
                storage=self._storage,
                sampler=RandomSampler(),
                study_name=space.name,
                direction=space.direction,
                load_if_exists=True,
            )
            if _SETTINGS not in self._study.user_attrs:
                self._study.set_user_attr(_SETTINGS, settings)
            if self._study.user_attrs[_SETTINGS] != settings:
                raise self._of_others()
            self._placed()

    def take(self, place: int, owner: str) -> StudyTrial | None:
        """Return the trial that a job is to run; None if nothing is left to do.

        Args:
            place: the job's own place; once that is finished, it takes one whose trial was lost.
            owner: the job, which comes back to its own trial.
        """
        with self._alone():
            for trial in self._running():
                is_free = trial.user_attrs[_PLACE] == place and not trial.user_attrs[_OWNER]
                if is_free or trial.user_attrs[_OWNER] == owner:
                    self._note(trial, _OWNER, owner)
                    return self._trial(trial)
            if self.is_given_up:
                return None
            if place not in self._last():
                return self._ask(place, owner)
            vacant = sorted(self.vacant(), key=lambda each: each != place)
            return self._ask_again(vacant[0], owner) if vacant else None

    def tell(self, number: int, value: float | None) -> bool:
        """Tell a trial's result, None for a failure; return False if there is one already."""
        with self._alone():
            return self._tell(number, value)

    def tell_lost(self, number: int, is_repeated: bool) -> None:
        """Tell that a trial's owner is lost, and whether its place may get a second one."""
        with self._alone():
            trial = self._trials()[number]
            if trial.state == TrialState.RUNNING:
                self._note(trial, _LOST, is_repeated)
                self._tell(number, None)

    def release(self) -> None:
        """Give all trials that run to the next jobs of their places. No job may be alive."""
        with self._alone():
            for trial in self._running():
                self._note(trial, _OWNER, "")

    def running(self) -> dict[StudyTrial, str]:
        """Return the trials without a result, with their owners."""
        return {self._trial(trial): trial.user_attrs[_OWNER] for trial in self._running()}

    def vacant(self) -> list[int]:
        """Return the places whose trials were lost and may be tried again."""
        return [place for place, trial in self._last().items() if _is_vacant(trial)]

    def open_places(self) -> list[int]:
        """Return the places without a result, or with a lost trial that may be tried again."""
        return sorted({*range(self.space.trials)} - _ended(self._last()))

    @property
    def is_given_up(self) -> bool:
        """Whether more trials have failed than `hydra.sweeper.max_failure_rate` allows."""
        ended = [t.state for t in self._last().values() if t.state.is_finished()]
        return ended.count(TrialState.FAIL) > self.space.max_failure_rate * len(ended)

    def best(self) -> dict[str, Any] | None:
        """Return the best settings and their result; None before there is any."""
        if all(trial.state != TrialState.COMPLETE for trial in self._placed()):
            return None
        best = self._study.best_trial
        return {"name": "optuna", "best_params": best.params, "best_value": best.value}

    def _trials(self) -> list[FrozenTrial]:
        try:
            return self._study.get_trials(deepcopy=False)
        except (ValueError, KeyError) as error:
            raise _damaged(self._path, error) from None

    def _placed(self) -> list[FrozenTrial]:
        """Return all trials that were asked for to the end; no other is ever run."""
        placed = [t for t in self._trials() if _PLACE in t.user_attrs]
        if any(trial.distributions != self.space.values for trial in placed):
            raise self._of_others()
        return placed

    def _running(self) -> list[FrozenTrial]:
        return [trial for trial in self._placed() if trial.state == TrialState.RUNNING]

    def _last(self) -> dict[int, FrozenTrial]:
        return _by_place(self._placed())

    def _trial(self, trial: FrozenTrial) -> StudyTrial:
        return StudyTrial(trial.number, trial.user_attrs[_PLACE], self.space.words(trial.params))

    def _note(self, trial: FrozenTrial, name: str, value: Any) -> None:
        study = self._storage.get_study_id_from_name(self.space.name)
        known = self._storage.get_trial_id_from_study_id_trial_number(study, trial.number)
        self._storage.set_trial_user_attr(known, name, value)

    def _tell(self, number: int, value: float | None) -> bool:
        if self._trials()[number].state.is_finished():
            return False
        is_known = value is not None and not math.isnan(value)
        state = TrialState.COMPLETE if is_known else TrialState.FAIL
        self._study.tell(number, value if is_known else None, state=state)
        return True

    def _ask(self, place: int, owner: str) -> StudyTrial:
        known = self._trials()
        for trial in known:
            if trial.state == TrialState.RUNNING and _PLACE not in trial.user_attrs:
                self._tell(trial.number, None)  # whoever asked for it was killed meanwhile
        self._study.sampler = self.space.make_sampler(len(known))
        asked = self._study.ask(dict(self.space.values))
        self._study.sampler = RandomSampler()  # it leaves telling alone, unlike a grid's
        asked.set_user_attr(_OWNER, owner)
        asked.set_user_attr(_PLACE, place)
        return StudyTrial(asked.number, place, self.space.words(asked.params))

    def _ask_again(self, place: int, owner: str) -> StudyTrial:
        lost = self._last()[place]
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=lost.params,
                distributions=lost.distributions,
                user_attrs={_OWNER: owner, _PLACE: place, _SECOND: True},
                system_attrs=lost.system_attrs,
            )
        )
        return self._trial(self._last()[place])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from asking and telling."""
        lock = _Lock(self._path.with_suffix(".asking"))
        lock.acquire()
        try:
            self._cut_half_line()
            yield
        except (ValueError, KeyError) as error:
            raise _damaged(self._path, error) from None
        finally:
            lock.release()

    def _cut_half_line(self) -> None:
        """Cut off what a killed process left: Optuna would write behind it, and lose both lines."""
        with suppress(FileNotFoundError):
            content = self._path.read_bytes()
            if (end := content.rfind(b"\n") + 1) < len(content):
                os.truncate(self._path, end)

    def _of_others(self) -> ConfigError:
        problem = f"{self._path} is the journal of a sweep with other settings"
        return ConfigError(problem, "Choose another run.id for a sweep of these.")


def count_ended(folder: Path) -> int:
    """Return how many places of the sweep in a folder need no further trial.

    Raises:
        ConfigError: the journal is damaged.
    """
    path = folder / JOURNAL
    try:
        storage = JournalStorage(JournalFileBackend(str(path), _Lock(path)))
        [name] = optuna.get_all_study_names(storage)
        study = optuna.load_study(study_name=name, storage=storage)
        return len(_ended(_by_place(study.get_trials(deepcopy=False))))
    except (ValueError, KeyError) as error:
        raise _damaged(path, error) from None


def _by_place(trials: Sequence[FrozenTrial]) -> dict[int, FrozenTrial]:
    """Return the newest trial of each place."""
    return {t.user_attrs[_PLACE]: t for t in trials if _PLACE in t.user_attrs}


def _is_vacant(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get(_LOST)) and _SECOND not in trial.user_attrs


def _ended(last: Mapping[int, FrozenTrial]) -> set[int]:
    return {n for n, trial in last.items() if trial.state.is_finished() and not _is_vacant(trial)}


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged: {error}", "Choose another run.id.")


def run_study(
    study: Study,
    make_point: MakePoint,
    run: Callable[[Sequence[Asked], int], Sequence[float | None]],
) -> None:
    """Run the trials that are left, those that were cut off among them, and tell their results."""
    places, jobs = study.open_places(), study.space.jobs
    for n in range(0, len(places), jobs):
        taken = [study.take(place, str(place)) for place in places[n : n + jobs]]
        if not (trials := [trial for trial in taken if trial is not None]):
            return  # too many have failed
        values = run([make_point(trial.swept) for trial in trials], study.space.trials)
        for trial, value in zip(trials, values, strict=True):
            study.tell(trial.number, value)


class _Lock(JournalFileOpenLock):
    """A file that only one process can make, which every file system knows."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _GRACE)

    def release(self) -> None:
        """Give the lock back."""
        with suppress(RuntimeError):  # this process was too slow: another one took it
            super().release()
