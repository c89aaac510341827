"""Mjolnir's attention backend for vLLM: decode on the T5 kernel, everything else on a stock backend.

Importing this package imports neither torch nor vLLM: vLLM loads the plugin in its API server, its engine
core and every worker, and only the workers need the backend itself.
"""

import logging

__version__ = "0.1.0"

BACKEND_NAME = "MJOLNIR"
BACKEND_PATH = "mjolnir.backend.MjolnirAttentionBackend"


def register() -> None:
    """Make ``--attention-backend MJOLNIR`` resolve; the entry point of ``vllm.general_plugins``.

    Idempotent, and never raises: vLLM calls plugins unguarded in every process, and a failure here must not
    take down an engine that was asked for another backend.
    """
    try:
        from mjolnir.plugin import register_backend  # noqa: PLC0415  (vLLM is imported only from here on)

        register_backend()
    except Exception:
        logging.getLogger("vllm.mjolnir").warning("Mjolnir: could not register the backend", exc_info=True)
