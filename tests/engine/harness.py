"""The appliance as a process of its own, and the step counters as numbers to calculate with."""

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 300
STOP_SECONDS = 60


class Appliance:
    """A running appliance and its address."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        """Everything the appliance and its engine wrote so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        """Body of a GET that succeeds."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as reply:
            return reply.read().decode()

    def wait_until_ready(self) -> None:
        """Wait for readiness, or fail with the log's end as soon as the process has ended."""
        for _ in range(START_SECONDS * 5):
            try:
                code = self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                if self.is_ready():
                    return
            else:
                pytest.fail(f"the appliance ended with {code}:\n{self.log[-3000:]}")
        pytest.fail(f"not ready after {START_SECONDS} s:\n{self.log[-3000:]}")

    def is_ready(self) -> bool:
        """Whether the appliance takes requests."""
        try:
            self.get("/health/ready")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every sample of the metrics page, by name and sorted labels."""
        families = text_string_to_metric_families(self.get("/metrics"))
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def steps(self) -> "Steps":
        """What the counters show now."""
        return Steps(self.metrics())

    def client(self) -> openai.OpenAI:
        """The official client, as a user has it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def engine_processes(self) -> list[psutil.Process]:
        """Every process that the appliance started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)


class Steps:
    """The step counters of one look at the metrics page; two looks can be subtracted."""

    def __init__(self, samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
        self._samples = samples

    def __sub__(self, earlier: "Steps") -> "Steps":
        return Steps({key: value - earlier._samples.get(key, 0) for key, value in self._samples.items()})

    def t5(self, kind: str) -> int:
        return int(self._samples["mjolnir_t5_steps_total", (("kind", kind),)])

    def fallback(self, reason: str) -> int:
        return int(self._samples["mjolnir_fallback_steps_total", (("reason", reason),)])

    def total(self, name: str) -> int:
        return int(sum(value for (sample, _), value in self._samples.items() if sample == name))

    @property
    def t5_steps(self) -> int:
        return self.total("mjolnir_t5_steps_total")

    @property
    def fallback_steps(self) -> int:
        return self.total("mjolnir_fallback_steps_total")

    @property
    def tokens(self) -> int:
        return self.total("mjolnir_t5_tokens_total") + self.total("mjolnir_fallback_tokens_total")

    @property
    def engine_steps(self) -> int:
        """vLLM's own count of scheduler iterations."""
        return self.total("vllm:iteration_tokens_total_count")
