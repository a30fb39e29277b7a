"""Messages to a group of `StepWorker`s.

Every message goes to every worker, in one order, and is not waited for. Its outcome is looked at
when the next one is sent or an answer is needed. Threads may send and wait side by side: one at a
time sends, and one at a time takes replies, those of the others too.
"""

from __future__ import annotations

import collections
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from launcher.api.calls import SURVIVED
from launcher.cluster.errors import ClusterError, WorkerError
from launcher.cluster.ray.worker import WATCH_SECONDS, Future, WorkerHandle, ready, share
from launcher.cluster.worker_group import WorkerGroup
from launcher.plan import Plan, PlanError
from launcher.runtime import ProcessMismatchError

_AHEAD = 8  # messages under way to a worker at most: their batches stay in memory
_LEAVE_SECONDS = 10.0  # for waiting threads to leave, after the session has ended


@dataclass(eq=False, slots=True)
class Reply:
    """The answer of one worker to one message.

    Attributes:
        future: the call.
        survived: whether the worker continues after an error as if nothing had been asked.
        starting: the method, if it may take longer than others; see `WorkerGroup.watch`.
        done: whether it has arrived.
        value: the answer.
        error: the worker's error, if it has survived one.
    """

    future: Future
    survived: bool
    starting: str
    done: bool = False
    value: Any = None
    error: WorkerError | None = None


class Messages:
    """All messages to the workers, and their answers.

    Once a worker has failed, died or hung, every use raises that error again: what the others hold
    is of no use without it. Only if a live worker refuses to compile, or a user's function raises
    there, is the error raised once. A wait that was interrupted can be started again.

    Attributes:
        sending: the lock under which messages are sent. Whoever chooses the next message by the
            state of the workers (an array is not consumed yet) holds it meanwhile.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.sending = threading.RLock()
        self._taking = threading.RLock()  # taken after `sending`, never before
        self._sent: list[collections.deque[Reply]] = [collections.deque() for _ in group.handles]
        self._new_steps = 0  # this many further calls of a step, and all between, are slow
        self._dropped: collections.deque[int] = collections.deque()  # filled by destructors
        self._failure: Exception | None = None

    def send(self, method: str, *arguments: Any, shared: Any = None) -> list[Reply]:
        """Queue a call of `StepWorker` in every worker and return without waiting.

        It waits only if too many messages are under way. It raises the errors of
        `WorkerGroup.gather` for an earlier call that has failed.

        Args:
            method: the method to call.
            *arguments: its arguments.
            shared: the last argument, if it is large: it is written once for all workers.
        """
        with self.sending:
            self._make_room()
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            # As bytes: Ray takes twice as long for a message that it has to look into.
            message = [pickle.dumps((method, dropped, arguments))]
            if shared is not None:
                message.append(share(shared))
            try:
                futures = self._group.call("do", *message)
            except BaseException:  # Ctrl-C between two workers
                self._failure = ClusterError(
                    "a call was interrupted after some workers had got it and others had not; call "
                    "launcher.shutdown() and launcher.init() again"
                )
                raise
            if method in ("compile", "create"):
                self._new_steps = 2  # the second is answered once the first is done
            # A user's function compiles no step: it is slow only behind what does.
            slow = self._new_steps > 0 and (method != "foreach" or any(self._sent))
            replies = [Reply(f, method in SURVIVED, method if slow else "") for f in futures]
            if method == "run" and self._new_steps:
                self._new_steps -= 1
            if method == "warm_up":  # which waits for its step
                self._new_steps = 0
            for sent, reply in zip(self._sent, replies, strict=True):
                sent.append(reply)
            return replies

    def answers(self, replies: Sequence[Reply]) -> list[Any]:
        """Wait for replies and return their values.

        Raises:
            WorkerError: a worker failed: at once, in whichever call; for a call that the workers
                survive, once all have answered.
            HungError: a worker did not answer for too long.
            RayEndedError: Ray ended.
        """
        while missing := [reply for reply in replies if not reply.done]:
            with self._taking:
                if all(reply.done for reply in missing):  # another thread has taken them
                    continue
                if not self._take(wait=True):  # taken, and never handed over: a bug
                    raise ClusterError(f"the reply of {missing[0].future.worker.name} is lost")
        errors = [reply.error for reply in replies if reply.error is not None]
        if errors:  # that of the worker that failed, not of those that only follow
            raise min(errors, key=lambda error: error.error_type == ProcessMismatchError.__name__)
        return [reply.value for reply in replies]

    def drop(self, number: int) -> None:
        """Free an array or a compiled step with the next message."""
        self._dropped.append(number)

    def close(self, why: Exception) -> None:
        """Refuse all further use with the error `why`, which also ends the waits of other threads.

        On return no thread uses Ray here.
        """
        self._failure = why
        self._group.close(why)
        for lock in (self.sending, self._taking):
            if lock.acquire(timeout=_LEAVE_SECONDS):
                lock.release()

    def _make_room(self) -> None:
        """Look at the replies that are there, and wait for some if too many are under way."""
        while True:
            full = any(len(sent) >= _AHEAD for sent in self._sent)
            if not self._taking.acquire(blocking=full):
                break  # another thread takes them
            try:
                if not self._take(wait=full and any(len(sent) >= _AHEAD for sent in self._sent)):
                    break
            finally:
                self._taking.release()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, *, wait: bool) -> bool:
        """Look at the oldest reply of every worker; return whether there was one.

        The caller holds `_taking`.
        """
        self._check()
        heads = {sent[0].future: sent for sent in self._sent if sent}
        if not heads:
            return False
        try:
            if wait:
                # The workers get the same calls in one order: the least far one is waited for.
                starting = max(heads.values(), key=len)[0].starting
                done = self._first_of(list(heads), starting)
            else:
                done = ready(list(heads), timeout=0)
        except ClusterError as error:
            self._fail(error)
        for future in done:
            reply = heads[future][0]
            try:
                reply.value = future.result()
            except (WorkerError, ClusterError) as error:
                if not reply.survived or not isinstance(error, WorkerError) or error.died:
                    self._fail(error)
                reply.error = error
            reply.done = True
            heads[future].popleft()
        return bool(done)

    def _first_of(self, futures: list[Future], starting: str) -> list[Future]:
        """Wait until any of the calls is over and return all that are, however they ended."""
        watch = self._group.watch(starting=bool(starting), method=starting)
        while not (done := ready(futures, timeout=WATCH_SECONDS)):
            self._check()
            watch([future.worker for future in futures])
        return done

    def _fail(self, error: WorkerError | ClusterError) -> NoReturn:
        self._check()  # what ended all is the cause
        try:
            raise self._group.cause_of(error) if isinstance(error, WorkerError) else error
        except (WorkerError, ClusterError) as cause:
            self._failure = cause
            raise


_AGAIN = "call launcher.shutdown() and launcher.init() to run this one"


class Connection:
    """The workers' connection: a process group, or parameter servers alone.

    Args:
        group: the workers.
        serve: starts so many parameter servers for so many workers.
    """

    def __init__(
        self, group: WorkerGroup, serve: Callable[[int, int], Sequence[WorkerHandle]]
    ) -> None:
        self._group, self._serve = group, serve
        self._servers: int | None = None  # None before the first use

    @property
    def by_servers(self) -> bool:
        """Whether the workers reach one another through parameter servers."""
        return bool(self._servers)

    def open(self, servers: int = 0) -> None:
        """Connect the workers, by so many servers or, with none, as a group, unless they are."""
        if self._servers is not None:
            return
        self._group.check_open()  # else servers would be started for nobody
        if servers:
            self._group.use_servers(self._serve(servers, len(self._group.handles)))
        else:
            self._group.join()
        self._servers = servers

    def open_for(self, plan: Plan) -> None:
        """Connect the workers as a plan needs it, unless they are.

        Raises:
            PlanError: they are connected in another way.
        """
        wanted = plan.reduction.servers
        self.open(wanted)
        if len(self._group.handles) == 1 or self._servers == wanted:
            return
        if wanted and self._servers:
            raise PlanError(
                f"the plan has {wanted} parameter servers, and the first one of this session had "
                f"{self._servers}: give ParameterServer the same `servers`, or {_AGAIN}"
            )
        if wanted:
            raise PlanError(
                "the workers of this session are connected for collectives, since they were used "
                f"before a step was compiled for method=launcher.ParameterServer(); {_AGAIN}"
            )
        raise PlanError(
            "the workers of this session reach one another through parameter servers alone, since "
            "its first step was compiled for method=launcher.ParameterServer(), and this plan "
            f"needs collectives; an evaluation takes the train step as its method; {_AGAIN}"
        )
