"""From a profile to settings, and who wins where both the profile and the operator say something.

The order is: command line, environment, ``.env``, profile, default. Two rules more:

- Flags of vLLM are merged one by one: a flag of the operator's (``engine_args``) replaces the profile's flag of that
  name and no other. The same goes for variables.
- ``model`` and ``served_model_name`` belong to the profile that they were given beside. They replace its own, such as
  a hub id by the folder on a board without a network, but a switch to another profile brings that one's model.
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.profiles.schema import Profile
from appliance.settings import Settings, variable

FIELDS = (
    *("model", "served_model_name", "kv_cache_dtype", "kv_cache_gib", "max_model_len", "attention_backend"),
    *("engine_args", "engine_variables"),
)
_IDENTITY = ("model", "served_model_name")


def apply(profile: Profile, given: Settings) -> Settings:
    """Settings of an engine of a profile.

    Args:
        profile: what to run.
        given: what the operator set, without any profile.
    """
    wanted = _of(profile)
    fields = {name: value for name, value in wanted.items() if name not in _kept(profile, given)}
    # A name that was given beside another profile must not stick to this one's model.
    fields = dict.fromkeys(() if given.profile == profile.name else _IDENTITY, "") | fields
    names = flag_names(given.engine_args)
    args = [words for words in flags(profile) if not flag_names(words[:1]) & names]
    fields["engine_args"] = (*(word for words in args for word in words), *given.engine_args)
    fields["engine_variables"] = profile.environment | given.engine_variables
    return given.model_copy(update=fields | {"profile": profile.name})


def replaced(profile: Profile, given: Settings, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What of a profile the operator's settings take the place of, a line each."""
    lines = []
    for name in sorted(_kept(profile, given) & set(_of(profile))):
        lines.append(
            f"{name}={getattr(given, name)!r} ({variable(name)} or the command line) replaces the profile's "
            f"{_of(profile)[name]!r}"
        )
    ours = {flag for words in flags(profile) for flag in flag_names(words[:1])}
    lines += [f"{flag} in engine_args replaces the profile's" for flag in sorted(ours & flag_names(given.engine_args))]
    lines += [
        f"{name} in the environment replaces the profile's"
        for name in sorted(profile.environment)
        if environment.get(name) or name in given.engine_variables
    ]
    return lines


def flags(profile: Profile) -> list[tuple[str, ...]]:
    """The words of `vllm serve` for what the settings have no name for; one tuple a flag, in a fixed order."""
    found: list[tuple[str, ...]] = []
    if profile.max_num_seqs is not None:
        found.append(("--max-num-seqs", str(profile.max_num_seqs)))
    if profile.speculation is not None:
        found.append(("--speculative-config", _json(profile.speculation.config())))
    if profile.tool_call_parser is not None:
        found += [("--enable-auto-tool-choice",), ("--tool-call-parser", profile.tool_call_parser)]
    if profile.reasoning_parser is not None:
        found.append(("--reasoning-parser", profile.reasoning_parser))
    if profile.chat_template_kwargs:
        found.append(("--default-chat-template-kwargs", _json(profile.chat_template_kwargs)))
    return found + [_words(name.replace("_", "-"), value) for name, value in sorted(profile.vllm.items())]


def flag_names(words: Iterable[str]) -> set[str]:
    """Names of the flags among command line words; ``--no-x`` counts as ``--x``."""
    names = (word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    return {f"--{name.removeprefix('--').removeprefix('no-')}" for name in names}


def _words(name: str, value: Any) -> tuple[str, ...]:
    if value is True:
        return (f"--{name}",)
    if value is False:
        return (f"--no-{name}",)
    if isinstance(value, dict):
        return (f"--{name}", _json(value))
    return (f"--{name}", *(str(one) for one in (value if isinstance(value, list) else [value])))


def _of(profile: Profile) -> dict[str, Any]:
    values = {name: getattr(profile, name, None) for name in FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _kept(profile: Profile, given: Settings) -> set[str]:
    """Settings of the operator's that stay beside this profile."""
    kept = given.model_fields_set & set(FIELDS)
    return kept if given.profile == profile.name else kept - set(_IDENTITY)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
