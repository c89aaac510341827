"""Where vLLM sends its traces: our setting, or OpenTelemetry's standard variables, as vLLM 0.32.0 takes them.

vLLM traces when it has ``--otlp-traces-endpoint``; of the variables it reads ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``
only (grpc unless set), and takes the endpoint as it is. OpenTelemetry's packages come with vLLM itself. A trace goes
on where the client's ``traceparent`` says so: the proxy passes it on.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from appliance.errors import SettingsError

_ANY = "OTEL_EXPORTER_OTLP_"
_TRACES = "OTEL_EXPORTER_OTLP_TRACES_"
_HTTP_PORT = 4318  # registered for OTLP over HTTP, as 4317 is for gRPC
_GRPC, _HTTP = "grpc", "http/protobuf"
_PATH = "/v1/traces"
_SERVICE_NAME = "mjolnir"


@dataclass(frozen=True)
class Tracing:
    """What an engine needs to send traces.

    Attributes:
        endpoint: for ``--otlp-traces-endpoint``, without credentials; empty where nothing is traced.
        environment: variables to add to the engine's.
    """

    endpoint: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def tracing(setting: str, environment: Mapping[str, str]) -> Tracing:
    """Where traces go.

    Args:
        setting: ``otlp_endpoint``; it wins over the variables.
        environment: the engine's.

    Raises:
        SettingsError: the address or the protocol can't be used.
    """
    given = {name: value for name, value in environment.items() if value.strip()}
    off = given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none"
    exact = "" if setting else given.get(f"{_TRACES}ENDPOINT", "")
    url = setting or exact or given.get(f"{_ANY}ENDPOINT", "")
    if off or not url:
        return Tracing()
    place = "otlp_endpoint" if setting else f"{_TRACES if exact else _ANY}ENDPOINT"
    host, credentials = _taken_apart(url, place)
    protocol = given.get(f"{_TRACES}PROTOCOL") or given.get(f"{_ANY}PROTOCOL") or _protocol(host)
    if protocol not in (_GRPC, _HTTP):
        raise SettingsError(f"{_ANY}PROTOCOL={protocol!r}: accepted: {_GRPC} or {_HTTP}")
    if protocol == _HTTP and not exact and not host.endswith(_PATH):
        host = host.rstrip("/") + _PATH  # as the standard has it: only the variable for traces is taken to the letter
    added = {f"{_TRACES}PROTOCOL": protocol, f"{_TRACES}ENDPOINT": host}
    if given.get(f"{_ANY}ENDPOINT") and urlsplit(given[f"{_ANY}ENDPOINT"]).password:
        added[f"{_ANY}ENDPOINT"] = host
    if credentials:
        headers = given.get(f"{_TRACES}HEADERS") or given.get(f"{_ANY}HEADERS", "")
        added[f"{_TRACES}HEADERS"] = ",".join(filter(None, (headers, f"authorization={quote(credentials)}")))
    if "OTEL_SERVICE_NAME" not in given and "service.name=" not in given.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        added["OTEL_SERVICE_NAME"] = _SERVICE_NAME
    return Tracing(host, added)


def _taken_apart(url: str, place: str) -> tuple[str, str]:
    """An address without its user part, and what that comes to in an ``authorization`` header: flags are no secret."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SettingsError(f"{place}: accepted: http://HOST:PORT or https://HOST:PORT of an OTLP collector")
    user, _, host = parts.netloc.rpartition("@")
    token = base64.b64encode(unquote(user).encode()).decode() if user else ""
    return parts._replace(netloc=host).geturl(), f"Basic {token}" if token else ""


def _protocol(url: str) -> str:
    return _HTTP if urlsplit(url).port == _HTTP_PORT else _GRPC
