"""The proxy's client of the engine, byte for byte, against an engine that the test plays itself."""

import asyncio
import socket

import pytest

from appliance import engine_client
from appliance.engine_client import Connection, EngineClient, EngineLostError, EngineUnreachableError, Holder

HEAD = b"POST /x HTTP/1.1\r\nhost: engine\r\ncontent-length: 2\r\n\r\n"
ASKED = HEAD + b"{}"
SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\nok"
CHUNKED = (
    b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\ntrailer: x\r\n\r\n"
)


class Engine:
    """The other end of the socket, one step at a time."""

    def __init__(self, path):
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._open = [self._listener]

    async def accept(self):
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        connection.setblocking(False)
        self._open.append(connection)
        return connection

    def has_another(self):
        try:
            self._open.append(self._listener.accept()[0])
        except BlockingIOError:
            return False
        return True

    async def answer(self, connection, data=SHORT, asked=ASKED):
        assert await receive(connection, len(asked)) == asked
        await asyncio.get_running_loop().sock_sendall(connection, data)

    def close(self):
        for each in self._open:
            each.close()


async def receive(connection, length):
    data = b""
    while len(data) < length:
        piece = await asyncio.get_running_loop().sock_recv(connection, length - len(data))
        if not piece:
            break
        data += piece
    return data


async def readable(connection):
    """Until something has come that nobody reads."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(connection, event.set)
    await asyncio.wait_for(event.wait(), 20)
    loop.remove_reader(connection)


@pytest.fixture
def engine(tmp_path):
    engine = Engine(tmp_path / "engine.sock")
    yield engine
    engine.close()


@pytest.fixture
async def client(engine):
    client = EngineClient(engine.path)
    yield client
    client.close()
    await asyncio.sleep(0)  # the transports' own last step


def ask(client, holder=None):
    return asyncio.ensure_future(client.request(HEAD, b"{}", holder or Holder()))


async def whole(response):
    data = b""
    while not response.ended:
        data += await response.read()
    return data


async def whole_of(asked):
    response = await asked
    data = await whole(response)
    response.release()
    return data


async def used_once(engine, client):
    """A connection that has served one request, the engine's end of it."""
    asked = ask(client)
    connection = await engine.accept()
    await engine.answer(connection)
    response = await asked
    assert (response.status, response.headers) == (200, [(b"content-length", b"2"), (b"x-a", b"b")])
    assert await whole(response) == b"ok"
    response.release()
    return connection


async def test_a_connection_serves_one_request_after_the_other(engine, client):
    connection = await used_once(engine, client)
    for _ in range(3):
        asked = ask(client)
        await engine.answer(connection, CHUNKED)
        response = await asked
        assert (response.status, await whole(response)) == (201, b"abcde")
        assert response.headers == [(b"transfer-encoding", b"chunked")]
        response.release()
    assert not engine.has_another()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        SHORT + b"HTTP/1.1 200 OK\r\n",  # more than was asked for: it would be taken for the next answer
        SHORT + SHORT,
    ],
)
async def test_a_connection_that_can_not_be_used_again_is_closed(engine, client, answer):
    asked = ask(client)
    connection = await engine.accept()
    await engine.answer(connection, answer)
    response = await asked
    assert (response.status, await whole(response)) == (200, b"ok")
    response.release()
    assert await receive(connection, 1) == b""
    await used_once(engine, client)


async def test_an_idle_connection_that_says_something_is_closed(engine, client):
    connection = await used_once(engine, client)
    await asyncio.get_running_loop().sock_sendall(connection, SHORT)
    assert await receive(connection, 1) == b""
    await used_once(engine, client)


async def test_an_old_connection_is_not_used_again(engine, client, monkeypatch):
    """vLLM closes after 5 s of silence."""
    connection = await used_once(engine, client)
    monkeypatch.setattr(engine_client, "KEPT_SECONDS", 0.0)
    await used_once(engine, client)
    assert await receive(connection, 1) == b""


async def test_a_request_that_nobody_has_read_is_repeated(engine, client):
    """The engine closes an idle connection in the moment in which the next request is on its way."""
    connection = await used_once(engine, client)
    asked = ask(client)
    await readable(connection)
    connection.close()
    await engine.answer(await engine.accept())
    assert await whole_of(asked) == b"ok"
    assert not engine.has_another()


async def test_a_request_that_was_read_in_part_is_repeated(engine, client):
    connection = await used_once(engine, client)
    asked = ask(client)
    await receive(connection, len(ASKED) - 1)
    connection.close()
    await engine.answer(await engine.accept())
    assert await whole_of(asked) == b"ok"


async def test_a_request_that_was_read_is_never_repeated(engine, client):
    """It may have begun to generate, and it may be what the engine died of."""
    connection = await used_once(engine, client)
    asked = ask(client)
    assert await receive(connection, len(ASKED)) == ASKED
    connection.close()
    with pytest.raises(EngineLostError):
        await asked
    assert not engine.has_another()


async def test_a_request_is_repeated_once(engine, client):
    connection = await used_once(engine, client)
    asked = ask(client)
    await readable(connection)
    connection.close()
    connection = await engine.accept()
    await readable(connection)
    connection.close()
    with pytest.raises(EngineUnreachableError):
        await asked
    assert not engine.has_another()


async def test_no_engine(tmp_path):
    with pytest.raises(EngineUnreachableError):
        await EngineClient(str(tmp_path / "none.sock")).request(HEAD, b"{}", Holder())


@pytest.mark.parametrize("cut", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nx: y\r\n", b"no HTTP at all\r\n\r\n"])
async def test_an_answer_that_does_not_begin_is_lost(engine, client, cut):
    asked = ask(client)
    connection = await engine.accept()
    await engine.answer(connection, cut)
    connection.close()
    with pytest.raises(EngineLostError):
        await asked


@pytest.mark.parametrize("answer", [SHORT[:-1], CHUNKED[:-1], CHUNKED.replace(b"\r\n2\r\nde", b"\r\nzz\r\nde")])
async def test_an_answer_that_does_not_end_is_lost(engine, client, answer):
    asked = ask(client)
    connection = await engine.accept()
    await engine.answer(connection, answer)
    connection.close()
    response = await asked
    with pytest.raises(EngineLostError):
        await whole(response)
    response.release()
    await used_once(engine, client)


async def test_who_leaves_closes_the_connection(engine, client):
    holder = Holder()
    asked = ask(client, holder)
    connection = await engine.accept()
    assert await receive(connection, len(ASKED)) == ASKED
    holder.leave()
    with pytest.raises(EngineLostError):
        await asked
    assert await receive(connection, 1) == b""
    with pytest.raises(EngineLostError):
        await client.request(HEAD, b"{}", holder)


async def test_an_interim_answer_is_passed_over(engine, client):
    asked = ask(client)
    await engine.answer(await engine.accept(), b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + SHORT)
    response = await asked
    assert (response.status, len(response.headers), await whole(response)) == (200, 2, b"ok")
    response.release()


class Transport:
    """What a connection asks of its transport."""

    def __init__(self):
        self.reading = True
        self.aborted = False

    def writelines(self, data):
        self.written = b"".join(data)

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def abort(self):
        self.aborted = True


async def fed(pieces):
    connection = Connection(EngineClient(""))
    connection.connection_made(Transport())
    asked = asyncio.ensure_future(connection.ask(HEAD, b"{}"))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    await asked
    return connection


@pytest.mark.parametrize("answer", [SHORT, CHUNKED])
async def test_an_answer_may_be_cut_anywhere(answer):
    for at in range(1, len(answer)):
        connection = await fed([answer[:at], answer[at:]])
        assert await whole(connection) == {SHORT: b"ok", CHUNKED: b"abcde"}[answer], at


async def test_an_answer_that_nobody_reads_stops_the_engine():
    piece = b"%x\r\n%s\r\n" % (1 << 16, b"x" * (1 << 16))
    connection = await fed([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", piece * 4])
    assert connection._transport.reading
    connection.data_received(piece)
    assert not connection._transport.reading
    assert await connection.read() == b"x" * (5 << 16)
    assert connection._transport.reading


@pytest.mark.parametrize("data", [b"\r\n", SHORT])
async def test_bytes_that_nobody_asked_for_end_the_connection(data):
    new = Connection(EngineClient(""))
    new.connection_made(Transport())
    kept = await fed([SHORT])
    await whole(kept)
    kept.release()
    for connection in (new, kept):
        connection.data_received(data)
        assert connection._transport.aborted
        with pytest.raises(EngineUnreachableError):
            await connection.ask(HEAD, b"{}")
