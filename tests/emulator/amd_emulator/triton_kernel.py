"""Compiling a Triton function for an AMD architecture, and running it on numpy arrays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from .architecture import architecture
from .memory import Memory
from .program import Program


@dataclass(frozen=True)
class TritonKernel:
    """A compiled kernel; `shared` is its dynamic LDS in bytes."""

    image: bytes
    arch: str
    name: str
    num_warps: int
    shared: int

    def program(self) -> Program:
        return Program(self.image, self.arch, self.name)

    def run(
        self,
        grid: tuple[int, ...],
        *arguments: np.ndarray | int | float,
        program: Program | None = None,
        **limits: int,
    ) -> int:
        """Launch over 1 to 3 axes; arrays are passed by address. Returns the number of instructions."""
        memory = Memory()
        values = [
            memory.add(value, f"argument {i}") if isinstance(value, np.ndarray) else value
            for i, value in enumerate(arguments)
        ]
        x, y, z = (*grid, 1, 1)[:3]
        program = program or self.program()
        threads = architecture(self.arch).lanes * self.num_warps
        return program.launch(memory, (x, y, z), values, threads, self.shared, **limits)


def compile_kernel(
    function: Any,
    arch: str,
    types: Mapping[str, str],
    constants: Mapping[str, int | bool] | None = None,
    aligned: Sequence[str] = (),
    num_warps: int = 4,
    **options: Any,
) -> TritonKernel:
    """Compile a triton.jit function; `aligned` are arguments that are multiples of 16. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants or {}
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        function,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("hip", arch, architecture(arch).lanes)
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        kernel = triton.compile(source, target=target, options={"num_warps": num_warps, **options})
        metadata: Any = kernel.metadata
        return TritonKernel(kernel.asm["hsaco"], arch, metadata.name, metadata.num_warps, metadata.shared)
