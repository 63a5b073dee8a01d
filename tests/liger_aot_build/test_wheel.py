"""The wheel as a stranger gets it: what is in it, that it runs with no Triton, no compiler and nothing to write to, and
that the same source makes the same bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

import pytest

import liger_aot
from examples.fresh_environment import make_environment
from liger_aot_build.build import project_version
from liger_aot_build.declaration import declared_ops
from liger_aot_build.detect import VARIABLE
from liger_aot_build.device_wheel import write_device_wheel
from liger_aot_build.paths import CACHE, ROOT
from liger_aot_build.profile import profile_names
from tests.conftest import built_pack
from tests.liger_aot_build.wheel_builds import build, copy_tree

pytestmark = pytest.mark.slow
OP = "swiglu"  # ten binaries an architecture: what wheels are does not depend on how many they hold
LARGEST_WHEEL = 15_000_000  # bytes


def metadata(wheel: Path, name: str = "METADATA") -> Message:
    with ZipFile(wheel) as archive:
        return BytesParser().parsebytes(archive.read(f"liger_aot-{project_version()}.dist-info/{name}"))


def packs_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {
            n.split("/")[1]
            for n in archive.namelist()
            if n.startswith("liger_aot_packs/") and n.count("/") > 1
        }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("source") / "liger-aot", CACHE)


@pytest.fixture(scope="module")
def full_wheel(tree: Path) -> Path:
    """Of all architectures, with one op."""
    return build(tree, "all", OP)


@pytest.fixture(scope="module")
def host_wheel(tree: Path) -> Path:
    return build(tree, "none")


class Installed:
    """A wheel in an environment with torch and without Triton."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.python = make_environment(folder / "environment", wheel)
        self.empty = folder / "empty"
        self.empty.mkdir()

    def run(self, *arguments: str | Path, exit_code: int = 0) -> str:
        """Run a command of the environment where no compiler is found and home, current and temporary folder can't be
        written to by anyone; its output. Nothing may have been written to the environment."""
        before = self.files()
        done = subprocess.run(
            [self.python.parent / arguments[0], *arguments[1:]],
            cwd="/proc",
            env={
                "PATH": str(self.empty),
                "HOME": "/dev/null",
                "TMPDIR": "/dev/null",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        assert self.files() == before
        return done.stdout

    def files(self) -> set[str]:
        """Every file of the environment itself, not those it links to."""
        return {os.path.join(root, name) for root, _, names in os.walk(self.folder) for name in names}


@pytest.fixture(scope="module")
def installed(full_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), full_wheel)


def test_one_wheel_for_every_python(full_wheel: Path) -> None:
    """abi3: one wheel serves CPython 3.10 and all that follow."""
    tag = full_wheel.name.removesuffix(".whl").split("-", 2)[2]
    assert tag.startswith("cp310-abi3-linux_")
    assert metadata(full_wheel, "WHEEL")["Tag"] == tag
    assert metadata(full_wheel)["Requires-Python"] == ">=3.10"


def test_contents(full_wheel: Path) -> None:
    """Python files, typing, the launcher, packs, and what ``liger-aot pack`` builds with: no device code, no tests."""
    modules = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python" / "liger_aot").rglob("*.py*")}
    modules = {m for m in modules if "__pycache__" not in m}
    with ZipFile(full_wheel) as archive:
        names = set(archive.namelist())
    own = {n for n in names if n.startswith("liger_aot/")}
    assert own == modules | {
        "liger_aot/py.typed",
        "liger_aot/kernels/metadata.json",
        "liger_aot/_launch.abi3.so",
    }
    rest = {n.split("/")[0] for n in names - own}
    startup = {"liger_aot.pth", "_liger_aot_startup.py"}  # LIGER_AOT_LIGER=1
    info = f"liger_aot-{project_version()}.dist-info"
    assert rest == {"liger_aot_packs", "liger_aot_build", info} | startup
    tools = {str(p.relative_to(ROOT)) for p in (ROOT / "liger_aot_build").rglob("*.py")}
    profiles = {f"liger_aot_build/arch_profiles/{name}.toml" for name in profile_names()}
    assert {n for n in names if n.startswith("liger_aot_build/")} == tools | profiles


@pytest.mark.skipif(
    "LIGER_AOT_PACKS" not in os.environ, reason="weighs whole packs, which make test-all builds"
)
@pytest.mark.parametrize("arch", profile_names())
def test_a_wheel_of_an_architecture_is_small(arch: str, tmp_path: Path) -> None:
    assert write_device_wheel(built_pack(arch).folder, tmp_path).stat().st_size <= LARGEST_WHEEL


def test_only_the_packs_asked_for(tree: Path, full_wheel: Path, host_wheel: Path) -> None:
    """And nothing else differs: dependencies and extras never depend on the architectures."""
    two = build(tree, "sm90,gfx942", OP)
    assert packs_in(two) == {"sm90", "gfx942"}
    assert packs_in(host_wheel) == set()
    assert metadata(two).as_bytes() == metadata(host_wheel).as_bytes() == metadata(full_wheel).as_bytes()
    requirements = metadata(full_wheel).get_all("Requires-Dist", [])
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.6"]


def test_an_unknown_architecture_stops_the_build(tree: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", "."]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, VARIABLE: "sm90,h100"}, capture_output=True, text=True
    )
    assert done.returncode != 0
    text = re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert f"error: unknown architecture 'h100': known are {', '.join(profile_names())}" in text
    assert "Traceback" not in text


FORWARD_AND_BACKWARD = """
import sys, torch, liger_aot
rmsnorm = liger_aot.load("rmsnorm")
x = torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(48, dtype=torch.bfloat16, requires_grad=True)
y = rmsnorm(x, weight, eps=1e-6)
y.sum().backward()
wide = x.detach().double()
exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.detach().double()
torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=0.0)
assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
assert torch.isfinite(x.grad).all() and torch.isfinite(weight.grad).all()
found = {name.split(".")[0] for name in sys.modules}
print(sorted(found & {"triton", "liger_aot_build", "csrc_triton", "setuptools", "importlib_metadata"}))
print(liger_aot.__version__, *liger_aot.archs())
"""


def test_it_runs_with_nothing_else(installed: Installed) -> None:
    lines = installed.run("python", "-c", FORWARD_AND_BACKWARD).splitlines()
    assert lines == ["[]", " ".join((liger_aot.__version__, *profile_names()))]


def test_there_is_no_triton_there(installed: Installed) -> None:
    """Else the test above would prove little."""
    code = "from importlib.util import find_spec; print(find_spec('triton'), find_spec('torch') is not None)"
    assert installed.run("python", "-c", code) == "None True\n"


def test_without_packs(host_wheel: Path, tmp_path: Path) -> None:
    """The host wheel alone: import, load and the CPU work."""
    lines = Installed(tmp_path, host_wheel).run("python", "-c", FORWARD_AND_BACKWARD).splitlines()
    assert lines == ["[]", liger_aot.__version__]


def test_command_line(installed: Installed) -> None:
    text = installed.run("liger-aot", "verify")
    assert all(arch in text for arch in profile_names())
    text = installed.run("liger-aot", "list")
    assert all(word in text for word in (*profile_names(), *declared_ops()))
    text = installed.run(
        "liger-aot", "explain", OP, "--shape", "8192,4096", "--dtype", "bf16", "--arch", "gfx942"
    )
    assert f"{OP}_forward" in text and f"gfx942.toml: [kernel.{OP}_forward] row" in text


def test_doctor(installed: Installed) -> None:
    """Its exit code says whether the machine's GPUs are served: here it is asked only for its report."""
    code = "from liger_aot.doctor import examine; print(examine())"
    text = installed.run("python", "-c", code)
    assert "torch" in text and all(arch in text for arch in profile_names())


def test_demo(tree: Path, tmp_path: Path) -> None:
    text = Installed(tmp_path, build(tree, "gfx942", "rmsnorm")).run("python", ROOT / "examples" / "demo.py")
    assert "not installed" in text and "none on PATH" in text
    assert "  gfx942 " in text


def test_a_damaged_file_is_found(full_wheel: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path, full_wheel)
    (binaries,) = installed.folder.rglob(f"liger_aot_packs/gfx942/{OP}.bin")
    binaries.write_bytes(binaries.read_bytes()[:-1] + b"?")
    assert f"{OP}.bin: {OP}_" in installed.run("liger-aot", "verify", exit_code=1)


def test_the_same_bytes_in_any_folder(tree: Path, tmp_path: Path) -> None:
    """A second copy elsewhere: the launcher, the packs and the whole wheel are the same. Kernels come from the cache:
    that compiling them again makes the same bytes is shown with fewer, in test_split_wheels.py."""
    again = build(copy_tree(tmp_path / "somewhere else" / "deeper", CACHE), "gfx942", OP)
    once = build(tree, "gfx942", OP)
    with ZipFile(once) as first, ZipFile(again) as second:
        assert first.namelist() == second.namelist()
        assert [n for n in first.namelist() if first.read(n) != second.read(n)] == []
    assert once.read_bytes() == again.read_bytes()
