"""How many clients' requests are in the engine, and when there are none."""

import asyncio


class Inside:
    """A counter that can be waited for."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def enter(self) -> None:
        """A request has been admitted."""
        self.count += 1
        self._none.clear()

    def leave(self) -> None:
        """An admitted request is done with."""
        self.count -= 1
        if self.count == 0:
            self._none.set()

    async def none(self) -> None:
        """Return when there is none."""
        await self._none.wait()
