import asyncio

import pytest

from appliance import openai_error
from appliance.lifecycle import State
from appliance.openai_error import ApiError
from appliance.queueing import AdmissionQueue, Limits, Turn

SESSION = object()


class Desk:
    """Admission and observer in one."""

    def __init__(self):
        self.state = State.READY
        self.inside = self.waiting = 0

    def admit(self):
        return SESSION if self.state is State.READY else openai_error.not_ready(self.state, 5)

    def entered(self):
        self.inside += 1

    def left(self):
        self.inside -= 1

    def queued(self):
        self.waiting += 1

    def dequeued(self, seconds):
        assert seconds >= 0
        self.waiting -= 1


def made(in_flight=1, queue=8, queue_seconds=60.0, hold_seconds=0.0):
    desk = Desk()
    return desk, AdmissionQueue(desk, desk, Limits(in_flight, queue, queue_seconds, hold_seconds))


def join(queue, key, order=None):
    turn = queue.enter(key)
    assert isinstance(turn, Turn), turn

    async def waited():
        answer = await queue.wait(turn)
        if order is not None:
            order.append(key)
        return answer

    return asyncio.ensure_future(waited())


def change(desk, queue, state):
    desk.state = state
    queue.state_changed(state)


async def test_keys_take_turns_and_each_is_first_come_first_served():
    desk, queue = made(queue=10)
    assert queue.enter("a") is SESSION
    order = []
    tasks = [join(queue, key, order) for key in ("a", "a", "a", "b", "c", "b")]
    marks = [queue._waiting["a"][0], queue._waiting["a"][1]]
    await asyncio.sleep(0)
    for task in range(6):
        queue.leave()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks = [left for left in tasks if not left.done()]
        if task == 0:
            assert (marks[0].answer.done(), marks[1].answer.done()) == (True, False)
    assert order == ["a", "b", "c", "a", "b", "a"]
    queue.leave()
    assert (desk.inside, desk.waiting, queue.depth) == (0, 0, 0)


async def test_the_limit_holds_and_a_newcomer_does_not_overtake():
    desk, queue = made(in_flight=2)
    assert [queue.enter("a"), queue.enter("b")] == [SESSION, SESSION]
    first, second = join(queue, "a"), join(queue, "b")
    queue.leave()
    assert isinstance(queue.enter("c"), Turn)
    assert desk.inside == 2
    assert await first is SESSION
    assert not second.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_full_is_429_and_a_greedy_key_gives_way():
    desk, queue = made(queue=3)
    queue.enter("a")
    greedy = [join(queue, "a") for _ in range(3)]
    refused = queue.enter("a")
    assert (refused.status, refused.code, dict(refused.headers)) == (429, "queue_full", {b"retry-after": b"5"})
    polite = join(queue, "b")
    given_way = await greedy[2]
    assert (given_way.status, given_way.code) == (429, "queue_full")
    assert (queue.depth, desk.waiting) == (3, 3)
    assert queue.enter("b").status == 429  # 2 of a, 1 of b: nothing to take away
    queue.leave()
    queue_of = await greedy[0]
    queue.leave()
    assert (queue_of, await polite) == (SESSION, SESSION)


async def test_no_queue_at_all():
    _, queue = made(queue=0)
    assert queue.enter("a") is SESSION
    assert queue.enter("b").status == 429


async def test_the_deadline_is_503():
    desk, queue = made(queue_seconds=0.01)
    queue.enter("a")
    late = await join(queue, "a")
    assert (late.status, late.code, dict(late.headers)) == (503, "queue_timeout", {b"retry-after": b"5"})
    assert (desk.waiting, queue.depth, desk.inside) == (0, 0, 1)


async def test_who_leaves_frees_the_place():
    desk, queue = made(queue=1)
    queue.enter("a")
    leaver = join(queue, "a")
    await asyncio.sleep(0)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    assert (queue.depth, desk.waiting) == (0, 0)
    stays = join(queue, "b")
    queue.leave()
    assert await stays is SESSION


async def test_who_leaves_in_the_moment_of_the_grant_gives_it_back():
    """The place would be lost for ever, and with 256 of them the appliance."""
    desk, queue = made()
    queue.enter("a")
    leaver, stays = join(queue, "a"), join(queue, "b")
    await asyncio.sleep(0)
    queue.leave()
    leaver.cancel()
    assert await stays is SESSION
    assert (leaver.cancelled(), desk.inside) == (True, 1)


@pytest.mark.parametrize("hold", [0.0, 60.0])
async def test_a_lost_engine_refuses_or_holds(hold):
    desk, queue = made(hold_seconds=hold)
    queue.enter("a")
    waiter = join(queue, "a")
    change(desk, queue, State.FAILED)
    if hold == 0:
        assert (await waiter).code == "engine_not_ready"
        assert isinstance(queue.enter("b"), ApiError)
        return
    held = join(queue, "b")
    queue.leave()
    await asyncio.sleep(0)
    assert not waiter.done()
    change(desk, queue, State.READY)
    assert await waiter is SESSION
    queue.leave()
    assert await held is SESSION


async def test_held_too_long_is_told_the_state():
    desk, queue = made(hold_seconds=0.01)
    change(desk, queue, State.STARTING)
    answer = await join(queue, "a")
    assert (answer.status, answer.code, "starting" in answer.message) == (503, "engine_not_ready", True)


async def test_a_drain_empties_the_queue():
    desk, queue = made(hold_seconds=60.0)
    queue.enter("a")
    waiters = [join(queue, key) for key in "abc"]
    change(desk, queue, State.DRAINING)
    assert {(answer.status, answer.code) for answer in await asyncio.gather(*waiters)} == {(503, "engine_not_ready")}
    assert queue.enter("a").code == "engine_not_ready"
    queue.leave()
    assert (desk.inside, desk.waiting, queue.depth) == (0, 0, 0)


async def test_who_gives_up_is_out_at_once():
    """Before its waiter has run: a grant in the same moment goes to the next, not to nobody."""
    desk, queue = made()
    queue.enter("a")
    turn = queue.enter("b")
    waiter, stays = asyncio.ensure_future(queue.wait(turn)), join(queue, "c")
    await asyncio.sleep(0)
    queue.give_up(turn)
    queue.leave()
    assert await waiter is None
    assert await stays is SESSION
    assert (desk.inside, desk.waiting, queue.depth) == (1, 0, 0)


async def test_what_was_granted_before_the_giving_up_is_still_to_be_given_back():
    desk, queue = made()
    queue.enter("a")
    turn = queue.enter("b")
    waiter = asyncio.ensure_future(queue.wait(turn))
    queue.leave()
    queue.give_up(turn)
    assert await waiter is SESSION
    queue.leave()
    assert desk.inside == 0


async def test_a_refusal_is_known_before_the_body_is_read():
    desk, queue = made(queue=2)
    assert queue.refusal("a") is None
    queue.enter("a")
    assert queue.refusal("a") is None
    waiting = [join(queue, "a") for _ in range(2)]
    assert queue.refusal("a").code == "queue_full"
    assert queue.refusal("b") is None  # it would take the place of one of a's
    assert (queue.depth, desk.inside) == (2, 1)
    change(desk, queue, State.DRAINING)
    assert queue.refusal("b").code == "engine_not_ready"
    await asyncio.gather(*waiting)


async def test_while_held_nobody_is_refused_before_the_queue_is_full():
    desk, queue = made(queue=1, hold_seconds=60.0)
    desk.state = State.STARTING
    assert queue.refusal("a") is None
    waiting = join(queue, "a")
    assert queue.refusal("a").code == "queue_full"
    change(desk, queue, State.READY)
    assert await waiting is SESSION
