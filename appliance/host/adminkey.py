"""The operator's key as a client sends it: from a file, or from the environment; never an argument."""

import os
from collections.abc import Mapping
from pathlib import Path

from appliance.host.errors import UsageError

VARIABLE = "MJOLNIR_ADMIN_KEY_FILE"
_HASH = "sha256:"


def admin_key(path: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """The first key of a file, which may be the appliance's own `admin_keys_file`; empty where none is named.

    Args:
        path: the file; None takes the one that MJOLNIR_ADMIN_KEY_FILE names.
        environment: where that is looked up.

    Raises:
        UsageError: no such file, no key in it, or only its hash.
    """
    named = str(path or environment.get(VARIABLE, ""))
    if not named:
        return ""
    try:
        lines = Path(named).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{named}: {getattr(error, 'strerror', None) or 'not text'}; accepted: a file with an admin key"
        ) from None
    found = next((line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
    key = found.partition(":")[2] if ":" in found else found
    if key.startswith(_HASH) or found.startswith(_HASH):
        raise UsageError(f"{named}: has only the key's hash; accepted: a file with the key itself")
    if not key:
        raise UsageError(f"{named}: has no key; accepted: one line with the key, or name:key")
    return key
