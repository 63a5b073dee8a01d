"""A MessagePack decoder, no larger than the metadata of AMD code objects needs.

Format: the specification in github.com/msgpack/msgpack. The build depends on setuptools, Triton and tqdm
alone, and this is the one place where it meets MessagePack.
Extension types are refused, map keys are strings, and nesting is limited: metadata is four levels deep.
"""

from __future__ import annotations

import struct
from typing import Any

from liger_aot_build.elf import BinaryFormatError, unpack_at

_MAX_DEPTH = 16
_NUMBERS = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# Leading byte -> (what follows, the layout of its length).
_LENGTHS = {
    0xC4: ("bytes", struct.Struct(">B")),
    0xC5: ("bytes", struct.Struct(">H")),
    0xC6: ("bytes", struct.Struct(">I")),
    0xD9: ("string", struct.Struct(">B")),
    0xDA: ("string", struct.Struct(">H")),
    0xDB: ("string", struct.Struct(">I")),
    0xDC: ("array", struct.Struct(">H")),
    0xDD: ("array", struct.Struct(">I")),
    0xDE: ("map", struct.Struct(">H")),
    0xDF: ("map", struct.Struct(">I")),
}
_BYTE = struct.Struct(">B")


def decode(data: bytes) -> Any:
    """The one value that `data` holds, to its last byte. Raises BinaryFormatError."""
    value, end = _value(data, 0, 0)
    if end != len(data):
        raise BinaryFormatError(f"MessagePack: {len(data) - end} bytes left over after the value")
    return value


def _value(data: bytes, offset: int, depth: int) -> tuple[Any, int]:
    """The value at `offset` and the offset behind it."""
    (lead,) = unpack_at(_BYTE, data, offset, "MessagePack value")
    offset += 1
    if lead < 0x80:
        return lead, offset
    if lead >= 0xE0:
        return lead - 0x100, offset
    if lead in _CONSTANTS:
        return _CONSTANTS[lead], offset
    if lead in _NUMBERS:
        layout = _NUMBERS[lead]
        return unpack_at(layout, data, offset, "MessagePack number")[0], offset + layout.size
    if lead < 0x90:
        kind, length = "map", lead & 0x0F
    elif lead < 0xA0:
        kind, length = "array", lead & 0x0F
    elif lead < 0xC0:
        kind, length = "string", lead & 0x1F
    elif lead in _LENGTHS:
        kind, layout = _LENGTHS[lead]
        (length,) = unpack_at(layout, data, offset, "MessagePack length")
        offset += layout.size
    else:
        raise BinaryFormatError(f"MessagePack: type {lead:#04x} at offset {offset - 1:#x} is not supported")
    if kind in ("bytes", "string"):
        return _text(data, offset, length, kind), offset + length
    if depth == _MAX_DEPTH:
        raise BinaryFormatError(f"MessagePack: more than {_MAX_DEPTH} levels at offset {offset:#x}")
    if kind == "array":
        return _array(data, offset, length, depth + 1)
    return _map(data, offset, length, depth + 1)


def _text(data: bytes, offset: int, length: int, kind: str) -> bytes | str:
    if offset + length > len(data):
        raise BinaryFormatError(f"MessagePack: {kind} of {length} bytes at {offset:#x} ends past {len(data)}")
    text = data[offset : offset + length]
    if kind == "bytes":
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BinaryFormatError(f"MessagePack: the string at offset {offset:#x} is not UTF-8") from error


def _array(data: bytes, offset: int, length: int, depth: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(length):  # a false length ends at the first value past the data
        item, offset = _value(data, offset, depth)
        items.append(item)
    return items, offset


def _map(data: bytes, offset: int, length: int, depth: int) -> tuple[dict[str, Any], int]:
    entries: dict[str, Any] = {}
    for _ in range(length):
        key, value_offset = _value(data, offset, depth)
        if not isinstance(key, str) or key in entries:
            raise BinaryFormatError(f"MessagePack: map key {key!r} at {offset:#x} is repeated or no string")
        entries[key], offset = _value(data, value_offset, depth)
    return entries, offset
