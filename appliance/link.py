"""The supervisor's own client of the engine: health, metrics, self-test. Clients' requests go through the proxy's."""

import aiohttp

ENGINE = "http://engine"


def engine_link(socket: str) -> aiohttp.ClientSession:
    """A session with the engine on its Unix socket; one connection a request."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(socket, limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def is_healthy(link: aiohttp.ClientSession, seconds: float) -> bool:
    """Whether the engine says so within that time."""
    try:
        async with link.get(f"{ENGINE}/health", timeout=aiohttp.ClientTimeout(total=seconds)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def metrics_page(link: aiohttp.ClientSession, seconds: float, most_bytes: int = 16 << 20) -> str | None:
    """The engine's metrics, None when they did not come within that time."""
    try:
        async with link.get(f"{ENGINE}/metrics", timeout=aiohttp.ClientTimeout(total=seconds)) as response:
            if response.status != 200:
                return None
            return (await response.content.read(most_bytes)).decode(errors="replace")
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
