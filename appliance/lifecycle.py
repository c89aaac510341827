"""The life of the engine as a table: which state follows which event. Pure.

::

    preflight ─CHECKED─▶ starting ─ANSWERED─▶ ready
        │                   │                   │
        └───────FAULT───────┴───────┬───────────┘
                                    ▼
    preflight ◀─ELAPSED─ backoff ◀─RETRY─ failed ─GIVE_UP─▶ stopped

    STOP leads from every state but stopped to draining, and EMPTY from there to stopped. SWITCH leads from every
    state in which something is waited for (preflight, starting, ready, backoff) to switching, and EMPTY from there to
    preflight.
"""

from enum import StrEnum


class State(StrEnum):
    """What the supervisor is doing: the values of ``appliance_engine_state``."""

    PREFLIGHT = "preflight"  # checking that a start can work at all; no engine runs
    STARTING = "starting"  # an engine runs and does not answer yet
    READY = "ready"  # requests are proxied
    SWITCHING = "switching"  # nothing new is let in; what runs may finish, then another engine starts
    DRAINING = "draining"  # nothing new is let in; what runs may finish
    STOPPED = "stopped"  # the last state: no engine, and there will be none
    FAILED = "failed"  # an engine was lost; its processes are being ended and the cause looked for
    BACKOFF = "backoff"  # a pause before the next start


class Event(StrEnum):
    """What happened to the engine, or was asked for."""

    CHECKED = "checked"  # preflight found nothing wrong
    ANSWERED = "answered"  # the engine said that it is healthy
    FAULT = "fault"  # a check failed, a start failed or stood still, an engine ended unasked
    RETRY = "retry"  # the fault is worth another start
    GIVE_UP = "give_up"  # it is not
    ELAPSED = "elapsed"  # the pause is over
    SWITCH = "switch"  # the operator asked for another engine
    STOP = "stop"  # a signal asked the appliance to end
    EMPTY = "empty"  # drained, and every process of the engine is gone


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PREFLIGHT, Event.CHECKED): State.STARTING,
    (State.PREFLIGHT, Event.FAULT): State.FAILED,
    (State.PREFLIGHT, Event.STOP): State.DRAINING,
    (State.STARTING, Event.ANSWERED): State.READY,
    (State.STARTING, Event.FAULT): State.FAILED,
    (State.STARTING, Event.STOP): State.DRAINING,
    (State.READY, Event.FAULT): State.FAILED,
    (State.READY, Event.STOP): State.DRAINING,
    (State.FAILED, Event.RETRY): State.BACKOFF,
    (State.FAILED, Event.GIVE_UP): State.STOPPED,
    (State.FAILED, Event.STOP): State.DRAINING,
    (State.BACKOFF, Event.ELAPSED): State.PREFLIGHT,
    (State.BACKOFF, Event.STOP): State.DRAINING,
    (State.PREFLIGHT, Event.SWITCH): State.SWITCHING,
    (State.STARTING, Event.SWITCH): State.SWITCHING,
    (State.READY, Event.SWITCH): State.SWITCHING,
    (State.BACKOFF, Event.SWITCH): State.SWITCHING,
    (State.SWITCHING, Event.EMPTY): State.PREFLIGHT,
    (State.SWITCHING, Event.STOP): State.DRAINING,
    (State.DRAINING, Event.EMPTY): State.STOPPED,
}


class IllegalTransition(Exception):  # noqa: N818  (a bug of ours, not an error of the user's)
    """An event that can't happen in the present state."""


def advance(state: State, event: Event) -> State:
    """The state that follows.

    Raises:
        IllegalTransition: the event can't happen in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} can't happen in state {state}") from None
