"""The MessagePack decoder on the encodings of the specification, each by hand, and on damage."""

from __future__ import annotations

import pytest

from liger_aot_build import msgpack
from liger_aot_build.elf import BinaryFormatError


@pytest.mark.parametrize(
    ("data", "value"),
    (
        ("c0", None),
        ("c2", False),
        ("c3", True),
        ("7f", 127),
        ("e0", -32),
        ("cc80", 128),
        ("cd0100", 256),
        ("ce00010000", 65536),
        ("cfffffffffffffffff", 2**64 - 1),
        ("d080", -128),
        ("d18000", -32768),
        ("d280000000", -(2**31)),
        ("d38000000000000000", -(2**63)),
        ("ca3fc00000", 1.5),
        ("cb3ff8000000000000", 1.5),
        ("a3c3a961", "éa"),
        ("d90161", "a"),
        ("da000161", "a"),
        ("db0000000161", "a"),
        ("c40200ff", b"\x00\xff"),
        ("c5000100", b"\x00"),
        ("c60000000100", b"\x00"),
        ("9201c0", [1, None]),
        ("dc00020102", [1, 2]),
        ("dd000000020102", [1, 2]),
        ("82a16101a1629103", {"a": 1, "b": [3]}),
        ("de0001a16180", {"a": {}}),
        ("df00000001a16190", {"a": []}),
    ),
)
def test_msgpack_values(data: str, value: object) -> None:
    decoded = msgpack.decode(bytes.fromhex(data))
    assert decoded == value and type(decoded) is type(value)


@pytest.mark.parametrize(
    "data",
    (
        "",
        "cd01",
        "a361",
        "92c0",
        "81a161",
        "d4c000",
        "c1",
        "a1ff",
        "c0c0",
        "8101c0",
        "82a161c0a161c0",
        "91" * 40,
    ),
)
def test_msgpack_damage(data: str) -> None:
    with pytest.raises(BinaryFormatError):
        msgpack.decode(bytes.fromhex(data))
