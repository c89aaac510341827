"""Which Jetson this is, its software, and the mode of nvpmodel.

A container sees these files only where they are mounted: ``/etc/nv_tegra_release``, ``/etc/nvpmodel.conf`` and
``/var/lib/nvpmodel`` (read-only).
"""

import re

from appliance.board.files import text_of
from appliance.board.reading import Identity, PowerMode

# L4T's first two numbers and the JetPack release that ships them (NVIDIA's JetPack archive).
JETPACKS = {"38.2": "7.0", "38.4": "7.1", "39.2": "7.2"}

_RELEASE = re.compile(r"# R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)")
_MODE = re.compile(r"pmode:(\d+)")
_MODEL = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>")


def identity(root: str) -> Identity:
    """Board model, L4T and JetPack release; empty where this is no Jetson."""
    model = text_of(root, "proc/device-tree/model") or ""
    match = _RELEASE.search(text_of(root, "etc/nv_tegra_release") or "")
    if match is None:
        return Identity(model)
    l4t = f"{match[1]}.{match[2]}"
    return Identity(model, l4t, JETPACKS.get(".".join(l4t.split(".")[:2]), ""))


def power_mode(root: str) -> PowerMode | None:
    """The mode that nvpmodel last set, with the name that its configuration gives it."""
    match = _MODE.search(text_of(root, "var/lib/nvpmodel/status") or "")
    if match is None:
        return None
    number = int(match[1])
    names = {int(key): name for key, name in _MODEL.findall(text_of(root, "etc/nvpmodel.conf") or "")}
    return PowerMode(number, names.get(number, ""))
