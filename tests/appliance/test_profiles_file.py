"""A profile's file: what it may say, and what a mistake in it costs."""

import os
from pathlib import Path

import pytest

from appliance.profiles.errors import ProfileError, UnknownProfileError
from appliance.profiles.loader import MOST_BYTES, load
from appliance.profiles.store import Store, read

GOOD = "name: p\ndescription: one\nmodel: org/m\nneeds: {device: cpu, memory_gib: 1}\n"


def write(folder: Path, text: str | bytes, name: str = "p") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def complaint(folder: Path, text: str | bytes) -> str:
    """What a text is refused with, less the file's name."""
    file = write(folder, text)
    with pytest.raises(ProfileError) as caught:
        load(file)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.exit_code == 2
    assert line.startswith(str(file))
    return line.removeprefix(str(file))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("modle: x", ":5: modle: there is no such key; did you mean model?"),
        ("zzz: x", ":5: zzz: there is no such key; accepted: name, description, model, served_model_name, "),
        ("max_num_seqs: many", ":5: max_num_seqs='many': accepted: a valid integer"),
        ("max_num_seqs: true", ":5: max_num_seqs=True: accepted: a valid integer"),
        ("kv_cache_gib: 0", ":5: kv_cache_gib=0: accepted: greater than or equal to 1"),
        ("kv_cache_dtype: --x", ":5: kv_cache_dtype='--x': accepted: a text in one line that does not begin with"),
        ("attention_backend: a b", ":5: attention_backend='a b': accepted: letters, digits and a few signs"),
        ("speculation: {method: magic, tokens: 1}", ":5: speculation.method='magic': accepted: 'ngram', 'mtp', "),
        ("speculation: {method: mtp, tokns: 1}", ":5: speculation.tokns: there is no such key; did you mean tokens?"),
        ("speculation: {method: eagle3, tokens: 1}", ":5: speculation: accepted: method eagle3 with a key model"),
        ("speculation: {method: ngram, tokens: 1, model: x}", ":5: speculation: accepted: method ngram without"),
        (
            "speculation: {method: ngram, tokens: 1, lookup_max: 2, lookup_min: 3}",
            ":5: speculation: accepted: lookup_min of at most lookup_max",
        ),
        ("speculation: {method: mtp}", ": speculation.tokens is missing"),
        ("vllm: {port: 1}", ":5: vllm: accepted: any flag but those that the appliance decides (port)"),
        ("vllm: {por: 1}", ":5: vllm: accepted: any flag but those that the appliance decides (por)"),
        ("vllm: {api_key: x}", ":5: vllm: accepted: no secrets: keys and tokens belong in the environment (api_key)"),
        ("vllm: {hf-token: x}", ":5: vllm: accepted: no secrets: keys and tokens belong in the environment"),
        ("vllm: {middleware: x}", ":5: vllm: accepted: no flag that makes the engine load code (middleware)"),
        ("vllm: {max-model-len: 1}", ":5: vllm: accepted: the profile's own key max_model_len (max-model-len)"),
        ("vllm: {speculative-config.method: x}", ":5: vllm: accepted: the profile's own key speculation"),
        ("vllm: {no-enable-prefix-caching: true}", ":5: vllm: accepted: enable-prefix-caching: false"),
        ("vllm: {-tp: 2}", ":5: vllm: accepted: a vLLM flag by its long name without dashes in front"),
        ("vllm: {seed: null}", ":5: vllm: accepted: a text, a number, true, false"),
        ("vllm: {seed: --api-key}", ":5: vllm: accepted: a text in one line that does not begin with a dash (seed)"),
        ("vllm: {seed: 2026-01-02}", ":5: vllm: accepted: a text, a number, true, false"),
        ("vllm: {a-b: 1, a_b: 2}", ":5: vllm: accepted: each flag once (a_b)"),
        ("chat_template_kwargs: {a: 2026-01-02}", ":5: chat_template_kwargs: accepted: what JSON can say"),
        ("environment: {LD_PRELOAD: x}", ":5: environment: accepted: VLLM_*, "),
        ("environment: {VLLM_API_KEY: x}", ":5: environment: accepted: no secrets"),
        ("environment: {VLLM_PLUGINS: x}", ":5: environment: accepted: any variable but those that the appliance"),
        ("environment: {VLLM_X: 1}", ":5: environment.VLLM_X=1: accepted: a valid string"),
        ("name: q", ":5: not a profile's YAML: the key name stands twice"),
        ("a: &x [1]", ":5: not a profile's YAML: anchors and aliases are not accepted"),
        ("a: *x", ":5: not a profile's YAML: anchors and aliases are not accepted"),
        ("<<: {name: q}", ":5: not a profile's YAML: a key has to be a plain text"),
        ("? [a]\n: b", ":5: not a profile's YAML: a key has to be a plain text"),
        ("a: !!python/object/apply:os.system [x]", ":5: not a profile's YAML: could not determine a constructor"),
        ("a: [1", ":6: not a profile's YAML: "),
        ("a: b: c", ":5: not a profile's YAML: mapping values are not allowed here"),
        ("a: " + "[" * 40 + "]" * 40, ":5: not a profile's YAML: nested too deeply"),
        ("---\na: 1", ":5: not a profile's YAML: but found another document"),
    ],
)
def test_a_mistake_costs_one_line(tmp_path: Path, more: str, told: str) -> None:
    assert complaint(tmp_path, GOOD + more + "\n").startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ": not a profile; accepted: lines of key: value"),
        ("- a\n", ": not a profile; accepted: lines of key: value"),
        ("name: p\n", ": description is missing"),
        (GOOD.replace("name: p", "name: q"), ":1: name='q': accepted: p, as its file is called"),
        (GOOD.replace("org/m", "hf_abcdefghijklmnopqrstuvwx"), ":3: model="),
        (b"\xff\xfe", ": not UTF-8 text"),
        ("a: \x00", ": not a profile's YAML: "),
        (GOOD + "#" * MOST_BYTES, ": larger than 64 KiB; accepted: a profile of a few lines"),
    ],
)
def test_what_is_no_profile(tmp_path: Path, text: str | bytes, told: str) -> None:
    assert complaint(tmp_path, text).startswith(told)


def test_a_bomb_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert complaint(tmp_path, "\n".join(lines)) == ":1: not a profile's YAML: anchors and aliases are not accepted"


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "p.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ProfileError, match="not a regular file"):
        load(pipe)
    with pytest.raises(ProfileError, match=r"q\.yaml: No such file or directory"):
        load(tmp_path / "q.yaml")


def test_a_wrong_mapping_is_not_shown(tmp_path: Path) -> None:
    """What stands in it may be a secret at the wrong place."""
    assert "hunter2" not in complaint(tmp_path, GOOD + "vllm: {api-key: hunter2}\n")
    assert "hunter2" not in complaint(tmp_path, GOOD + "kv_cache_gib: {x: hunter2}\n")


def test_the_user_s_hides_a_shipped_one_and_a_broken_one_is_listed(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("name: p", "name: demo"), "demo")
    write(tmp_path, "name: [", "broken")
    write(tmp_path, GOOD, "Upper")  # no name of a profile
    found = {entry.name: entry for entry in Store(tmp_path).entries()}
    assert (found["demo"].origin, found["demo"].profile.model) == ("yours, hides a shipped one", "org/m")
    assert found["qwen3-8b-fp8"].origin == "shipped"
    assert (found["broken"].origin, found["broken"].profile) == ("yours", None)
    assert "broken.yaml:1: not a profile's YAML" in found["broken"].problem
    assert "Upper" not in found
    assert Store(tmp_path / "none").get("demo").served_model_name == "SmolLM2-135M-Instruct"


def test_an_unknown_name_tells_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownProfileError, match=r"profile='\.\./x': there is none; accepted: demo, gpt-oss-20b, "):
        Store(tmp_path).get("../x")


def test_the_demo_s_model_is_where_this_machine_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Store(tmp_path).file("demo")
    monkeypatch.setenv("MJOLNIR_CACHE", str(tmp_path))
    assert read(recipe).model == str(tmp_path / "models" / "SmolLM2-135M-Instruct")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "models" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    monkeypatch.delenv("MJOLNIR_CACHE")
    assert read(recipe).model == str(tmp_path / "models" / "SmolLM2-135M-Instruct")
