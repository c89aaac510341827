"""Who gets to the engine next: a limit on requests inside, and a bounded, timed queue that is fair between keys.

Round robin over the keys' queues: a key with a thousand requests waiting delays another one's first by one turn. When
the queue is full, a request of a key that has fewer waiting takes the place of the newest one of the key that has
most, so that nobody can fill the queue against the others either.

While no engine takes requests, they are refused at once (``hold_seconds`` 0) or held for so long.
"""

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from appliance import openai_error
from appliance.engine_client import EngineClient
from appliance.lifecycle import State
from appliance.openai_error import ApiError
from appliance.watcher import Watcher

_RETRY_AFTER_SECONDS = 5
_OVER = (State.DRAINING, State.STOPPED)

Answer = EngineClient | ApiError


class Admission(Protocol):
    """What is asked of the supervisor, and told to it."""

    def admit(self) -> Answer:
        """A client of the engine if it takes requests now, else the answer to give."""
        ...

    def entered(self) -> None:
        """A request has been admitted."""
        ...

    def left(self) -> None:
        """An admitted request is done with."""
        ...


class Observer(Protocol):
    """Who is told about waiting requests."""

    def queued(self) -> None:
        """A request has begun to wait."""
        ...

    def dequeued(self, seconds: float) -> None:
        """It has ended to wait, for whatever reason."""
        ...


@dataclass(frozen=True)
class Limits:
    """How much is let in.

    Attributes:
        in_flight: requests inside the engine at one time.
        queue: requests that wait.
        queue_seconds: longest wait for a place in the engine.
        hold_seconds: longest wait of a request that found no ready engine; 0 refuses it at once.
    """

    in_flight: int
    queue: int
    queue_seconds: float
    hold_seconds: float = 0.0


class Turn:
    """A request's place in the queue."""

    def __init__(self, key: str, seconds: float) -> None:
        self.key = key
        self.seconds = seconds
        self.began = time.perf_counter()
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class AdmissionQueue(Watcher):
    """The way into the engine. Not thread-safe: one event loop."""

    def __init__(self, admission: Admission, observer: Observer, limits: Limits) -> None:
        self._admission = admission
        self._observer = observer
        self._limits = limits
        self._inside = 0
        self._waiting: OrderedDict[str, deque[Turn]] = OrderedDict()
        self._over = False

    @property
    def depth(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def refusal(self, key: str) -> ApiError | None:
        """What ``enter`` would refuse a request with now, so that nobody sends a body in vain."""
        answer = self._admission.admit()
        if isinstance(answer, ApiError):
            if self._over or self._limits.hold_seconds <= 0:
                return answer
        elif self._inside < self._limits.in_flight and not self._waiting:
            return None
        if self.depth < self._limits.queue or self._may_displace(key) is not None:
            return None
        return openai_error.queue_full(self._limits.queue, _RETRY_AFTER_SECONDS)

    def enter(self, key: str) -> Answer | Turn:
        """A client of the engine, which has to be given back with ``leave``; a refusal; or a place in the queue."""
        answer = self._admission.admit()
        held = isinstance(answer, ApiError)
        if held and (self._over or self._limits.hold_seconds <= 0):
            return answer
        if not held and self._inside < self._limits.in_flight and not self._waiting:
            self._take_place()
            return answer
        if self.depth >= self._limits.queue and not self._make_room(key):
            return openai_error.queue_full(self._limits.queue, _RETRY_AFTER_SECONDS)
        turn = Turn(key, self._limits.hold_seconds if held else self._limits.queue_seconds)
        self._waiting.setdefault(key, deque()).append(turn)
        self._observer.queued()
        return turn

    async def wait(self, turn: Turn) -> Answer | None:
        """Wait for one's turn; None when it was given up.

        Cancelling it gives up the place in the queue, and in the engine if it was granted.
        """
        try:
            await asyncio.wait((turn.answer,), timeout=turn.seconds)
            if turn.answer.cancelled():
                return None
            return turn.answer.result() if turn.answer.done() else self._expired(turn)
        except asyncio.CancelledError:
            if turn.answer.done() and not turn.answer.cancelled() and not isinstance(turn.answer.result(), ApiError):
                self.leave()
            raise
        finally:
            self._remove(turn)
            self._observer.dequeued(time.perf_counter() - turn.began)

    def give_up(self, turn: Turn) -> None:
        """End a wait, because the client has left. What was granted already is still to be given back."""
        self._remove(turn)
        turn.answer.cancel()

    def leave(self) -> None:
        """Give back a place in the engine; the next in turn gets it."""
        self._inside -= 1
        self._admission.left()
        self._dispatch()

    def state_changed(self, state: State) -> None:
        """Let in who was held when the engine is ready; refuse them when it never will be."""
        self._over = state in _OVER
        answer = self._admission.admit()
        if not isinstance(answer, ApiError):
            self._dispatch()
        elif self._over or self._limits.hold_seconds <= 0:
            for turn in [turn for turns in self._waiting.values() for turn in turns]:
                turn.answer.set_result(answer)
            self._waiting.clear()

    def _dispatch(self) -> None:
        while self._waiting and self._inside < self._limits.in_flight:
            answer = self._admission.admit()
            if isinstance(answer, ApiError):
                return
            key, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # behind all the others
            self._take_place()
            turn.answer.set_result(answer)

    def _take_place(self) -> None:
        self._inside += 1
        self._admission.entered()

    def _expired(self, turn: Turn) -> ApiError:
        answer = self._admission.admit()
        if isinstance(answer, ApiError):
            return answer
        return openai_error.queue_timeout(turn.seconds, _RETRY_AFTER_SECONDS)

    def _make_room(self, key: str) -> bool:
        """Give the place of the longest queue's newest request to a key that has at least two fewer waiting."""
        longest = self._may_displace(key)
        if longest is None:
            return False
        self._waiting[longest].pop().answer.set_result(
            openai_error.queue_full(self._limits.queue, _RETRY_AFTER_SECONDS)
        )
        return True

    def _may_displace(self, key: str) -> str | None:
        """The key with the longest queue, if that is longer than this key's by two or more."""
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=None)
        if longest is None or len(self._waiting[longest]) < len(self._waiting.get(key, ())) + 2:
            return None
        return longest

    def _remove(self, turn: Turn) -> None:
        """Take a request out of the queue if it is still there."""
        turns = self._waiting.get(turn.key)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[turn.key]
