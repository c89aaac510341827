"""Which FlashAttention vLLM chooses: the patched functions against the unpatched ones, over all that they look at.

The unpatched source is the installed one with our patch taken back by the patch queue's own tools. Both run as
modules of their own here, with a platform, settings, configuration and FlashAttention builds that the test sets.
"""

import ast
import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance import patchqueue
from appliance.patchformat import parse_patch
from mjolnir import fa4_probe

PATCHES = Path(__file__).resolve().parents[2] / "patches"
PATCH = "flash-attn-sm110.patch"
FA_UTILS = "vllm/v1/attention/backends/fa_utils.py"
INTERFACE = "vllm/vllm_flash_attn/cute/interface.py"

# All that changes an answer: every limit in the functions has a value on either side.
ARGUMENTS = [
    dict(zip(("requires_alibi", "head_size", "head_size_v", "has_sinks", "requires_softcap", "kv_cache_block_size",
              "supports_fa4_hd256"), values, strict=True))
    for values in itertools.product(
        (False, True), (None, 64, 128, 192, 256, 512), (None, 128, 256), (False, True), (False, True),
        (None, 16, 256), (False, True),
    )
]  # fmt: skip
BUILDS = [set(some) for count in range(4) for some in itertools.combinations((2, 3, 4), count)]
OTHER_MAJORS = [(8, 9), (9, 0), (10, 3), (12, 0)]  # nothing looks at the minor


def config(version: int | None = None, dtype: str = "auto", contexts: int = 1, **model: Any) -> Any:
    plain = {"is_diffusion": False, "is_mm_prefix_lm": False, "rswa_window": None, "hf_text_config": SimpleNamespace()}
    return SimpleNamespace(
        attention_config=SimpleNamespace(flash_attn_version=version),
        model_config=SimpleNamespace(**plain | model, get_head_size=lambda: 128),
        cache_config=SimpleNamespace(cache_dtype=dtype, block_size=128, user_specified_block_size=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=contexts),
    )


CONFIGS = [
    None,
    *(config(version) for version in (None, 2, 3, 4)),
    config(dtype="fp8"),
    config(dtype="fp8", version=4),
    config(contexts=2),
    config(is_diffusion=True),
    config(is_mm_prefix_lm=True),
    config(rswa_window=64),
    config(hf_text_config=SimpleNamespace(attn_logit_softcapping=30.0)),
]


class Platform:
    """What the functions ask of vLLM's platform."""

    capability: tuple[int, int] = (8, 0)
    kind = "cuda"

    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def is_xpu(self) -> bool:
        return self.kind == "xpu"

    def is_rocm(self) -> bool:
        return self.kind == "rocm"

    def get_device_capability(self) -> Any:
        return SimpleNamespace(major=self.capability[0], minor=self.capability[1])

    def is_device_capability_family(self, family: int) -> bool:
        return self.capability[0] == family // 10


class World:
    """Two fa_utils in one machine that the test describes; ``asked`` counts what reached the probe."""

    def __init__(self) -> None:
        self.platform, self.envs = Platform(), SimpleNamespace(VLLM_BATCH_INVARIANT=False)
        self.config: Any = None
        self.builds: set[int] = set()
        self.asked: list[Any] = []
        self.told: list[str] = []
        sources = texts()
        self.old, self.new = (self.module(name, sources[name]) for name in ("unpatched", "patched"))

    def module(self, name: str, source: bytes) -> Any:
        made = types.ModuleType(f"fa_utils_{name}")
        exec(compile(source, name, "exec", dont_inherit=True), made.__dict__)  # noqa: S102
        made.__dict__.update(current_platform=self.platform, envs=self.envs, logger=self)
        return made

    def warning_once(self, text: str, *values: Any, **_: Any) -> None:
        self.told.append(text % values)

    info_once = error = warning_once

    def answer(self, module: Any, function: str, arguments: dict[str, Any]) -> Any:
        """What a function returns, or the type of its error, and what it told the log."""
        self.told = []
        try:
            return getattr(module, function)(**arguments), self.told
        except Exception as error:
            return type(error), self.told


def texts() -> dict[str, bytes]:
    """The source of fa_utils before and after our patch."""
    root = patchqueue.find_root()
    queue = patchqueue.fit(root, patchqueue.load_queue(PATCHES))
    states = patchqueue.tree_states(queue, patchqueue.read_tree(root, queue), len(queue.patches))
    (index,) = (i for i, patch in enumerate(queue.patches) if patch.path.name == PATCH)
    return {"unpatched": states[index][FA_UTILS], "patched": states[index + 1][FA_UTILS]}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    import vllm.config

    world = World()
    interface = types.ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    interface.is_fa_version_supported = lambda version: version in world.builds  # type: ignore[attr-defined]
    interface.fa_version_unsupported_reason = lambda version: f"no build of {version}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", types.ModuleType("vllm.vllm_flash_attn"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: world.config)
    probe_answers(monkeypatch, world, lambda: True)
    return world


def probe_answers(monkeypatch: pytest.MonkeyPatch, world: World, answer: Any) -> None:
    def usable(*args: Any, **kwargs: Any) -> bool:
        world.asked.append((args, kwargs))
        return answer()

    monkeypatch.setattr(fa4_probe, "usable", usable)


def machines(world: World, capabilities: list[tuple[int, int]]) -> Iterator[None]:
    """Every build, configuration and setting on these devices."""
    settings = [(False, chosen) for chosen in CONFIGS] + [(True, chosen) for chosen in CONFIGS[:2]]
    for capability, builds, (invariant, chosen) in itertools.product(capabilities, BUILDS, settings):
        world.platform.capability, world.builds = capability, builds
        world.envs.VLLM_BATCH_INVARIANT, world.config = invariant, chosen
        yield


def questions() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "flash_attn_supports_sinks", {}
    yield "flash_attn_supports_mla", {}
    for head_size, head_size_v in itertools.product((None, 128, 256), repeat=2):
        yield "uses_fa4_hd256_kernel", {"head_size": head_size, "head_size_v": head_size_v}
    for arguments in ARGUMENTS:
        yield "get_flash_attn_version", arguments
        if not arguments["requires_softcap"]:
            yield "flash_attn_supports_kv_cache_dtype", arguments
    for dtype, head_size in itertools.product(("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"), (None, 64, 256, 512)):
        yield "flash_attn_supports_kv_cache_dtype", {"kv_cache_dtype": dtype, "head_size": head_size}


QUESTIONS = list(questions())


@pytest.mark.parametrize("capability", OTHER_MAJORS, ids=lambda pair: f"{pair[0]}.{pair[1]}")
def test_nothing_changes_on_another_major(world: World, capability: tuple[int, int]) -> None:
    count = 0
    for _ in machines(world, [capability]):
        for function, arguments in QUESTIONS:
            count += 1
            old, new = (world.answer(module, function, arguments) for module in (world.old, world.new))
            assert new == old, (function, arguments, world.builds, world.config)
    assert count == 8 * 14 * len(QUESTIONS)
    assert world.asked == [], "the probe is Thor's only"


@pytest.mark.parametrize("kind", ["xpu", "rocm"])
def test_nothing_changes_on_another_platform(world: World, kind: str) -> None:
    world.platform.kind, world.platform.capability = kind, (11, 0)
    for world.config in CONFIGS:
        for function, arguments in QUESTIONS:
            old, new = (world.answer(module, function, arguments) for module in (world.old, world.new))
            assert new == old, (function, arguments)
    assert world.asked == []


def failing() -> bool:
    return False


def raising() -> bool:
    raise RuntimeError("a bug in the probe")


@pytest.mark.parametrize("probe", [failing, raising, None], ids=["failing", "raising", "no mjolnir"])
def test_a_probe_that_says_no_leaves_stock_behaviour_on_thor(
    world: World, probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if probe is None:
        monkeypatch.setitem(sys.modules, "mjolnir.fa4_probe", None)
    else:
        probe_answers(monkeypatch, world, probe)
    for _ in machines(world, [(11, 0)]):
        for function, arguments in QUESTIONS:
            old, new = (world.answer(module, function, arguments)[0] for module in (world.old, world.new))
            assert new == old, (function, arguments, world.builds, world.config)
    assert bool(world.asked) == (probe is not None)


def test_a_probe_that_raises_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_answers(monkeypatch, world, raising)
    world.platform.capability, world.builds = (11, 0), {2, 4}
    assert world.answer(world.new, "get_flash_attn_version", {}) == (2, ["FA4 can't be probed: a bug in the probe"])


def test_a_passed_probe_makes_thor_choose_as_the_data_center_blackwell_does(world: World) -> None:
    """Major 10 is what vLLM supports; the same rules must then hold on 11, alibi, head sizes and batch invariance."""
    chosen = set()
    for _ in machines(world, [(11, 0)]):
        for function, arguments in QUESTIONS:
            new = world.answer(world.new, function, arguments)
            world.platform.capability = (10, 0)
            old = world.answer(world.old, function, arguments)
            world.platform.capability = (11, 0)
            assert new == old, (function, arguments, world.builds, world.config)
            if function == "get_flash_attn_version":
                chosen.add(new[0])
    assert chosen == {2, 4, None}
    assert {kwargs.get("fp8", False) for _, kwargs in world.asked} == {False, True}


def test_the_assert_in_the_kernels_launcher_opens_for_11_only() -> None:
    (file,) = (file for file in parse_patch(PATCHES / PATCH).files if file.path == INTERFACE)
    (hunk,) = file.hunks
    old, new = (next(line for line in side if b"FP8 is only" in line).decode() for side in (hunk.old, hunk.new))
    assert [line for line in hunk.old if line.decode() != old] == [line for line in hunk.new if line.decode() != new]

    def accepts(line: str, arch: int) -> bool:
        condition = line.strip().removeprefix("assert ").partition(', "')[0]
        return bool(eval(condition, {"arch": arch}))  # noqa: S307

    changed = [arch for arch in range(70, 140) if accepts(old, arch) != accepts(new, arch)]
    assert changed == list(range(110, 120))
    assert accepts(new, 110)


def test_the_patch_changes_no_other_function() -> None:
    sources = {name: text.decode() for name, text in texts().items()}
    old, new = (split_functions(sources[name]) for name in ("unpatched", "patched"))
    assert {name for name in new if new[name] != old.get(name)} == {
        "get_flash_attn_version",
        "flash_attn_supports_kv_cache_dtype",
        "_fa4_passed_probe",
        "mjolnir_fallback_name",
    }
    assert set(old) <= set(new)


def split_functions(source: str) -> dict[str, str]:
    tree = ast.parse(source)
    found = {node.name: ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    rest = [ast.dump(node) for node in tree.body if not isinstance(node, ast.FunctionDef)]
    return found | {"everything else": "\n".join(rest)}
