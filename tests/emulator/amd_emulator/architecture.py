"""The architectures that the emulator knows, and in what their instructions differ where the names don't say it."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import EmulatorError


@dataclass(frozen=True)
class Architecture:
    """`tables` are those of opcodes.py that it has, `lanes` those of a wave, `local_bytes` the LDS of a workgroup.

    `rdna`: its encodings are RDNA's, it has no accumulators, a register for masks takes as many bits as a wave
    has lanes, and 16-bit results and loads leave the other half of their register alone. `ids_in_traps`: a
    workgroup's position is in trap registers. `flushes_matrices`: its f16 and bf16 matrix instructions read and
    write denormals as zeros. `names_halves`: LLVM has 16-bit operands in either half of a register there;
    elsewhere on RDNA in the lower half alone.
    """

    name: str
    tables: tuple[str, ...]
    lanes: int
    local_bytes: int = 65536
    rdna: bool = False
    ids_in_traps: bool = False
    flushes_matrices: bool = False
    names_halves: bool = False

    @property
    def mask_registers(self) -> int:
        """How many scalar registers hold a bit a lane."""
        return self.lanes // 32


_ALL = (
    Architecture("gfx90a", ("cdna", "gfx90a"), 64, flushes_matrices=True),
    Architecture("gfx942", ("cdna", "cdna3", "gfx942"), 64),
    Architecture("gfx950", ("cdna", "cdna3", "gfx950"), 64, local_bytes=163840),
    Architecture("gfx1100", ("rdna", "rdna3"), 32, rdna=True, names_halves=True),
    Architecture("gfx1151", ("rdna", "rdna3", "scalar floats"), 32, rdna=True, names_halves=True),
    *(
        Architecture(name, ("rdna", "scalar floats", "rdna4"), 32, rdna=True, ids_in_traps=True)
        for name in ("gfx1200", "gfx1201")
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}


def architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise EmulatorError(f"unknown architecture {name!r}: there are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
