"""OpenTelemetry: what is set arrives at the engine, credentials neither in its flags nor in a log."""

import json
from pathlib import Path

import pytest

from appliance.command import build
from appliance.errors import SettingsError
from appliance.lifecycle import State
from appliance.redaction import Redactor, secrets_of
from appliance.tracing import Tracing, tracing

ANY, TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"


@pytest.mark.parametrize(
    ("setting", "environment", "endpoint", "protocol"),
    [
        ("http://c:4317", {}, "http://c:4317", "grpc"),
        ("http://c:4318", {}, "http://c:4318/v1/traces", "http/protobuf"),
        ("https://c/otlp/", {f"{ANY}PROTOCOL": "http/protobuf"}, "https://c/otlp/v1/traces", "http/protobuf"),
        ("http://c:4318", {f"{TRACES}PROTOCOL": "grpc", f"{ANY}PROTOCOL": "http/protobuf"}, "http://c:4318", "grpc"),
        ("", {f"{ANY}ENDPOINT": "http://e:4318"}, "http://e:4318/v1/traces", "http/protobuf"),
        (
            "",
            {f"{ANY}ENDPOINT": "http://e:1", f"{TRACES}ENDPOINT": "http://t:4318/x"},
            "http://t:4318/x",
            "http/protobuf",
        ),
        ("http://s:4317", {f"{TRACES}ENDPOINT": "http://t:4318/x"}, "http://s:4317", "grpc"),
    ],
)
def test_where_traces_go(setting, environment, endpoint, protocol):
    found = tracing(setting, environment)
    assert found.endpoint == endpoint
    added = {f"{TRACES}PROTOCOL": protocol, f"{TRACES}ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "mjolnir"}
    assert found.environment == added


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {f"{ANY}ENDPOINT": " "},
        {f"{ANY}ENDPOINT": "http://e:1", "OTEL_SDK_DISABLED": "True"},
        {f"{ANY}ENDPOINT": "http://e:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_asked_for(environment):
    assert tracing("", environment) == Tracing()


@pytest.mark.parametrize(
    ("setting", "environment", "said"),
    [
        ("collector:4317", {}, "otlp_endpoint: accepted: http://HOST:PORT"),
        ("http://u:s3cret@", {}, "otlp_endpoint: accepted"),
        ("", {f"{TRACES}ENDPOINT": "http://h:x"}, f"{TRACES}ENDPOINT: accepted"),
        ("http://c:1", {f"{ANY}PROTOCOL": "http/json"}, f"{ANY}PROTOCOL='http/json': accepted: grpc or http/protobuf"),
    ],
)
def test_what_can_t_be_used_costs_one_line_without_what_it_was(setting, environment, said):
    with pytest.raises(SettingsError, match=f"^{said}") as caught:
        tracing(setting, environment)
    assert "s3cret" not in str(caught.value)


def test_credentials_go_by_the_environment_only(settings_for, tmp_path):
    environment = {f"{ANY}ENDPOINT": "http://joe:0ld-pass@old:4317", f"{ANY}HEADERS": "x-team=ml"}
    settings = settings_for(otlp_endpoint="http://ann:s3cret-p%40ss@collector:4318")
    launch = build(settings, environment, tmp_path, tmp_path)
    assert launch.command[-4:-2] == ("--otlp-traces-endpoint", "http://collector:4318/v1/traces")
    assert launch.environment[f"{TRACES}HEADERS"] == "x-team=ml,authorization=Basic%20YW5uOnMzY3JldC1wQHNz"
    assert not any("pass" in word or "p%40ss" in word for word in launch.command)
    assert "0ld-pass" not in str(launch.environment)
    redactor = Redactor(secrets_of(settings.engine_args, {**environment, "OTLP": settings.otlp_endpoint}))
    line = redactor(f"export to {settings.otlp_endpoint} failed: s3cret-p@ss; {environment}")
    assert "s3cret" not in line
    assert "0ld-pass" not in line


def of_process(pid: int, what: str) -> list[str]:
    return Path(f"/proc/{pid}/{what}").read_text().split("\0")


async def test_flags_variables_and_trace_context_arrive_at_the_engine(appliance):
    async with appliance(otlp_endpoint="http://ann:s3cret@127.0.0.1:4317") as running:
        await running.states.reach(State.READY)
        pid = json.loads(await running.get("/version"))["pid"]
        words = of_process(pid, "cmdline")
        variables = dict(pair.split("=", 1) for pair in of_process(pid, "environ") if pair)
        trace = {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "tracestate": "a=1,b=2",
            "baggage": "user=1",
        }
        async with running.http.post("/tokenize", json={}, headers=trace) as answer:
            seen = dict((await answer.json())["headers"])
    at = words.index("--otlp-traces-endpoint")
    assert words[at + 1] == "http://127.0.0.1:4317"
    assert "--disable-uvicorn-access-log" in words
    assert not any("s3cret" in word for word in words)
    assert variables[f"{TRACES}HEADERS"] == "authorization=Basic%20YW5uOnMzY3JldA%3D%3D"
    assert (variables[f"{TRACES}PROTOCOL"], variables["OTEL_SERVICE_NAME"]) == ("grpc", "mjolnir")
    assert {name: seen[name] for name in trace} == trace


async def test_a_users_own_flags_take_the_place_of_ours(appliance):
    given = ("--otlp-traces-endpoint", "http://mine:1", "--disable-uvicorn-access-log")
    async with appliance(*given, otlp_endpoint="http://ours:1") as running:
        await running.states.reach(State.READY)
        pid = json.loads(await running.get("/version"))["pid"]
        words = of_process(pid, "cmdline")
    assert words.count("--otlp-traces-endpoint") == words.count("--disable-uvicorn-access-log") == 1
    assert "http://ours:1" not in words
