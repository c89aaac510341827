"""Waiting for the first of several things."""

import asyncio
from collections.abc import Awaitable


async def first_of(*works: Awaitable[object]) -> None:
    """Wait until one of several is done, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
