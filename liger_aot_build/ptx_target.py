"""Have Triton's PTX assembled for another machine than the one that Triton names.

From compute capability 9.0 on, Triton 3.6.0 names the architecture-specific machine: sm_90a, sm_100a, sm_120a. Such a
cubin runs on that capability alone. The same PTX assembled for sm_120 runs on 12.0 and 12.1, and assembled for the
family-specific sm_100f, which has tcgen05, on 10.0 and 10.3. ptxas makes the same machine code for each; it refuses an
instruction that the machine named lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from liger_aot_build.compiler import Compiled, Job, compile_job


def compile_for(job: Job, machine: str) -> Compiled | str:
    """``compile_job`` with its PTX assembled for ``machine``."""
    with _assembled_for(machine):
        return compile_job(job)


def own_machine(target: str) -> str:
    """The machine that Triton assembles its PTX for, of a compute capability such as "90"."""
    return f"sm_{target}a" if int(target) >= 90 else f"sm_{target}"


@contextmanager
def _assembled_for(machine: str) -> Iterator[None]:
    from triton import knobs
    from triton.backends.nvidia import compiler

    def assembled(backend: Any, stages: dict[str, Any], *_: Any) -> None:
        make_ptx, make_cubin = stages["ptx"], stages["cubin"]
        own = compiler.sm_arch_from_capability(backend.target.arch)

        def ptx(source: Any, metadata: Any) -> str:
            text: str = make_ptx(source, metadata)
            if text.count(line := f".target {own}\n") != 1:
                raise ValueError(f"the PTX has no line {line!r} to change")
            return text.replace(line, f".target {machine}\n")

        def cubin(source: Any, metadata: Any) -> bytes:
            named = compiler.sm_arch_from_capability
            compiler.sm_arch_from_capability = lambda capability: machine
            try:
                image: bytes = make_cubin(source, metadata)
                return image
            finally:
                compiler.sm_arch_from_capability = named

        stages["ptx"], stages["cubin"] = ptx, cubin

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = assembled
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before
