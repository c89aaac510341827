"""Settings of the appliance: ``MJOLNIR_*`` variables, a ``.env`` file and the command line, checked at one place.

The command line wins over the environment, the environment over ``.env``. A blank value counts as not set, so a
commented-out line and an empty one in ``.env`` mean the same. Variables of the attention backend share our prefix;
they are passed on to the engine and not looked at here.
"""

import difflib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from dotenv import dotenv_values
from pydantic import Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from appliance.errors import SettingsError
from mjolnir.names import DEFAULT_STATS_DIR

PREFIX = "MJOLNIR_"
ENV_FILE = ".env"

# The backend reads these inside the engine (mjolnir/env.py is their reader).
BACKEND_PREFIXES = ("MJOLNIR_ATTN_", "MJOLNIR_KV", "MJOLNIR_DRAFT_VOCAB", "MJOLNIR_LM_HEAD")
BACKEND_NAMES = ("MJOLNIR_CONFIG",)
# Read by the command line where it speaks to a running appliance.
CLIENT_NAMES = ("MJOLNIR_ADMIN_KEY_FILE",)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


Source = PydanticBaseSettingsSource


class _NotBlank(Source):
    """A source of settings without the values that are nothing but spaces."""

    def __init__(self, settings_cls: type[BaseSettings], source: Source) -> None:
        super().__init__(settings_cls)
        self._source = source

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        return {name: v for name, v in self._source().items() if not (isinstance(v, str) and v.isspace())}


class Settings(BaseSettings):
    """Everything that `mjolnir serve` can be told.

    Attributes:
        host: address that the appliance listens on; the default can be reached from this machine only.
        port: TCP port of the appliance; 0 takes any free one.
        model: folder with a model, or the id of one on the Hugging Face hub.
        served_model_name: name that clients use for the model; empty means its folder's name or its hub id.
        attention_backend: vLLM attention backend; empty leaves the choice to vLLM.
        kv_cache_dtype: format of the KV cache.
        calibrate: make the scale file of a 6-bit KV cache before the first start, where there is none.
        kv_cache_gib: size of the KV cache, GiB; unset means 1 on a CPU and vLLM's own choice on a GPU.
        max_model_len: longest prompt plus answer, tokens; unset means the model's own limit.
        start_timeout_seconds: how long a start may show no progress. A cold start may compile in silence for
            ten minutes, so this limits silence and not the whole start.
        drain_seconds: how long a stop waits for answers that are being written.
        stop_seconds: how long the engine may take to end after SIGTERM before it is killed.
        restart_limit: consecutive failed starts after which the appliance gives up.
        backoff_seconds: pause after the first failure; it doubles with each further one.
        backoff_cap_seconds: longest pause between two starts.
        crash_limit: losses of engines that had been ready, within the window, after which the appliance gives up.
        crash_window_seconds: that window, counted in time that engines serve.
        hang_seconds: how long a ready engine may make no progress while requests run.
        self_test: let the engine answer one short request before clients' requests reach it.
        memory_floor_gib: a start that leaves less memory available is ended, GiB; unset means 3 % of the machine's,
            at least 0.5 and at most 4.
        settle_seconds: longest wait for an ended engine's memory to come back before the next start.
        max_body_mib: largest request body, MiB.
        api_keys_file: keys of the clients, see ``appliance.keys``; unset asks nobody for a key.
        admin_keys_file: keys for `/metrics`, `/status` and `/`; unset leaves them open.
        allow_anonymous: listen on an address that the network reaches though there are no API keys.
        max_in_flight: requests inside the engine at one time. vLLM batches up to 256 by default and would queue
            the rest itself, without a limit, a deadline or fairness between keys.
        max_queue: requests that wait for a place.
        queue_seconds: longest wait for a place; OpenAI's clients wait 600 s for an answer.
        hold_seconds: longest wait of a request while no engine is ready. 0 answers 503 with Retry-After at once:
            a start takes minutes, clients try again by themselves, and a router can ask another board meanwhile.
        stats_dir: folder under which the engine's counters files live.
        cache_dir: folder of everything that is worth keeping between starts.
        log_level: least severe message that is shown.
        log_format: text, or one JSON object a line; unset means progress and colours on a terminal, text elsewhere.
        access_log: one line for each request of a client, without what it asked.
        otlp_endpoint: collector of OpenTelemetry that vLLM sends its traces to, see ``appliance.tracing``.
        offline: never ask the Hugging Face hub for anything.
        engine_args: further `vllm serve` flags, passed on as they are.
        engine_variables: variables that the engine gets unless the environment has them, as a JSON object.
        profile: name of a profile, see ``appliance.profiles``; what is given otherwise wins over what it says.
        profiles_dir: folder of the user's profiles.
        engine_command: program that is started instead of `vllm serve`, for a wrapper such as a profiler; it
            gets the same arguments.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65535)
    model: str = ""
    served_model_name: str = ""
    attention_backend: str = "MJOLNIR"
    kv_cache_dtype: str = "fp8"
    calibrate: bool = False
    kv_cache_gib: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    start_timeout_seconds: float = Field(1200.0, gt=0)
    drain_seconds: float = Field(30.0, ge=0)
    stop_seconds: float = Field(20.0, gt=0)
    restart_limit: int = Field(5, ge=1)
    backoff_seconds: float = Field(1.0, gt=0)
    backoff_cap_seconds: float = Field(60.0, gt=0)
    crash_limit: int = Field(5, ge=1)
    crash_window_seconds: float = Field(1800.0, gt=0)
    hang_seconds: float = Field(180.0, gt=0)
    self_test: bool = True
    memory_floor_gib: float | None = Field(None, ge=0)
    settle_seconds: float = Field(10.0, ge=0)
    max_body_mib: int = Field(32, ge=1)
    api_keys_file: Path | None = None
    admin_keys_file: Path | None = None
    allow_anonymous: bool = False
    max_in_flight: int = Field(256, ge=1)
    max_queue: int = Field(256, ge=0)
    queue_seconds: float = Field(60.0, gt=0)
    hold_seconds: float = Field(0.0, ge=0)
    stats_dir: Path = Path(DEFAULT_STATS_DIR)
    cache_dir: Path = Path("~/.cache/mjolnir")
    log_level: LogLevel = "info"
    log_format: LogFormat | None = None
    access_log: bool = True
    otlp_endpoint: str = ""
    offline: bool = False
    engine_args: Annotated[tuple[str, ...], NoDecode] = ()
    engine_command: Annotated[tuple[str, ...], NoDecode] = ()
    engine_variables: dict[str, str] = Field(default_factory=dict)
    profile: str = ""
    profiles_dir: Path = Path("~/.config/mjolnir/profiles")

    _given: "Settings | None" = PrivateAttr(None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        """Flags, then the environment without its blank values: pydantic itself passes over the empty ones only."""
        return init_settings, _NotBlank(settings_cls, env_settings)

    @property
    def given(self) -> "Settings":
        """These settings as they were given, without what a profile said."""
        return self._given or self

    @field_validator("engine_args", "engine_command", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Cut a value from the environment into arguments the way a shell would."""
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("cache_dir", "stats_dir", "profiles_dir", "api_keys_file", "admin_keys_file")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


def load(env_file: str | os.PathLike[str] = ENV_FILE, **flags: Any) -> Settings:
    """Read the settings; ``flags`` are those of the command line, None where one was not given.

    Raises:
        SettingsError: an unknown name, or a value that can't be used; one line that says what is accepted.
    """
    settings = load_given(env_file, **flags)
    return with_profile(settings, settings.profile) if settings.profile else settings


def load_given(env_file: str | os.PathLike[str] = ENV_FILE, **flags: Any) -> Settings:
    """As ``load``, without what the profile says."""
    _refuse_unknown({**dotenv_values(env_file), **os.environ})
    given = {name: value for name, value in flags.items() if value is not None}
    # Foreign names in .env (tokens, compose's own variables) are not ours to judge: the names with our prefix were
    # checked above, and pydantic's "forbid" then guards the flags.
    return _checked({**_from_env_file(env_file), **given})


def with_profile(settings: Settings, name: str) -> Settings:
    """Settings for an engine of another profile; what was given at the start stays as it is.

    Args:
        settings: with or without a profile.
        name: of the profile; empty means none.

    Raises:
        SettingsError: there is no such profile, or it can't be used.
    """
    from appliance.profiles import choice  # noqa: PLC0415  (few starts need YAML)
    from appliance.profiles.store import Store  # noqa: PLC0415

    given = settings.given
    if name:
        chosen = choice.apply(Store(given.profiles_dir).get(name), given)
    else:
        chosen = given.model_copy(update={"profile": ""})
    chosen._given = given
    return chosen


def _checked(values: dict[str, Any]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError(_one_line(error)) from None


def engine_environment(env_file: str | os.PathLike[str] = ENV_FILE) -> dict[str, str]:
    """What the engine may see of the environment and of ``.env``: everything but the supervisor's settings."""
    merged = {name: value or "" for name, value in dotenv_values(env_file).items()}
    merged |= {name: value for name, value in os.environ.items() if value.strip() or name not in merged}
    own = {variable(name) for name in Settings.model_fields}
    return {name: value for name, value in merged.items() if name not in own}


def variable(field: str) -> str:
    """Name of a setting in the environment."""
    return PREFIX + field.upper()


def _from_env_file(env_file: str | os.PathLike[str]) -> dict[str, str]:
    """Settings of ``.env`` that the environment does not override."""
    values = dotenv_values(env_file)
    found: dict[str, str] = {}
    for field in Settings.model_fields:
        value = values.get(variable(field))
        if value and value.strip() and not os.environ.get(variable(field), "").strip():
            found[field] = value.strip()
    return found


def _refuse_unknown(variables: Mapping[str, str | None]) -> None:
    known = {variable(name) for name in Settings.model_fields}
    for name in sorted(variables):
        if not name.startswith(PREFIX) or name in known or name in BACKEND_NAMES or name in CLIENT_NAMES:
            continue
        if name.startswith(BACKEND_PREFIXES):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; accepted: {', '.join(sorted(known))}"
        raise SettingsError(f"{name}: there is no such setting{hint}")


def _one_line(error: ValidationError) -> str:
    """The first problem of a validation, as: setting, value, what is accepted."""
    problem = error.errors(include_url=False)[0]
    field = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{field}: there is no such setting"
    accepted = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ").split(", unable")[0]
    flag = f"--{field.replace('_', '-')}"
    return f"{field}={problem['input']!r}: accepted: {accepted} ({flag} or {variable(field)})"
