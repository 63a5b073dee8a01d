"""doctor: what it reports of GPUs, drivers and packs, and that nothing that is broken stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot import doctor
from liger_aot.cli import main
from liger_aot.errors import DriverNotFound
from liger_aot.runtime import devices
from tests.harness.pack_edits import command, edit, need_shared

pytest_plugins = ("tests.harness.pack_fixtures",)

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
)
V100 = SimpleNamespace(**{**vars(H200), "name": "NVIDIA V100", "major": 7})
A10 = SimpleNamespace(
    **{**vars(H200), "name": "NVIDIA A10", "major": 8, "minor": 6, "shared_memory_per_block_optin": 101376}
)
MI300X = SimpleNamespace(
    name="AMD Instinct MI300X",
    gcnArchName="gfx942:sramecc+:xnack-",
    multi_processor_count=304,
    shared_memory_per_block=65536,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``machine(H200, ...)``: torch sees these GPUs, and a driver that serves them is there."""

    def machine(*gpus: SimpleNamespace, backend: str = "cuda", version: int = 0) -> None:
        driver = SimpleNamespace(
            library=f"lib{backend}.so.1",
            backend=backend,
            version=version or {"cuda": 12080, "hip": 60342134}[backend],
            device_count=len(gpus),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
        monkeypatch.setattr(torch.version, "hip", "6.3.42134" if backend == "hip" else None)
        monkeypatch.setattr(torch.version, "cuda", "12.8" if backend == "cuda" else None)
        monkeypatch.setattr(devices, "driver", lambda: driver)

    devices.gpu.cache_clear()
    yield machine
    devices.gpu.cache_clear()


def lines(report: doctor.Report, title: str) -> str:
    (section,) = (s for s in report.sections if s.title == title)
    return "\n".join(section.lines)


def unmeasured(arch: str) -> str:
    """What is said of a pack with derived launch numbers alone; sm90's were measured."""
    return (
        "its launch numbers are derived from another architecture's, not measured: with the source tree, python -m "
        f"benchmarks.tuning --arch {arch} --kernel all --write measures them (docs/tuning-your-chip.md)"
    )


def test_doctor_of_a_gpu_with_its_pack(built: Path, machine: Callable[..., None]) -> None:
    machine(H200, A10)
    report = doctor.examine()
    assert report.healthy and str(report).endswith("Ready: every GPU has its pack.")
    assert lines(report, "GPUs").splitlines() == [
        "cuda:0: NVIDIA H200 (compute capability 9.0) takes pack sm90",
        f"cuda:1: NVIDIA A10 (compute capability 8.6) takes pack sm80; {unmeasured('sm80')}",
    ]
    assert lines(report, "GPU driver") == "libcuda.so.1, cuda 12.8"
    assert lines(report, "torch") == f"{torch.__version__}, built for CUDA 12.8"
    assert (
        f"sm80: for 8.0, 8.6, 8.7, 8.9; version {liger_aot.__version__}, Triton 3.6.0, ptxas 12.8"
        in lines(report, "packs")
    )


def test_doctor_of_an_amd_gpu(built: Path, machine: Callable[..., None]) -> None:
    machine(MI300X, backend="hip")
    report = doctor.examine()
    assert report.healthy
    found = f"cuda:0: AMD Instinct MI300X (gfx942) takes pack gfx942; {unmeasured('gfx942')}"
    assert lines(report, "GPUs") == found
    assert lines(report, "GPU driver") == "libhip.so.1, hip 6.3.42134"


def test_doctor_of_gpus_of_which_one_has_no_pack(
    copies: Callable[..., Path], machine: Callable[..., None]
) -> None:
    copies("sm90")
    machine(V100, A10, H200)
    report = doctor.examine()
    v100, a10, h200 = lines(report, "GPUs").splitlines()
    assert not report.healthy and str(report).endswith("say what is missing.")
    assert "no installed pack serves NVIDIA V100 (compute capability 7.0)" in v100 and "add a profile" in v100
    assert f'--no-index --find-links FOLDER "liger-aot[sm80]=={liger_aot.__version__}"' in a10
    assert h200.endswith("takes pack sm90")


def test_doctor_finds_what_a_pack_lacks(copies: Callable[..., Path], machine: Callable[..., None]) -> None:
    folder = copies("sm80") / "sm80"
    edit(folder / "manifest.json", lambda m: m["ops"].pop("column_sums"))
    need_shared(folder / "rmsnorm.json", 8193)
    machine(SimpleNamespace(**{**vars(A10), "shared_memory_per_block_optin": 8192}))
    report = doctor.examine()
    found = lines(report, "GPUs")
    assert not report.healthy and "takes pack sm80; it lacks column_sums" in found
    assert "binaries of rmsnorm need up to 8193" in found and "this GPU has 8192" in found


@pytest.mark.parametrize(
    ("gpu", "backend", "version", "said"),
    [
        (H200, "cuda", 11_080, "its binaries need cuda 12.0, the driver is 11.8: update it to R525 or newer"),
        (H200, "cuda", 12_000, ""),
        (H200, "cuda", 13_010, ""),
        (MI300X, "hip", 50_731_921, "its binaries need hip 6.0.0, the driver is 5.7.31921: update it to ROCm 6.0"),
        (MI300X, "hip", 60_000_000, ""),
    ],
)  # fmt: skip
def test_doctor_of_a_driver_that_is_too_old(
    built: Path, machine: Callable[..., None], gpu: SimpleNamespace, backend: str, version: int, said: str
) -> None:
    machine(gpu, backend=backend, version=version)
    report = doctor.examine()
    assert report.healthy is not bool(said)
    assert said in lines(report, "GPUs") and ("update it" in lines(report, "GPUs")) is bool(said)


def test_doctor_knows_the_oldest_driver_of_every_pack(built: Path) -> None:
    text = lines(doctor.examine(), "packs")
    assert text.count("ELF ABI 7 for cuda 12.0 (R525 or newer)") == 2
    assert text.count("code object 5 for hip 6.0.0 (ROCm 6.0 or newer)") == 2


def test_doctor_of_binaries_of_a_version_that_is_not_known(
    copies: Callable[..., Path], machine: Callable[..., None]
) -> None:
    edit(copies("sm90") / "sm90" / "manifest.json", lambda m: m.update(binary_version=9))
    machine(H200)
    report = doctor.examine()
    assert report.healthy and "ELF ABI 9, which this liger-aot does not know" in lines(report, "packs")


def test_doctor_of_a_damaged_pack(copies: Callable[..., Path], machine: Callable[..., None]) -> None:
    (copies("sm80", "sm90") / "sm90" / "manifest.json").write_bytes(b"{")
    machine(H200)
    report = doctor.examine()
    assert not report.healthy
    assert "manifest.json: not JSON" in lines(report, "GPUs")
    assert "sm90: can't be used:" in lines(report, "packs") and "sm80: for 8.0" in lines(report, "packs")
    machine(A10)
    devices.gpu.cache_clear()
    assert doctor.examine().healthy, "another GPU's damaged pack is reported, and no matter"


def test_doctor_without_a_driver(
    built: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise DriverNotFound("cannot use the cuda driver library: libcuda.so.1: cannot open")

    machine()
    monkeypatch.setattr(devices, "driver", no_driver)
    report = doctor.examine()
    assert report.healthy and str(report).endswith("Ready on the CPU.")
    assert lines(report, "GPU driver").startswith("cannot use the cuda driver library")
    assert lines(report, "GPUs") == doctor.NO_GPU
    machine(H200)
    monkeypatch.setattr(devices, "driver", no_driver)
    assert not doctor.examine().healthy, "a GPU, and no driver to load its pack with"


def test_doctor_finds_gpus_that_torch_does_not_see(
    built: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(H200, H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.examine()
    assert not report.healthy and lines(report, "GPUs").startswith("torch sees none, the driver sees 2")


def test_doctor_survives_whatever_is_broken(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA unknown error\nsecond line")

    install(tmp_path / "nowhere")
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(devices, "driver", broken)
    monkeypatch.setattr(torch, "__version__", property(broken))
    monkeypatch.setattr(doctor, "ops", broken)
    monkeypatch.setattr("liger_aot.doctor.installed", broken)
    report = doctor.examine()
    assert not report.healthy
    for title in ("liger-aot", "GPU driver", "packs", "GPUs"):
        assert lines(report, title) == "failed: RuntimeError: CUDA unknown error second line"


def test_doctor_reports_a_gpu_that_fails_and_the_others(
    built: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(index: int) -> SimpleNamespace:
        if index == 0:
            raise RuntimeError("CUDA error: uncorrectable ECC error")
        return H200

    machine(H200, H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    report = doctor.examine()
    first, second = lines(report, "GPUs").splitlines()
    assert not report.healthy
    assert first == "cuda:0: CUDA error: uncorrectable ECC error" and second.endswith("takes pack sm90")


def test_control_characters_do_not_reach_the_terminal(
    copies: Callable[..., Path],
    machine: Callable[..., None],
    install: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a driver, a path or a manifest says: it could move the cursor, set the title or hide what was printed."""
    evil = "\x1b]0;title\x07\x1b[2K\x9b1A\u202e"
    root = copies("sm80", "sm90")
    edit(root / "sm80" / "manifest.json", lambda m: m.update(toolchain={"triton": evil, "compiler": evil}))
    edit(root / "sm90" / "manifest.json", lambda m: m.update(version=evil))

    def rename(document: Any) -> None:
        for variant in document["variants"].values():
            variant.update(row=evil, numbers={**variant["numbers"], evil: 1})

    edit(root / "sm80" / "rmsnorm.json", rename)
    moved = root.rename(root.parent / evil.replace("/", ""))
    install(moved)
    machine(SimpleNamespace(**{**vars(A10), "name": f"NVIDIA {evil} A10"}))
    for arguments in (
        ["doctor"],
        ["list"],
        ["verify"],
        ["explain", "rmsnorm", "--shape", "8,64", "--dtype", "bf16"],
    ):
        main(arguments)
        out, err = capsys.readouterr()
        assert r"\x1b[2K\x9b1A\u202e" in out + err, arguments
        for text in (out, err):
            assert all(line.isprintable() for line in text.split("\n")), arguments


def test_doctor_with_a_torch_that_does_not_import(built: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: undefined symbol')")
    done = command("doctor", path=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("libtorch.so: undefined symbol") == 3, "torch, the driver and the GPUs need it"
    assert "sm90: for 9.0" in done.stdout, "the packs do not"


def test_doctor_command(
    built: Path, machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(H200)
    assert main(["doctor"]) == 0
    machine(V100)
    devices.gpu.cache_clear()
    assert main(["doctor"]) == 1
    assert "Not ready" in capsys.readouterr().out
