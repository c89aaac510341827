"""Upgrades and rollbacks against a daemon in memory, cut off before and after each of its effects."""

import pytest

from appliance.host.errors import JournalError, UpgradeError, UsageError
from appliance.host.facts import PROJECT_LABEL, Container
from appliance.host.journal import Journal, Record
from appliance.host.manage import Manager
from appliance.host.plan import ENDS, TABLE, Action, Operation, State
from appliance.host.readiness import Waiter
from appliance.host.spec import Spec
from appliance.host.switch import Names, Switch
from tests.appliance.host_fake import FakeDaemon, PowerLoss

SPEC = Spec()


@pytest.fixture
def daemon() -> FakeDaemon:
    made = FakeDaemon()
    for name in ("app:1", "app:2", "app:3", "app:broken", "app:foreign"):
        made.add_image(name)
    return made


@pytest.fixture
def manager(daemon, tmp_path):
    """A new process: nothing but the daemon and the journal's folder outlives the one before."""

    def build() -> Manager:
        now = iter(range(10_000))
        waiter = Waiter(3, probe=daemon.probe, sleep=lambda _: None, clock=lambda: float(next(now)))
        journal, names = Journal(tmp_path / "state", "app"), Names("app")
        return Manager(daemon, journal, names, Switch(daemon, journal, names, waiter, 10, lambda *_: None))

    return build


def upgrade(manager, image: str):
    return manager().upgrade(image, None, SPEC, lambda _: None)


def record(tmp_path) -> Record:
    return Journal(tmp_path / "state", "app").read()


def test_every_state_but_the_ends_has_an_action():
    assert set(TABLE) == set(State) - ENDS
    assert sorted(action for action, _ in TABLE.values()) == sorted(Action)


def test_an_upgrade_keeps_one_previous_container(daemon, manager):
    manager().up("app:1", SPEC)
    assert upgrade(manager, "app:2").done == "upgrade"
    assert daemon.shown() == {"app": ("app:2", "running"), "app-previous": ("app:1", "exited")}
    upgrade(manager, "app:3")
    assert daemon.shown() == {"app": ("app:3", "running"), "app-previous": ("app:2", "exited")}


def test_a_broken_version_returns_to_the_old_one(daemon, manager, tmp_path):
    manager().up("app:1", SPEC)
    upgrade(manager, "app:2")
    with pytest.raises(UpgradeError, match="app:broken did not take over: not ready within 3 s: starting; the old"):
        upgrade(manager, "app:broken")
    assert daemon.shown() == {"app": ("app:2", "running"), "app-previous": ("app:1", "exited")}
    assert record(tmp_path).state is State.UNDONE
    assert (tmp_path / "state" / "app-failed.log").read_bytes() == b"log of id3\n"


def test_a_rollback_swaps_and_swaps_back(daemon, manager):
    manager().up("app:1", SPEC)
    upgrade(manager, "app:2")
    assert manager().rollback().done == "rollback"
    assert daemon.shown() == {"app": ("app:1", "running"), "app-previous": ("app:2", "exited")}
    manager().rollback()
    assert daemon.shown() == {"app": ("app:2", "running"), "app-previous": ("app:1", "exited")}


def test_an_image_that_fails_its_self_test_changes_nothing(daemon, manager):
    manager().up("app:1", SPEC)
    calls = list(daemon.calls)
    with pytest.raises(UpgradeError, match="exec format error; nothing was changed"):
        upgrade(manager, "app:foreign")
    assert daemon.calls == calls


def effects(daemon, manager, command) -> int:
    before = len(daemon.calls)
    command()
    return len(daemon.calls) - before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("target", ["app:3", "app:broken", "rollback"])
@pytest.mark.parametrize("then", ["up", "rollback", "upgrade"])
@pytest.mark.parametrize("number", range(9))
def test_cut_off_at_any_effect_the_next_command_ends_in_order(daemon, manager, tmp_path, target, when, then, number):
    manager().up("app:1", SPEC)
    upgrade(manager, "app:2")
    daemon.cut = (len(daemon.calls) + number, when)
    try:
        if target == "rollback":
            manager().rollback()
        else:
            upgrade(manager, target)
    except PowerLoss:
        pass
    except UpgradeError:
        assert target == "app:broken"
    daemon.cut = None
    if then == "up":
        manager().up("app:1", SPEC)
    elif then == "rollback":
        manager().rollback()
    else:
        upgrade(manager, "app:3")
    shown = daemon.shown()
    assert set(shown) == {"app", "app-previous"}
    assert (shown["app"][1], shown["app-previous"][1]) == ("running", "exited")
    assert "app:broken" not in {image for image, _ in shown.values()}
    if then == "upgrade":
        assert shown["app"][0] == "app:3"
    assert not record(tmp_path).pending


def test_what_compose_made_is_left_to_compose(daemon, manager):
    labels = {PROJECT_LABEL: "mjolnir"}
    daemon.containers["c"] = Container("c", "mjolnir-mjolnir-1", "sha256:app:1", "running", labels=labels)
    with pytest.raises(UsageError, match=r"made by docker compose \(project mjolnir\).*`docker compose up -d`"):
        upgrade(manager, "app:2")
    assert daemon.calls == []


def test_two_commands_at_once(manager, tmp_path):
    with Journal(tmp_path / "state", "app").held(), pytest.raises(JournalError, match="another mjolnir command"):
        manager().up("app:1", SPEC)


def test_a_foreign_journal_is_not_guessed_at(tmp_path):
    journal = Journal(tmp_path, "app")
    journal.write(Record(Operation.UPGRADE, State.STOPPED, old="a", new="b"))
    assert journal.read() == Record(Operation.UPGRADE, State.STOPPED, old="a", new="b")
    (tmp_path / "app.json").write_text('{"version": 2}')
    with pytest.raises(JournalError, match="not a record of this version"):
        journal.read()
