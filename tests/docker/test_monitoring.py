"""Rules and dashboard: valid, each alert tested by promtool, and every metric one that is really exported."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.metrics import Metrics
from appliance.tally import Tally

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "docker" / "prometheus"
DASHBOARD = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "mjolnir.json").read_text())
RULES = "".join(path.read_text() for path in sorted((PROMETHEUS / "rules").glob("*.yml")))
USED = re.compile(r"\b(?:appliance_|mjolnir_|vllm:)[a-z0-9_]+")
SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*words: str) -> None:
    done = subprocess.run(
        [str(shutil.which("promtool")), *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_configuration_and_alerts_fire() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "fleet.yml")
    promtool("test", "rules", *(str(path) for path in sorted((PROMETHEUS / "tests").glob("*.yml"))))


def test_every_alert_is_driven_and_documented() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES))
    tests = "".join(path.read_text() for path in (PROMETHEUS / "tests").glob("*.yml"))
    assert alerts <= set(re.findall(r"exp_labels[^\n]*", tests) and re.findall(r"alertname: (\w+)\n", tests))
    assert alerts == set(re.findall(r"^### (Mjolnir\w+)$", (ROOT / "docs" / "monitoring.md").read_text(), re.MULTILINE))


def exported(folder: Path) -> set[str]:
    """Family names: our registry's, those of the board's collector, and vLLM's, from its source."""
    names = set(re.findall(r"^# TYPE (\S+) ", Metrics(Tally(folder)).page(), re.MULTILINE))
    board = (ROOT / "appliance" / "board_metrics.py").read_text()
    names |= set(re.findall(r'"(appliance_[a-z_]+)"', board))
    names |= {f"appliance_memory_{field}_bytes" for field in ("total", "free", "available", "cached")}
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    constants = (node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant))
    return {SUFFIX.sub("", n) for n in names} | {
        text for text in constants if isinstance(text, str) and USED.fullmatch(text)
    }


def test_every_metric_is_exported(tmp_path: Path) -> None:
    expressions = [t["expr"] for panel in DASHBOARD["panels"] for t in panel.get("targets", [])]
    used = set(USED.findall("\n".join([*expressions, *re.findall(r"expr: \|?([^@]*?)(?:for|labels|- )", RULES)])))
    assert {SUFFIX.sub("", name) for name in used} - exported(tmp_path) == set()
    assert len(used) > 25


def test_panels_have_ids_of_their_own_and_the_provisioned_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    source = (ROOT / "docker" / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    for panel in DASHBOARD["panels"]:
        assert panel["type"] == "row" or f"uid: {panel['datasource']['uid']} " in source
