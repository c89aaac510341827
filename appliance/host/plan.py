"""How one container takes over from another, as a table: state -> action -> next state. Pure.

The state is on the disk before its action begins, so a state says: everything before this action has happened, the
action itself perhaps. That is why every action must do nothing where it has been done already.

An *upgrade* obtains the new container by creating it, a *rollback* by taking the previous one; they differ in nothing
else but in what becomes of the new container when it fails.
"""

from enum import StrEnum


class Operation(StrEnum):
    """What is being done."""

    UPGRADE = "upgrade"
    ROLLBACK = "rollback"


class State(StrEnum):
    """How far it is. The old container runs until ``STOPPED``; the new one counts as good from ``READY`` on."""

    PLANNED = "planned"
    CREATED = "created"
    STOPPED = "stopped"
    ASIDE = "aside"
    PROMOTED = "promoted"
    STARTED = "started"
    READY = "ready"
    DROPPED = "dropped"
    DONE = "done"
    FAILED = "failed"
    HALTED = "halted"
    DISCARDED = "discarded"
    RESTORED = "restored"
    RESTARTED = "restarted"
    UNDONE = "undone"


class Action(StrEnum):
    """One change; its value is what a person reads while it runs."""

    OBTAIN_NEW = "preparing the new container"
    STOP_OLD = "stopping the old container"
    SET_OLD_ASIDE = "setting the old container aside"
    PROMOTE_NEW = "giving its name to the new container"
    START_NEW = "starting the new container"
    AWAIT_NEW = "waiting until the new container is ready"
    DROP_PREVIOUS = "removing the one before the old container"
    KEEP_OLD = "keeping the old container for a rollback"
    STOP_NEW = "stopping the new container"
    DISCARD_NEW = "discarding the new container"
    RESTORE_OLD = "giving its name back to the old container"
    RESTART_OLD = "starting the old container again"
    AWAIT_OLD = "waiting until the old container is ready"


TABLE: dict[State, tuple[Action, State]] = {
    State.PLANNED: (Action.OBTAIN_NEW, State.CREATED),
    State.CREATED: (Action.STOP_OLD, State.STOPPED),
    State.STOPPED: (Action.SET_OLD_ASIDE, State.ASIDE),
    State.ASIDE: (Action.PROMOTE_NEW, State.PROMOTED),
    State.PROMOTED: (Action.START_NEW, State.STARTED),
    State.STARTED: (Action.AWAIT_NEW, State.READY),
    State.READY: (Action.DROP_PREVIOUS, State.DROPPED),
    State.DROPPED: (Action.KEEP_OLD, State.DONE),
    State.FAILED: (Action.STOP_NEW, State.HALTED),
    State.HALTED: (Action.DISCARD_NEW, State.DISCARDED),
    State.DISCARDED: (Action.RESTORE_OLD, State.RESTORED),
    State.RESTORED: (Action.RESTART_OLD, State.RESTARTED),
    State.RESTARTED: (Action.AWAIT_OLD, State.UNDONE),
}
ENDS = frozenset({State.DONE, State.UNDONE})

# A failure of these leads back to the old container. From READY on the new one is good and only tidying is left.
REVERSIBLE = frozenset({State.PLANNED, State.CREATED, State.STOPPED, State.ASIDE, State.PROMOTED, State.STARTED})

# Where an interrupted change goes on. While the old container ran nobody had noticed anything: undo. A started
# container may have been stopped by the power loss: start it again before waiting for it.
_RESUME = {
    State.PLANNED: State.FAILED,
    State.CREATED: State.FAILED,
    State.STARTED: State.PROMOTED,
    State.RESTARTED: State.RESTORED,
}


def resumed(state: State, *, back: bool) -> State:
    """State to go on from after an interruption; ``back``: the user wants the old container, if there is a choice."""
    if back and state in REVERSIBLE:
        return State.FAILED
    return _RESUME.get(state, state)
