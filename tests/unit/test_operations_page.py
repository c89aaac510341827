"""docs/operations.md names every setting, variable, route and metric there is, and none that there is not."""

import inspect
import re
from pathlib import Path

from appliance.lifecycle import State
from appliance.metrics import Metrics
from appliance.proxy import ROUTES
from appliance.settings import Settings, variable
from appliance.tally import Tally
from mjolnir import env
from mjolnir.names import STATS_DIR_VARIABLE, FallbackReason, StepKind

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
NAMES = set(re.findall(r"`([^`\s]+)`", PAGE))


def test_names_every_setting() -> None:
    assert set(Settings.model_fields) <= NAMES


def test_names_every_variable_of_the_backend_and_no_other() -> None:
    read = set(re.findall(r'"(MJOLNIR_[A-Z_0-9]+)"', inspect.getsource(env.BackendSettings))) | {STATS_DIR_VARIABLE}
    own = set(map(variable, Settings.model_fields)) - {STATS_DIR_VARIABLE}
    others = {"MJOLNIR_<NAME>", "MJOLNIR_CACHE", *own}
    named = {name for name in NAMES if name.startswith("MJOLNIR_") and name.partition("=")[0] not in others}
    assert named == read


def test_names_every_route() -> None:
    assert {route.decode() for route in ROUTES} <= {
        name.removeprefix("GET ").removeprefix("POST ") for name in NAMES
    } | set(re.findall(r"`(?:GET|POST) ([^`]+)`", PAGE))


def test_names_every_metric_and_no_other(tmp_path: Path) -> None:
    page = Metrics(Tally(tmp_path)).page()
    exported = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    named = {name for name in NAMES if re.fullmatch(r"(mjolnir|appliance)_[a-z0-9_]+", name)}
    assert named == exported


def test_names_every_kind_and_reason() -> None:
    assert {*StepKind, *FallbackReason} <= NAMES
    assert State.READY in PAGE
