"""The plugin: the name MJOLNIR resolves in every process, patched vLLM or stock, and nothing else changes."""

import importlib
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mjolnir

REGISTRY = "vllm.v1.attention.backends.registry"
OUR_PATH = "mjolnir.backend.MjolnirAttentionBackend"
MEMBER = re.compile(r'^    MJOLNIR = "mjolnir\.backend\.MjolnirAttentionBackend"\n', re.MULTILINE)
PLACE = "    # Placeholder for third-party/custom backends"


def load_registry(monkeypatch, *, patched: bool):
    """A fresh copy of vLLM's registry in place of the loaded one, with our member or without, as in a new process."""
    file = importlib.import_module(REGISTRY).__file__
    source = MEMBER.sub("", Path(file).read_text())
    if patched:
        source = source.replace(PLACE, f'    MJOLNIR = "{OUR_PATH}"\n{PLACE}', 1)
    module = types.ModuleType(REGISTRY)
    module.__file__ = file
    exec(compile(source, f"<{REGISTRY}>", "exec"), module.__dict__)  # noqa: S102  (vLLM's own source)
    monkeypatch.setitem(sys.modules, REGISTRY, module)
    monkeypatch.delitem(sys.modules, "mjolnir.plugin", raising=False)
    if hasattr(mjolnir, "plugin"):
        monkeypatch.delattr(mjolnir, "plugin")
    return module


@pytest.fixture
def stock(monkeypatch):
    return load_registry(monkeypatch, patched=False)


@pytest.fixture
def patched(monkeypatch):
    return load_registry(monkeypatch, patched=True)


def members(registry) -> dict[str, object]:
    return dict(registry.AttentionBackendEnum.__members__)


def overrides(registry) -> dict[str, str]:
    return {member.name: path for member, path in registry._ATTN_OVERRIDES.items()}


def test_stock_copy_has_no_member_of_ours(stock, patched):
    assert "MJOLNIR" not in members(stock)
    assert patched.AttentionBackendEnum.MJOLNIR.value == OUR_PATH


def test_both_names_resolve_on_a_stock_vllm(stock):
    mjolnir.register()
    names = stock.AttentionBackendEnum
    assert names["MJOLNIR"].get_path() == names["CUSTOM"].get_path() == OUR_PATH
    assert "MJOLNIR" in names.__members__
    assert overrides(stock) == {"CUSTOM": OUR_PATH}


def test_our_member_needs_nothing_on_a_patched_vllm(patched):
    before = members(patched)
    mjolnir.register()
    assert members(patched) == before
    assert overrides(patched) == {}
    assert patched.AttentionBackendEnum["MJOLNIR"].get_path() == OUR_PATH
    assert not patched.AttentionBackendEnum.CUSTOM.is_overridden()


def test_other_backends_keep_their_names_and_paths(stock):
    before = members(stock)
    mjolnir.register()
    assert {name: member for name, member in members(stock).items() if name != "MJOLNIR"} == before
    assert len(list(stock.AttentionBackendEnum)) == len(before)  # no new member, only a name


@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_registering_again_changes_nothing(request, backend_log, kind):
    registry = request.getfixturevalue(kind)
    mjolnir.register()
    after = members(registry), overrides(registry)
    mjolnir.register()
    assert (members(registry), overrides(registry)) == after
    assert backend_log.records == []


def test_alias_pickles_as_custom_into_a_process_without_the_plugin(monkeypatch, stock):
    """A spawned engine core unpickles its configuration before it loads any plugin."""
    mjolnir.register()
    member = stock.AttentionBackendEnum["MJOLNIR"]
    data = pickle.dumps(member)
    fresh = load_registry(monkeypatch, patched=False)
    assert fresh.AttentionBackendEnum is not stock.AttentionBackendEnum
    assert "MJOLNIR" not in members(fresh)
    assert pickle.loads(data) is fresh.AttentionBackendEnum.CUSTOM  # noqa: S301  (made above)


def test_a_member_made_at_run_time_would_not_survive_that(monkeypatch, stock):
    """Why the plugin makes an alias and no member of its own."""
    data = pickle.dumps(stock.AttentionBackendEnum.register("MJOLNIR", OUR_PATH))
    load_registry(monkeypatch, patched=False)
    with pytest.raises(ValueError, match="is not a valid AttentionBackendEnum"):
        pickle.loads(data)  # noqa: S301  (made above)


@pytest.mark.parametrize("value", ["1", "TRUE", "yes"])
@pytest.mark.parametrize("variable", ["MJOLNIR_ATTN_DISABLE", "THOR_T5_DISABLE"])
def test_disabled_leaves_the_registry_untouched(monkeypatch, stock, variable, value):
    monkeypatch.setenv(variable, value)
    before = members(stock)
    mjolnir.register()
    assert (members(stock), overrides(stock)) == (before, {})


def test_custom_of_another_package_is_left_alone(stock, backend_log):
    stock.register_backend(stock.AttentionBackendEnum.CUSTOM, "other.Backend")
    mjolnir.register()
    assert overrides(stock) == {"CUSTOM": "other.Backend"}
    assert "MJOLNIR" not in members(stock)
    (record,) = backend_log.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "Mjolnir: CUSTOM is already taken by other.Backend; MJOLNIR stays unregistered. "
        "Apply Mjolnir's patches to vLLM, or unload the other plugin."
    )


def test_custom_of_another_package_does_not_matter_on_a_patched_vllm(patched, backend_log):
    patched.register_backend(patched.AttentionBackendEnum.CUSTOM, "other.Backend")
    mjolnir.register()
    assert overrides(patched) == {"CUSTOM": "other.Backend"}
    assert backend_log.records == []


def test_registry_that_can_not_be_imported_is_a_warning(monkeypatch, stock, backend_log):
    """vLLM calls plugins unguarded: an error here would take down an engine that runs another backend."""
    monkeypatch.setitem(sys.modules, REGISTRY, None)
    mjolnir.register()
    (record,) = backend_log.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "Mjolnir: could not register the backend")
    assert record.exc_info[0] is ModuleNotFoundError


def test_bad_setting_is_a_warning_that_names_it(monkeypatch, stock, backend_log):
    monkeypatch.setenv("MJOLNIR_ATTN_CTAS", "many")
    mjolnir.register()
    (record,) = backend_log.records
    assert record.levelname == "WARNING"
    assert "MJOLNIR_ATTN_CTAS='many'" in str(record.exc_info[1])
    assert overrides(stock) == {}


@pytest.mark.parametrize(("kind", "native"), [("stock", False), ("patched", True)])
@pytest.mark.parametrize("registered", [False, True])
def test_native_member_is_told_from_the_alias(request, kind, native, registered):
    request.getfixturevalue(kind)
    if registered:
        mjolnir.register()
    from mjolnir import plugin

    assert plugin.has_native_member() is native


@pytest.mark.parametrize(("native", "name"), [(True, "MJOLNIR"), (False, "CUSTOM")])
def test_backend_reports_a_name_that_the_registry_maps_back_to_it(monkeypatch, native, name):
    backend = importlib.import_module("mjolnir.backend")  # with the real registry
    registry = load_registry(monkeypatch, patched=native)
    mjolnir.register()
    plugin = importlib.import_module("mjolnir.plugin")
    monkeypatch.setattr(backend, "has_native_member", plugin.has_native_member)
    assert backend.BackendMixin.get_name() == name
    assert registry.AttentionBackendEnum[name].get_path() == OUR_PATH


# Fresh interpreters.


def loaded_after(code: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has loaded after some code."""
    code += (
        "\nimport sys"
        "\nprint(*(m for m in ('torch', 'vllm', 'triton', 'mjolnir.backend', 'mjolnir.plugin') if m in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_importing_the_package_imports_nothing_heavy():
    assert loaded_after("import mjolnir") == set()


def test_registering_does_not_import_the_backend():
    """vLLM runs plugins in its API server too, which never needs the backend."""
    loaded = loaded_after("import mjolnir; mjolnir.register()")
    assert "mjolnir.plugin" in loaded
    assert "mjolnir.backend" not in loaded


def test_registering_without_vllm_is_a_warning_on_standard_error():
    code = "import sys; sys.modules['vllm'] = None; import mjolnir; mjolnir.register(); print('still running')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "still running\n"
    assert result.stderr.startswith("Mjolnir: could not register the backend\n")


def test_entry_point_is_what_vllm_looks_for():
    from importlib.metadata import entry_points

    (entry,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "mjolnir"]
    assert entry.value == "mjolnir:register"
    assert entry.load() is mjolnir.register


def test_path_of_the_backend_is_a_class_of_ours():
    module, _, name = mjolnir.BACKEND_PATH.rpartition(".")
    assert (mjolnir.BACKEND_NAME, mjolnir.BACKEND_PATH) == ("MJOLNIR", OUR_PATH)
    assert getattr(importlib.import_module(module), name).__name__ == name
