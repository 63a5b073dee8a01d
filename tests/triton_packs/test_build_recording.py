"""What a recording says, made without a GPU; and what damaged or hostile ones are refused for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from liger_aot.errors import ArgumentError, RecordingDamaged
from liger_aot.triton import recording as recordings
from liger_aot.triton.report import report
from tests.harness.children import environment
from tests.triton_packs.conftest import liger_aot, record

KERNELS = "tests.triton_packs.project.kernels"


def test_every_kernel_is_there(recording: Path) -> None:
    (part,) = recordings.read(recording)
    assert part.target.name == "cuda-90" and not part.timed and not part.refused
    counted = Counter(noted.variant.qualname for noted in part.variants)
    assert counted == {
        "add": 3, "mapped": 2, "pair": 1, "by_gpu": 1, "total": 1, "tuned": 1, "copied": 1,
        "made.<locals>.raised": 2, "needs_clusters": 1,
    }  # fmt: skip
    assert {noted.variant.module for noted in part.variants} == {KERNELS}


def test_what_a_variant_says(recording: Path) -> None:
    (part,) = recordings.read(recording)
    by_name = {noted.variant.qualname: noted for noted in part.variants}
    pair = by_name["pair"]
    assert pair.variant.signature[0] == ["tensors", {"tuple": ["*fp32", "*fp32"]}]
    assert [path for path, _ in pair.variant.attrs] == [[0, 0], [0, 1]]  # n is 1000
    total = by_name["total"]
    assert total.variant.constants == [[[3], 1024]]  # by the heuristic
    assert total.ranged == ((0,), (1,))
    assert by_name["copied"].variant.signature[0] == ["SOURCE", "tensordesc<fp32[256]>"]
    assert by_name["needs_clusters"].variant.given == [["num_ctas", 2]]
    mapped = [n.variant for n in part.variants if n.variant.qualname == "mapped"]
    functions = {v.constants[0][1]["function"][1] for v in mapped}
    assert functions == {"square", "negate"}
    assert {(KERNELS, name) for name in functions} <= {key[:2] for key in part.functions}


def test_globals_are_noted(recording: Path) -> None:
    """By the GPU that torch was said to have."""
    (part,) = recordings.read(recording)
    (by_gpu,) = (f for f in part.functions.values() if f.qualname == "by_gpu")
    assert by_gpu.reads == ((KERNELS, "OFFSET", {"constexpr": {"float": (2.0).hex()}}),)


def test_a_tuners_choice(recording: Path) -> None:
    (part,) = recordings.read(recording)
    (choice,) = part.choices
    assert (choice.qualname, choice.keys, choice.timed) == ("tuned", ("n",), False)
    assert choice.key == (1000, "torch.float32", "torch.float32") and choice.config["kwargs"] == {
        "BLOCK": 128
    }


def test_a_recording_does_not_say_where_it_was_made(recording: Path) -> None:
    text = "".join(path.read_text() for path in recording.rglob("*.json"))
    assert str(Path(__file__).parents[2]) not in text and str(Path.home()) not in text


DECLARED = """
import torch, triton.language as tl
from liger_aot.errors import ArgumentError
from liger_aot.triton import points
from tests.triton_packs.project import kernels as k

both = [{"X": d, "Y": d, "OUT": d} for d in (torch.float16, torch.bfloat16)]
blocks, warps = {"BLOCK": [256, 1024]}, {"num_warps": [4, 8]}
print(points(k.add, dtypes=both, sizes={"n": None, "by": 0.5}, constants=blocks, options=warps))
one = {"X": torch.float32, "OUT": torch.float32}
print(points(k.total, dtypes=one, sizes={"n": [1, 100, 128, 4096]}, unaligned=["X"]))
print(points(k.tuned, dtypes=one, sizes={"n": None}))
scales = [0.1 * i for i in range(6)]
print(points(k.mapped, dtypes=one, sizes={"n": 64}, constants={"FUNCTION": k.square, "SCALE": scales, "BLOCK": 64}))
for wrong in ({"dtypes": {"X": torch.float32}}, {"dtypes": {"Z": torch.float32}}, {"dtypes": {}, "sizes": {"n": "x"}}):
    try:
        points(k.add, **wrong)
    except ArgumentError as error:
        print(error)
"""


def test_declared_points(tmp_path: Path) -> None:
    """n is 1, divisible by 16, or other: 2 dtypes x 3 x 2 blocks x 2 warps; 4 blocks x aligned or not."""
    (tmp_path / "declared.py").write_text(DECLARED)
    done = liger_aot(
        tmp_path, "record", "--out", "recording", "--target", "gfx942", "--", sys.executable, "declared.py"
    )
    lines = done.stdout.splitlines()
    assert lines[:4] == ["24", "8", "3", "6"]
    assert "a value is needed for" in lines[4] and "parameter 'Y'" in lines[4]
    assert "has no parameter 'Z'; it has X, Y, OUT, n, by, BLOCK" in lines[5]
    assert "sizes['n'] must be None, a number, or a list of numbers, got 'x'" in lines[6]
    (part,) = recordings.read(tmp_path / "recording")
    assert part.target.name == "hip-gfx942"
    ranged = {noted.ranged for noted in part.variants if noted.variant.qualname == "total"}
    assert ranged == {((0,), (1,))}  # small, as what declares them says
    text = report(tmp_path / "recording")
    assert "SCALE is a constant with 6 values" in text and "a float that changes between calls" in text


def test_what_starts_no_kernel_is_said(tmp_path: Path) -> None:
    done = liger_aot(
        tmp_path, "record", "--out", "r", "--", sys.executable, "-c", "raise SystemExit(3)", code=1
    )
    assert "nothing was recorded" in done.stderr and "exit code 3" in done.stderr


# -- damage -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def copy(recording: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recording, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one(copy: Path, kind: str, qualname: str = "pair") -> Path:
    found = (copy / "cuda-90" / kind).glob("*.json")
    return next(path for path in found if json.loads(path.read_text())["qualname"] == qualname)


@pytest.mark.parametrize(
    "changes",
    [
        {"module": "../../etc"}, {"module": "os.path; import x"}, {"module": ".relative"}, {"module": ""},
        {"qualname": "a/b"}, {"qualname": "__import__('os')"}, {"cache_key": "../x"}, {"cache_key": 3},
        {"line": "1"}, {"file": 7}, {"package": "x"}, {"package": {"name": "x"}}, {"reads": [["a", "b"]]},
        {"reads": [["/x", "b", 1]]}, {"reads": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_function_that_can_not_be(copy: Path, changes: dict[str, Any]) -> None:
    edit(one(copy, "functions"), **changes)
    with pytest.raises(RecordingDamaged):
        recordings.read(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"signature": [["x y", "i32"]]}, {"signature": "i32"}, {"constants": [["0", 1]]}, {"attrs": [[[0], 5]]},
        {"constants": [[[-1], 1]]}, {"given": [[1, 2]]}, {"ranged": [["a"]]}, {"gluon": 1},
        {"given": [["num_warps", 8]]}, {"qualname": "other"}, {"cache_key": "0" * 64},
    ],
    ids=str,
)  # fmt: skip
def test_a_variant_that_can_not_be(copy: Path, changes: dict[str, Any]) -> None:
    """Also one that says other than its name, which is made of what it says."""
    edit(one(copy, "variants"), **changes)
    with pytest.raises(RecordingDamaged):
        recordings.read(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "format": 1}', '{"format": 2}', "\xff\xfe"])
def test_a_file_that_is_none(copy: Path, text: str) -> None:
    (copy / "recording.json").write_bytes(text.encode("latin1"))
    with pytest.raises(RecordingDamaged):
        recordings.read(copy)


def test_a_folder_that_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no recording"):
        recordings.read(tmp_path)


def test_two_versions_of_triton(copy: Path) -> None:
    other = Path(shutil.copytree(copy / "cuda-90", copy / "cuda-80"))
    edit(other / "target.json", arch=80, triton="3.5.0")
    with pytest.raises(ArgumentError, match=r"3\.5\.0 and 3\.6\.0"):
        recordings.read(copy)


PARENT = """
import multiprocessing, os, subprocess, sys

def launch(power):
    import torch
    from tests.triton_packs.project import kernels as k
    x = torch.ones(64, device="cuda")
    (k.cube if power == 3 else k.fourth)[(1,)](x, x, 64, BLOCK=64)

if __name__ == "__main__":
    if sys.argv[1:]:
        launch(int(sys.argv[1]))
    else:
        subprocess.run([sys.executable, __file__, "3"], check=True)
        one = multiprocessing.get_context("spawn").Process(target=launch, args=(4,))
        one.start()
        one.join()
        raise SystemExit(one.exitcode)
"""


@pytest.mark.slow
def test_all_processes_of_a_program(tmp_path: Path) -> None:
    """Those that it starts, too; it launches no kernel itself."""
    (tmp_path / "parent.py").write_text(PARENT)
    (part,) = recordings.read(record(tmp_path, "parent.py"))
    assert [noted.variant.qualname for noted in part.variants] == ["made.<locals>.raised"] * 2


FAKE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.triton_packs.project import kernels as k

with FakeTensorMode():
    x, out = torch.empty(1 << 32, device="cuda"), torch.empty(64, device="cuda")
    k.cube[(1,)](x, out, 64, BLOCK=64)
    k.cube[(1,)](x[1:], out, 64, BLOCK=64)
"""


@pytest.mark.slow
def test_fake_tensors(tmp_path: Path) -> None:
    """Of any size: no memory is needed. They say how they are aligned, and which are smaller than 2 GiB."""
    (tmp_path / "fake.py").write_text(FAKE)
    (part,) = recordings.read(record(tmp_path, "fake.py"))
    found = {(str(noted.variant.attrs), noted.ranged) for noted in part.variants}
    assert found == {
        (str([[[path], [["tt.divisibility", 16]]] for path in (0, 1, 2)]), ((1,),)),
        (str([[[path], [["tt.divisibility", 16]]] for path in (1, 2)]), ((1,),)),
    }


WITH_A_GPU = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch, triton
from liger_aot.triton import recorder
from liger_aot.triton.stand_ins import NamedTarget, set_driver
from liger_aot.triton.targets import target

class Kernel:  # as Triton's CompiledKernel: an object of its own for each variant
    function = packed_metadata = None
    def __init__(self, source, target, options): self.launches = 0
    def launch_metadata(self, *arguments): return None
    def run(self, *arguments): self.launches += 1

times = iter([3.0, 1.0, 3.0, 5.0])
def benchmark(call, quantiles):
    call()
    return [next(times)] * 3

triton.compiler.compile = lambda source, target, options: Kernel(source, target, options)
NamedTarget.get_benchmarker = lambda self: benchmark
set_driver(target("sm90"))
recorder.record(Path(sys.argv[1]))
from tests.triton_packs.project import kernels as k
x = torch.ones(4096)
for n in (1000, 1000, 2000):  # a tuner's trials are two for each n; the second of 1000 is faster
    k.tuned[(1,)](x, x, n)
k.pair[(1,)]((x, x), 1000, BLOCK=256)
recorder.stop()
k.pair[(1,)]((x, x), 1000, BLOCK=512)
"""


def test_what_a_tuner_only_tries_is_not_recorded(tmp_path: Path) -> None:
    """Where kernels run: 256 won for 1000, 128 for 2000, which is divisible by 16; the others were compiled as well."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_GPU, str(tmp_path / "r")],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (part,) = recordings.read(tmp_path / "r")
    assert part.timed
    tuned = [n.variant for n in part.variants if n.variant.qualname == "tuned"]
    divisible = [[2], [["tt.divisibility", 16]]]
    found = sorted((v.constants[-1][1], dict(v.given)["num_warps"], divisible in v.attrs) for v in tuned)
    assert found == [(128, 1, True), (256, 2, False)]
    assert sorted((c.key[0], c.config["kwargs"]["BLOCK"], c.timed) for c in part.choices) == [
        (1000, 256, True),
        (2000, 128, True),
    ]
    assert [n.variant.constants for n in part.variants if n.variant.qualname == "pair"] == [[[[2], 256]]]


GRADIENTS = """
import torch
import triton
import triton.language as tl


@triton.jit
def doubled(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, 2 * tl.load(X + at, mask=at < n), mask=at < n)


def launch(x, block):
    assert x.is_cuda and x.device == torch.device("cuda", 0) and torch.cuda.is_available()
    with torch.cuda.device(x.device):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other = torch.empty(3, device="cuda")
    assert y.is_cuda and other.is_cuda and other.get_device() == 0
    doubled[(1,)](x, y, x.numel(), BLOCK=block)
    return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return launch(x, 64)

    @staticmethod
    def backward(context, gradient):
        return launch(gradient.contiguous(), 128)


torch.cuda.manual_seed(0)
torch.cuda.manual_seed_all(0)
x = torch.randn(50, device="cuda", requires_grad=True)
Doubled.apply(x).sum().backward()
assert x.grad.is_cuda
torch.autograd.grad(Doubled.apply(x), x, torch.ones(50, device="cuda"))
"""


def test_functions_of_the_program_see_a_gpu_in_forward_and_backward(tmp_path: Path) -> None:
    (tmp_path / "gradients.py").write_text(GRADIENTS)
    (part,) = recordings.read(record(tmp_path, "gradients.py"))
    assert sorted(noted.variant.constants for noted in part.variants) == [[[[3], 64]], [[[3], 128]]]


VERSIONS = """
import torch
from liger_aot.triton.stand_ins import stand_in
from liger_aot.triton.targets import target
own = {own!r}
torch.version.cuda, torch.version.hip = own
stand_in(target({arch!r}))
print(torch.version.cuda, torch.version.hip)
"""


@pytest.mark.parametrize(
    ("arch", "own", "said"),
    [
        ("sm90", ("13.0", None), "13.0 None"),  # torchvision compares it with what it was built for
        ("sm90", (None, None), "12.8 None"),
        ("gfx942", ("13.0", None), "None 6.4.43482"),
        ("gfx942", (None, "7.0"), "None 7.0"),
    ],
)
def test_torch_keeps_its_own_version(arch: str, own: tuple[str | None, str | None], said: str) -> None:
    code = VERSIONS.format(arch=arch, own=own)
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == said, done.stderr
