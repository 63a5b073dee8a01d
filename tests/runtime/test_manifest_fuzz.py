"""Thousands of damaged manifests whose hashes fit: each is refused by name or works, and opens the pack's files."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from liger_aot.errors import LigerAOTError
from liger_aot.runtime.dispatch import DTYPE_NAMES, OpOn
from liger_aot.runtime.manifest import OpManifest, Pack, Variant
from tests.conftest import built_pack

STRANGE: list[Any] = [
    None, True, False, -1, 0, 1, 7, 2**31 - 1, 2**31, 2**63, -(2**64), 10**400, 0.5, 1e308, float("nan"), float("inf"),
    "", "..", "../x", "../../../../../../etc/passwd", "/etc/passwd", "a\0b", "a/b", "\ud800", "é", "x" * 5000,
    "bf16/aligned", "fp32/fp32/generic", "pppp", [], {}, [[]], [None], [[None, "x"]], [[1, []]], [["1", {}]], {"": []},
]  # fmt: skip


class Opens:
    """The paths that this process opens while ``watching``; an audit hook cannot be taken off again."""

    def __init__(self) -> None:
        self.watching = False
        self.paths: set[str] = set()
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event == "open":
            self.paths.add(str(arguments[0]))


@pytest.fixture(scope="module")
def opens() -> Opens:
    return Opens()


@pytest.fixture
def pack(tmp_path: Path, opens: Opens) -> Iterator[Path]:
    """A pack to damage; in the end, all that was opened lies in it."""
    folder = tmp_path / "sm90"
    shutil.copytree(built_pack("sm90").folder, folder)
    opens.paths.clear()
    yield folder
    assert opens.paths, "the hook sees nothing"
    outside = {path for path in opens.paths if not Path(path).resolve().is_relative_to(folder)}
    assert not outside


class Reader:
    """A driver that reads a binary and launches nothing."""

    def load(self, variant: Variant) -> Any:
        assert 1 <= variant.threads <= 1024 and variant.symbol.isprintable() and variant.read()
        return self

    def stream(self, device: int) -> int:
        return 0

    def launch(self, *_: Any) -> None:
        raise AssertionError("nothing is launched")

    def prepare(self, device: int, /) -> None:
        pass


def use(manifest: OpManifest) -> int:
    """Everything that an op does with its manifest; the number of binaries that were read."""
    on = OpOn(manifest, Reader(), 0, 132)
    for kernel in manifest.kernels.values():
        for key in kernel.tables:
            *axes, alignment = key.split("/")
            dtypes = [d for a in axes for d, name in DTYPE_NAMES.items() if name == a]
            for n in (1, 128, 8191, 1 << 31):
                found = on.kernels[kernel.name]((*dtypes, alignment == "aligned"), n)
                assert found.variant.name in manifest.variants
    on.preload()
    return len(manifest.variants)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def mutate(document: Any, rng: random.Random) -> None:
    """Change one place of a document: its value, its name, its neighbours."""
    spots = list(places(document))
    container, key = rng.choice(spots)
    action = rng.randrange(6)
    if action <= 1:
        container[key] = rng.choice(STRANGE)
    elif action == 2:
        del container[key]
    elif action == 3:  # another place's value
        other, at = rng.choice(spots)
        container[key] = json.loads(json.dumps(other[at]))
    elif isinstance(container, dict):
        name = rng.choice([s for s in STRANGE if isinstance(s, str)])
        container[name] = container.pop(key) if action == 4 else container[key]
    else:
        container.insert(key, rng.choice([*STRANGE, container[key]]))


def scramble(data: bytes, rng: random.Random) -> bytes:
    """Change the bytes of a file: flips, cuts, repeats, insertions."""
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    b = min(b, a + 64)
    action = rng.randrange(5)
    if action == 0:
        return data[:a] + bytes([data[a] ^ 1 << rng.randrange(8)]) + data[a + 1 :]
    if action == 1:
        return data[:a]
    if action == 2:
        return data[:a] + data[b:]
    if action == 3:
        return data[:b] + data[a:b] + data[b:]
    return (
        data[:a] + rng.choice([b"[" * 100_000, b"9" * 5000, b"\xff", b"\0", b'"', b"}", b"1e999"]) + data[a:]
    )


def damaged(data: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    if seed % 3 == 0:
        return scramble(data, rng)
    document = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        if document:
            mutate(document, rng)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("op", "runs"),
    [
        ("column_sums", 300),
        pytest.param("column_sums", 3000, marks=pytest.mark.slow),
        pytest.param("rmsnorm", 150, marks=pytest.mark.slow),
    ],
)
def test_damaged_op_manifests(pack: Path, opens: Opens, op: str, runs: int) -> None:
    path = pack / f"{op}.json"
    whole = path.read_bytes()
    outcomes = {"refused": 0, "works": 0}
    for seed in range(runs):
        data = damaged(whole, seed)
        path.write_bytes(data)
        opens.watching = True
        try:
            use(OpManifest(path, pack / f"{op}.bin", sha256(data).hexdigest()))
            outcomes["works"] += 1
        except LigerAOTError as error:
            assert len(str(error)) < 2000, "a message is for reading"
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed} of {op}: {type(error).__name__}: {error}") from error
        finally:
            opens.watching = False
    assert min(outcomes.values()) > runs // 50, f"both ends are reached: {outcomes}"


@pytest.mark.parametrize("runs", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_manifests(pack: Path, opens: Opens, runs: int) -> None:
    path = pack / "manifest.json"
    whole = path.read_bytes()
    outcomes = {"refused": 0, "works": 0}
    for seed in range(runs):
        path.write_bytes(damaged(whole, seed))
        opens.watching = True
        try:
            found = Pack(pack)
            for op in found.ops:
                for name in found.op(op).variants[:1]:  # some ops launch other ops' kernels alone
                    found.op(op).variant(name).read()
            outcomes["works"] += 1
        except LigerAOTError as error:
            assert len(str(error)) < 2000, "a message is for reading"
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            opens.watching = False
    assert min(outcomes.values()) > runs // 50, f"both ends are reached: {outcomes}"
