"""What the vLLM plugin does: make the name MJOLNIR resolve, in every process of the engine."""

import logging

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import register_backend as override_backend

from mjolnir import BACKEND_NAME, BACKEND_PATH
from mjolnir.env import BackendSettings

logger = logging.getLogger("vllm.mjolnir")


def has_native_member() -> bool:
    """Whether vLLM's enum has MJOLNIR as a member of its own, as our patch adds it."""
    member = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    return member is not None and member is not AttentionBackendEnum.CUSTOM


def register_backend() -> None:
    """Make ``--attention-backend MJOLNIR`` resolve to our class; does nothing where our patch is applied.

    On a stock vLLM the name becomes an alias of the member CUSTOM. A member of its own, made at run time, would
    not do: members pickle by value, and a spawned engine core unpickles its configuration before it has loaded
    any plugin.
    """
    if BackendSettings.from_env().disabled or has_native_member():
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND_PATH:
        logger.warning(
            "Mjolnir: CUSTOM is already taken by %s; MJOLNIR stays unregistered. "
            "Apply Mjolnir's patches to vLLM, or unload the other plugin.",
            custom.get_path(),
        )
        return
    override_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    AttentionBackendEnum._member_map_.setdefault(BACKEND_NAME, custom)
