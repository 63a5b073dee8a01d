"""The sanitizer runs without a GPU: what it makes of a tool's log and exit status, and the problems that it runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liger_aot.ops.losses import _linear
from liger_aot_build.binary import inspect
from tests.conftest import built_pack, no_gpu
from tests.harness import sanitize
from tests.harness.all_ops import entries
from tests.harness.sanitize import (
    by_name,
    exercise,
    findings,
    main,
    numbered,
    products_in_float32,
    renamed,
    run,
)

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
BEYOND = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at forward+0x210
=========     by thread (0,0,0) in block (1,0,0)
=========     Access at 0x7f0000001000 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in launcher.c:10 [0x1234] in _launch.abi3.so
========= ERROR SUMMARY: 2 errors
"""
RACE = """========= Error: Race reported between Write access at backward_tile+0x1a0 in rmsnorm.py:10
=========     and Read access at backward_tile+0x2c0 in rmsnorm.py:12 [480 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NO_RACE = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def test_findings() -> None:
    assert findings(CLEAN) == (0, {}, True, 0)
    assert findings(BEYOND) == (2, {"forward": 1}, True, 0)
    assert findings(RACE) == (1, {"backward_tile": 2}, True, 0)
    assert findings(NO_RACE) == (0, {}, True, 0)
    more = "========= RACECHECK SUMMARY: 20 hazards displayed (264 errors, 2 warnings)\n"
    assert findings(more).errors == 266
    assert not findings("========= COMPUTE-SANITIZER\n").finished
    cut = "========= ERROR SUMMARY: 379 errors\n========= ERROR SUMMARY: 359 errors were not printed.\n"
    assert findings(cut).errors == 379
    assert findings(CLEAN + "========= Internal Sanitizer Error: not tracked\n").errors == 1


@pytest.mark.parametrize(
    ("planted", "log", "status", "failed"),
    [
        (BEYOND, CLEAN, 0, False),
        (CLEAN, CLEAN, 0, True),
        (BEYOND, BEYOND, 0, True),
        (BEYOND, CLEAN, 1, True),
        (BEYOND, "", 0, True),
    ],
)
def test_memcheck(
    tmp_path: Path, planted: str, log: str, status: int, failed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool is a script that writes such logs."""
    (tmp_path / "planted").write_text(planted)
    (tmp_path / "log").write_text(log.replace("forward+", "z000001+"))
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"""#!/bin/sh
[ "$1 $2 $3 $4 $5" = "--tool memcheck --kernel-name kne=z000001,kne=z002 --log-file" ] || exit 3
case "$*" in
*" -m tests.harness.sanitize planted") cp {tmp_path}/planted "$6"; exit 1 ;;
*" -m tests.harness.sanitize exercise memcheck rope softmax") cp {tmp_path}/log "$6"; exit {status} ;;
esac
exit 3
"""
    )
    program.chmod(0o755)
    binaries: Any = {
        "z000001": SimpleNamespace(name="rope-tile-bf16"),
        "z002": SimpleNamespace(name="softmax-tile"),
    }
    assert run(str(program), ["memcheck"], ["rope", "softmax"], binaries) == failed
    said = capsys.readouterr().out
    assert ("2 errors in rope-tile-bf16," in said) == ("at rope-tile-bf16+0x210" in said) == (log == BEYOND)


@pytest.mark.parametrize(
    ("planted", "failing", "failed"), [(1, None, False), (0, None, True), (1, ("rope", "before"), True)]
)
def test_guard_pages(
    planted: int,
    failing: tuple[str, str] | None,
    failed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library is compiled, the processes are not started."""

    def between(library: Path, side: str, arguments: list[str]) -> tuple[int, str]:
        assert library.stat().st_size > 0
        if arguments == ["planted"]:
            return planted, ""
        assert arguments[:2] == ["exercise", "guard"]
        return int((arguments[2], side) == failing), f"a problem\n{arguments[2]}: 3 problems\n"

    monkeypatch.setattr(sanitize, "between_guard_pages", between)
    assert run("", ["guard"], ["rope", "softmax"], {}) == failed
    said = capsys.readouterr().out
    assert ("guard pages before: rope failed, exit status 1" in said) == bool(failing)
    assert "guard pages behind: softmax: 3 problems" in said


def test_names() -> None:
    """Each binary's own, in the cubin wherever its kernel's was."""
    pack = built_pack("sm90")
    manifest = pack.op("column_sums")
    variants = [manifest.variant(name) for name in manifest.variants]
    image, symbol = variants[0].read(), variants[0].symbol
    name = numbered(61 * 62 + 1, len(symbol))
    assert name == "z" + "0" * (len(symbol) - 4) + "0Z1"
    assert inspect(image).kernel == symbol and inspect(renamed(image, symbol, name)).kernel == name
    other = renamed(renamed(image, symbol, name), name, symbol)
    assert other == image and symbol.encode() not in renamed(image, symbol, name)
    small: Any = SimpleNamespace(ops=("column_sums",), op=pack.op)
    names = by_name(small)
    assert len(names) == len(variants) and list(names.values()) == variants
    assert [len(n) for n in names] == [len(v.symbol) for v in variants]


def test_names_of_many_binaries() -> None:
    """More than short names have numbers for, when all are counted together."""
    symbols = {f"{i}": "up" if i % 100 == 0 else "row" if i % 2 else "forward" for i in range(6000)}
    op = SimpleNamespace(variants=symbols, variant=lambda name: SimpleNamespace(symbol=symbols[name]))
    pack: Any = SimpleNamespace(ops=("any",), op=lambda _: op)
    names = by_name(pack)
    assert len(names) == len(symbols)
    assert all(len(name) == len(variant.symbol) for name, variant in names.items())
    with pytest.raises(ValueError, match="names of 2 characters"):
        numbered(62, 2)


def test_a_machine_that_cannot(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "no_gpu", lambda: "no GPU here")
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "no_gpu", lambda: None)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "compute-sanitizer" in capsys.readouterr().err


@pytest.mark.skipif(no_gpu() is None, reason="the CPU's references only")
def test_problems(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an op of the harness, of one whose cases are elsewhere, and of one with its own."""
    some = ("swiglu", "rmsnorm", "fused_linear_jsd")
    assert set(some) < set(entries())
    exercise(some, "cpu", longest=5000, drawn=3)
    counts = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert all(count > 10 for count in counts) and len(counts) == 3


def test_products_in_float32() -> None:
    """The products that linear layers' losses make, rounded once to what they write to."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((5, 8), (16, 8), (16,)))
    exact = x.double() @ weight.double().t()
    before, out = torch.mm, torch.empty(5, 16, dtype=torch.bfloat16)
    with products_in_float32():
        assert torch.equal(_linear.project(x, weight, None, out), exact.bfloat16())
        assert torch.equal(
            _linear.project(x, weight, bias, out, 2.0), (2 * (exact + bias.double())).bfloat16()
        )
        for total in (torch.empty(5, 16), torch.empty(5, 16, dtype=torch.bfloat16)):
            _linear.accumulate(total, x, weight.t(), first=True)
            once = exact.to(total.dtype)
            torch.testing.assert_close(total, once)
            torch.ops.aten.addmm.dtype_out(total, x, weight.t(), total.dtype, out=total)
            torch.testing.assert_close(total, (once.double() + exact).to(total.dtype))
    assert torch.mm is before and isinstance(torch.ops.aten.mm.dtype_out, torch._ops.OpOverload)
