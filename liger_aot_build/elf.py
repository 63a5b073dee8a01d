"""A strict reader of little-endian ELF64 files, the container of both cubin and hsaco.

It is fed whatever a compiler, a disk or a fuzzer gives, so every offset and count that the file names is
checked against the file's own length before it is used. Constants are named as in the ELF specification
(System V gABI, chapters 4 and 5).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

ET_EXEC = 2
ET_DYN = 3
SHT_SYMTAB = 2
SHT_RELA = 4
SHT_NOTE = 7
SHT_NOBITS = 8
SHT_REL = 9
SHT_DYNSYM = 11
SHN_LORESERVE = 0xFF00
PT_LOAD = 1
PF_X = 1
STT_OBJECT = 1
STT_FUNC = 2

_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")


class BinaryFormatError(ValueError):
    """A binary is damaged, truncated or of a kind that is not supported. The message says what and where."""


@dataclass(frozen=True)
class Section:
    """One section header. Offset and size are bytes in the file, the address is in the loaded image."""

    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


@dataclass(frozen=True)
class Segment:
    """One program header. Memory past `file_size` and within `memory_size` is zero when loaded."""

    type: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int
    alignment: int


@dataclass(frozen=True)
class Symbol:
    """One symbol table entry. `other` keeps its raw bits: CUDA marks kernels there."""

    name: str
    type: int
    binding: int
    other: int
    section_index: int
    value: int
    size: int


@dataclass(frozen=True)
class Note:
    """One entry of a note section."""

    owner: str
    type: int
    description: bytes


def unpack_at(layout: struct.Struct, data: bytes, offset: int, what: str) -> tuple[Any, ...]:
    """Unpack `layout` at `offset` of `data`; BinaryFormatError names `what` when it does not fit."""
    if offset < 0 or offset + layout.size > len(data):
        raise BinaryFormatError(f"{what} at offset {offset:#x} ends past its {len(data)} bytes")
    return layout.unpack_from(data, offset)


def string_at(data: bytes, offset: int, what: str) -> str:
    """The NUL-terminated UTF-8 string at `offset` of `data`."""
    end = data.find(b"\0", offset) if 0 <= offset < len(data) else -1
    if end < 0:
        raise BinaryFormatError(f"{what}: no terminated string at offset {offset:#x} of {len(data)} bytes")
    try:
        return data[offset:end].decode()
    except UnicodeDecodeError as error:
        raise BinaryFormatError(f"{what}: the string at offset {offset:#x} is not UTF-8") from error


class Elf:
    """The headers of an ELF64 image, all checked when it is made.

    `sections` and `segments` are in file order, so a section's position is its index. Raises
    BinaryFormatError for anything malformed.
    """

    def __init__(self, image: bytes) -> None:
        self.image = bytes(image)
        (
            magic,
            elf_class,
            byte_order,
            ident_version,
            self.os_abi,
            self.abi_version,
            self.type,
            self.machine,
            _version,
            _entry,
            segments_offset,
            sections_offset,
            self.flags,
            header_size,
            segment_size,
            segment_count,
            section_size,
            section_count,
            names_index,
        ) = unpack_at(_HEADER, self.image, 0, "ELF header")
        if magic != b"\x7fELF":
            raise BinaryFormatError(f"not an ELF file: it starts with {magic!r}")
        if (elf_class, byte_order, ident_version) != (2, 1, 1):
            raise BinaryFormatError(
                f"not a little-endian ELF64 file: class {elf_class}, byte order {byte_order}, "
                f"version {ident_version}"
            )
        for what, size, expected in (
            ("ELF header", header_size, _HEADER.size),
            ("program header", segment_size if segment_count else _SEGMENT.size, _SEGMENT.size),
            ("section header", section_size if section_count else _SECTION.size, _SECTION.size),
        ):
            if size != expected:
                raise BinaryFormatError(f"a {what} is said to take {size} bytes instead of {expected}")
        self.segments = tuple(
            self._segment(index, segments_offset + index * _SEGMENT.size) for index in range(segment_count)
        )
        self.sections = self._sections(sections_offset, section_count, names_index)

    def _segment(self, index: int, offset: int) -> Segment:
        kind, flags, start, address, _, file_size, memory_size, alignment = unpack_at(
            _SEGMENT, self.image, offset, f"program header {index}"
        )
        if start + file_size > len(self.image):
            raise BinaryFormatError(
                f"segment {index} ({start:#x} + {file_size:#x}) ends past the file's {len(self.image)} bytes"
            )
        if kind == PT_LOAD and (file_size > memory_size or address + memory_size > 1 << 64):
            raise BinaryFormatError(
                f"segment {index}: {file_size:#x} bytes do not fit its memory {address:#x} + {memory_size:#x}"
            )
        return Segment(kind, flags, start, address, file_size, memory_size, alignment)

    def _sections(self, offset: int, count: int, names_index: int) -> tuple[Section, ...]:
        headers = [
            unpack_at(_SECTION, self.image, offset + index * _SECTION.size, f"section header {index}")
            for index in range(count)
        ]
        for index, (_, kind, _, _, start, size, *_) in enumerate(headers):
            if kind != SHT_NOBITS and start + size > len(self.image):
                raise BinaryFormatError(
                    f"section {index} ({start:#x} + {size:#x}) ends past the file's {len(self.image)} bytes"
                )
        if not headers:
            return ()
        if names_index >= count:
            raise BinaryFormatError(f"section names are said to be in section {names_index} of {count}")
        names_start, names_size = headers[names_index][4:6]
        names = self.image[names_start : names_start + names_size]
        return tuple(
            Section(string_at(names, header[0], f"name of section {index}"), *header[1:])
            for index, header in enumerate(headers)
        )

    def data(self, section: Section) -> bytes:
        """The section's bytes in the file: none for a section that only takes memory (SHT_NOBITS)."""
        if section.type == SHT_NOBITS:
            return b""
        return self.image[section.offset : section.offset + section.size]

    def section(self, name: str) -> Section | None:
        """The only section of that name, or None. Two of the same name are an error."""
        found = [section for section in self.sections if section.name == name]
        if len(found) > 1:
            raise BinaryFormatError(f"there are {len(found)} sections named {name!r}")
        return found[0] if found else None

    def symbols(self, table_type: int = SHT_SYMTAB) -> tuple[Symbol, ...]:
        """The symbol table of that type (SHT_SYMTAB or SHT_DYNSYM) in index order, its null entry included.

        Empty where the file has no such table. An entry's section index is checked.
        """
        tables = [section for section in self.sections if section.type == table_type]
        if not tables:
            return ()
        if len(tables) > 1:
            raise BinaryFormatError(f"there are {len(tables)} symbol tables of type {table_type}")
        (table,) = tables
        if table.entry_size != _SYMBOL.size or table.size % _SYMBOL.size:
            raise BinaryFormatError(
                f"symbol table {table.name!r}: {table.size} bytes in entries of {table.entry_size}"
            )
        if table.link >= len(self.sections):
            raise BinaryFormatError(f"symbol table {table.name!r} takes names from section {table.link}")
        names = self.data(self.sections[table.link])
        return tuple(
            self._symbol(fields, names, f"symbol {index} of {table.name!r}")
            for index, fields in enumerate(_SYMBOL.iter_unpack(self.data(table)))
        )

    def _symbol(self, fields: tuple[Any, ...], names: bytes, what: str) -> Symbol:
        name_offset, info, other, section_index, value, size = fields
        if len(self.sections) <= section_index < SHN_LORESERVE:
            raise BinaryFormatError(f"{what} is in section {section_index} of {len(self.sections)}")
        return Symbol(
            string_at(names, name_offset, what), info & 15, info >> 4, other, section_index, value, size
        )

    def notes(self) -> tuple[Note, ...]:
        """Every note of every SHT_NOTE section, in file order."""
        return tuple(
            note
            for section in self.sections
            if section.type == SHT_NOTE
            for note in _notes(self.data(section), f"note section {section.name!r}")
        )


def _notes(data: bytes, what: str) -> list[Note]:
    notes = []
    offset = 0
    while offset < len(data):
        owner_size, description_size, kind = unpack_at(_NOTE, data, offset, what)
        owner_start = offset + _NOTE.size
        start = owner_start + _round_up_4(owner_size)
        if start + description_size > len(data):
            raise BinaryFormatError(f"{what}: the note at {offset:#x} ends past its {len(data)} bytes")
        owner = string_at(data[owner_start : owner_start + owner_size], 0, what) if owner_size else ""
        notes.append(Note(owner, kind, data[start : start + description_size]))
        offset = start + _round_up_4(description_size)
    return notes


def _round_up_4(size: int) -> int:
    return (size + 3) // 4 * 4
