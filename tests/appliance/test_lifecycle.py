from itertools import product

import pytest

from appliance.lifecycle import TRANSITIONS, Event, IllegalTransition, State, advance

# Told a second time, by state, so that a slip in one of the two tables shows.
EXPECTED = {
    State.PREFLIGHT: {"checked": "starting", "fault": "failed", "stop": "draining", "switch": "switching"},
    State.STARTING: {"answered": "ready", "fault": "failed", "stop": "draining", "switch": "switching"},
    State.READY: {"fault": "failed", "stop": "draining", "switch": "switching"},
    State.FAILED: {"retry": "backoff", "give_up": "stopped", "stop": "draining"},
    State.BACKOFF: {"elapsed": "preflight", "stop": "draining", "switch": "switching"},
    State.SWITCHING: {"empty": "preflight", "stop": "draining"},
    State.DRAINING: {"empty": "stopped"},
    State.STOPPED: {},
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_of_state_and_event(state, event):
    following = EXPECTED[state].get(event)
    if following is None:
        with pytest.raises(IllegalTransition, match=f"{event} can't happen in state {state}"):
            advance(state, event)
    else:
        assert advance(state, event) == following


def test_every_state_can_be_reached_and_all_but_the_last_be_left():
    assert {State.PREFLIGHT} | set(TRANSITIONS.values()) == set(State)
    assert set(State) - {state for state, _ in TRANSITIONS} == {State.STOPPED}
