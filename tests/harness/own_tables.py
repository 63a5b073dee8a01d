"""Ops on the interpreter whose kernels are launched by tables of a test's own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from liger_aot.ops.differentiable import DifferentiableOp
from liger_aot.ops.op import Op
from liger_aot.runtime.manifest import Pack
from liger_aot_build.declaration import read_declaration
from liger_aot_build.plan import plan
from liger_aot_build.profile import read_profile
from tests.conftest import built_pack
from tests.harness.drivers import InterpreterDriver, bound_op
from tests.harness.op_tests import Case, OpTests, Way
from tests.harness.pack_edits import add_kernels, edit
from tests.liger_aot_build.small_op import hardware, write_profile

# Of pipelines of blocks of 64 columns, two of them in registers: rows of at most five blocks, which stay on chip; rows
# of any length, of which some blocks are read twice.
WHOLE = "max_n = 320, in_registers = 2, stages = 3, prefetch = PREFETCH"
REREAD = "max_n = 1000000, in_registers = 2, stages = 4, prefetch = PREFETCH, whole = false"
# No block but those in registers, one more, as many as there are stages, more; last blocks of one line or two, and
# whole ones.
LENGTHS = (16, 64, 80, 128, 144, 192, 208, 256, 304, 320)
LONGER = (384, 400, 448, 512, 656, 960)


def with_pipeline(tables: str, numbers: str, prefetch: int) -> str:
    """``tables`` with WHOLE or REREAD in place of NUMBERS."""
    return tables.replace("NUMBERS", numbers.replace("PREFETCH", str(prefetch)))


def pack_with(op_class: type[Op], folder: Path, tables: str) -> Pack:
    """An op of sm90's built pack, without binaries, but for the kernels that ``tables``, a profile's, are of: those are
    launched by them. ``folder`` is made."""
    built, name = built_pack("sm90"), op_class.name
    folder.mkdir()
    for file in ("manifest.json", *(f"{op}.json" for op in (name, *op_class.uses))):
        shutil.copy(built.folder / file, folder / file)
    profile = read_profile("sm90", write_profile(folder / "profiles", "sm90", hardware("sm90") + tables))
    declaration = read_declaration(name)
    kernels = {kernel: declaration.kernels[kernel] for kernel in profile.tables}

    def forget(document: dict[str, dict[str, object]]) -> None:
        for kernel in kernels:
            document["kernels"].pop(kernel, None)

    edit(folder / f"{name}.json", forget)
    add_kernels(folder / f"{name}.json", plan(replace(declaration, kernels=kernels), profile))
    return Pack(folder)


def way_with(op_class: type[DifferentiableOp], folder: Path, tables: str) -> Way:
    """The op of such a pack on the interpreter."""
    pack = pack_with(op_class, folder, tables)
    return Way(bound_op(op_class, pack, InterpreterDriver), "cpu", dict(pack.tolerance))


def way_of(tests: OpTests, folder: Path, **rows: str) -> Way:
    """The op of ``tests`` with kernels of these rows, each named by its kernel."""
    tables = (
        f'[kernel.{kernel}]\nprovenance = "made up for a test"\nrows = [{text}]\n'
        for kernel, text in rows.items()
    )
    return way_with(tests.op_class, folder / "pack", "".join(tables))


def check_form(tests: OpTests, way: Way, form: str, *cases: Case) -> None:
    """The cases' results are right, and the form was used."""
    for seed, case in enumerate(cases):
        tests.check(way.op, case, way.allowed, seed=seed)
    assert {name for name in way.loaded() if f"-{form}-" in name}
