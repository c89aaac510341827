"""Would a profile run on this machine? Looks at files only: asks nobody, starts nothing."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.board.jetson import identity
from appliance.board.memory import memory
from appliance.command import has_gpu, is_local
from appliance.errors import ModelError
from appliance.modelcheck import check_model
from appliance.profiles.choice import flag_names, replaced
from appliance.profiles.schema import Profile
from appliance.profiles.store import Store
from appliance.settings import Settings


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at and is not as it should be.

    Attributes:
        fatal: the profile can't run here; else it may.
        text: one line.
    """

    fatal: bool
    text: str


def findings(profile: Profile, chosen: Settings, *, root: str = "/", gpu: bool | None = None) -> list[Finding]:
    """What on this machine stands in a profile's way; empty when nothing does.

    Args:
        profile: what is to run.
        chosen: its settings, see ``choice.apply``: the operator's may name another model.
        root: of the file system that tells about the board.
        gpu: whether there is one; None looks.
    """
    found = [_model(chosen)]
    machine = memory(root)
    needed = profile.needs.memory_gib
    if machine.total is not None and machine.total < needed * 2**30:
        found.append(Finding(True, f"needs {needed:g} GiB of memory, this machine has {machine.total / 2**30:.1f}"))
    elif machine.available is not None and machine.available < needed * 2**30:
        now = machine.available / 2**30
        found.append(Finding(False, f"needs {needed:g} GiB of memory, {now:.1f} are available now"))
    if profile.needs.device != "cpu" and not (has_gpu() if gpu is None else gpu):
        found.append(Finding(True, f"needs a {profile.needs.device}: there is no NVIDIA GPU here"))
    elif profile.needs.device == "thor" and "Thor" not in identity(root).model:
        found.append(Finding(False, "made for a Thor board, which this machine is not"))
    return [one for one in found if one is not None]


def warnings(chosen: Settings, environment: Mapping[str, str]) -> list[str]:
    """What of the profile of some settings the operator's own settings replace; empty without a profile."""
    if not chosen.profile:
        return []
    profile = Store(chosen.profiles_dir).get(chosen.profile)
    return [f"profile {profile.name}: {line}" for line in replaced(profile, chosen.given, environment)]


def _model(chosen: Settings) -> Finding | None:
    if is_local(chosen.model):
        given = flag_names(chosen.engine_args)
        try:
            check_model(
                Path(chosen.model).expanduser(),
                weights="--load-format" not in given,
                tokenizer=not given & {"--tokenizer", "--skip-tokenizer-init"},
            )
        except (ModelError, OSError) as error:
            return Finding(True, str(error))
        return None
    if chosen.offline:
        return Finding(True, f"model {chosen.model} is a hub id, which can't be used offline; accepted: its folder")
    if not any(_snapshots(chosen.model)):
        return Finding(False, f"model {chosen.model} is not in the hub's cache: the first start downloads it")
    return None


def _snapshots(model: str) -> list[Path]:
    """Versions of a hub model in the cache, whose layout is huggingface_hub's."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        return [one for one in folder.iterdir() if (one / "config.json").exists()]
    except OSError:
        return []
