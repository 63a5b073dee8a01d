"""Binaries for few rows, and rows that programs share: which a call takes, and what that costs the next call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.ops.norms.rmsnorm import RMSNorm
from liger_aot.ops.op import Op
from liger_aot.ops.softmax.softmax import Softmax
from liger_aot.runtime.dispatch import KernelOn
from liger_aot.runtime.manifest import Pack, Variant
from liger_aot.runtime.remembered import REMEMBERED
from tests.harness.drivers import bound_op
from tests.harness.own_tables import pack_with

FEW = (
    '{ most_rows = 2, max_n = 64, form = "in_registers", aligned = true, block = 64, blocks = 1, num_warps = 1 },'
    '{ most_rows = 40, max_n = 256, form = "in_registers", aligned = true, block = 64, blocks = 4, num_warps = 1 },'
    '{ form = "long", block = 512, num_warps = 4 }'
)
SHARED = (
    '{ form = "split", aligned = true, block = 128, parts = 8, from_n = 512, up_to_rows = 3, num_warps = 4 }'
)


class Recorder:
    """A driver that launches nothing and keeps what it was asked."""

    def __init__(self, op: str, pack: Pack) -> None:
        self.loaded: list[str] = []
        self.launches: list[tuple[str, tuple[Any, ...]]] = []

    def stream(self, device: int) -> int:
        return 0

    def load(self, variant: Variant) -> Any:
        self.loaded.append(variant.name)
        launches, name = self.launches, variant.name

        class Launchable:
            def launch(self, device: int, stream: int, *arguments: Any) -> None:
                launches.append((name, arguments))

            def prepare(self, device: int) -> None:
                pass

        return Launchable()


def recorded(op_class: type[Op], folder: Path, shared: str = SHARED) -> tuple[Any, Recorder, KernelOn]:
    tables = {f"{op_class.name}_forward": FEW, f"{op_class.name}_split": shared}
    text = "".join(
        f'[kernel.{k}]\nprovenance = "made up for a test"\nrows = [{rows}]\n' for k, rows in tables.items()
    )
    op = bound_op(op_class, pack_with(op_class, folder / "pack", text), Recorder)
    (on,) = op._own.bound.values()
    return op, on._driver, on.kernels[f"{op_class.name}_forward"]  # type: ignore[return-value]


def block_of(launches: list[tuple[str, tuple[Any, ...]]]) -> str:
    """Form and numbers of the last launch."""
    _, form, *rest = launches[-1][0].split("-")
    return "-".join((form, *(part for part in rest if part.startswith("block"))))


def rows_of(rows: int, n: int) -> Tensor:
    return torch.ones(rows, n, dtype=torch.bfloat16)


@pytest.mark.parametrize("op_class", [RMSNorm, Softmax])
def test_the_choice(op_class: type[Op], tmp_path: Path) -> None:
    op, driver, _ = recorded(op_class, tmp_path)
    for rows, n, wanted in (
        (1, 64, "in_registers-block64-blocks1"),
        (2, 48, "in_registers-block64-blocks1"),
        (3, 64, "in_registers-block64-blocks4"),
        (2, 80, "in_registers-block64-blocks4"),
        (40, 256, "in_registers-block64-blocks4"),
        (41, 256, "long-block512"),
        (41, 64, "long-block512"),
        (1, 272, "long-block512"),
        (1, 63, "long-block512"),  # not aligned
        (100_000, 64, "long-block512"),
    ):
        for _ in range(2):  # the second time from what it remembers
            op(rows_of(rows, n))
            assert block_of(driver.launches) == wanted, (rows, n)
    assert len(driver.loaded) == len(set(driver.loaded)), "each binary is loaded once"


@pytest.mark.parametrize("op_class", [RMSNorm, Softmax])
def test_rows_that_programs_share(op_class: type[Op], tmp_path: Path) -> None:
    op, driver, _ = recorded(op_class, tmp_path)
    for rows, n, parts in ((1, 512, 4), (3, 528, 5), (2, 1024, 8)):
        driver.launches.clear()
        op(rows_of(rows, n))
        (first, sums), (second, combine) = driver.launches
        assert first == second and "_split-split-" in first
        assert sums[:3] == combine[:3] == (rows * parts, 1, 1)
        differing = [(a, b) for a, b in zip(sums, combine, strict=True) if a != b]
        assert differing == [(False, True)], "the step is all in which they differ"
    for rows, n in (
        (4, 512),
        (1, 496),
        (1, 1040),
        (1, 520),
        (50, 512),
    ):  # many, short, past 8 parts, not aligned
        driver.launches.clear()
        op(rows_of(rows, n))
        ((only, _),) = driver.launches
        assert "_forward-long-" in only, (rows, n)


def test_a_shared_row_is_not_loaded_where_it_is_not_taken(tmp_path: Path) -> None:
    op, driver, _ = recorded(RMSNorm, tmp_path)
    op(rows_of(1, 256))
    op(rows_of(4, 512))
    assert driver.loaded and not any("_split-" in name for name in driver.loaded)


def test_no_rows_are_shared_above_those_that_the_table_tells_apart(tmp_path: Path) -> None:
    op, driver, _ = recorded(RMSNorm, tmp_path, SHARED.replace("up_to_rows = 3", "up_to_rows = 1000"))
    op(rows_of(40, 512))
    assert "_split-" in driver.launches[-1][0]
    for rows in (41, 1000):
        op(rows_of(rows, 512))
        assert "_forward-long-" in driver.launches[-1][0]


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    """By rows, all above the largest number alike; by sizes, no more than REMEMBERED."""
    op, _, kernel = recorded(RMSNorm, tmp_path)
    for rows in (41, 57, 1000):
        op(rows_of(rows, 64))
    assert len([key for key in kernel.recent if len(key) == 5]) == 1
    for n in range(1, REMEMBERED + 200):
        kernel.for_rows((torch.bfloat16, torch.bfloat16, True), n, 1 + n % 40)
        assert len(kernel.recent) <= REMEMBERED


def test_tables_without_rows_for_few_tell_none_apart(tmp_path: Path) -> None:
    pack = pack_with(
        RMSNorm,
        tmp_path / "pack",
        '[kernel.rmsnorm_forward]\nprovenance = "made up for a test"\n'
        'rows = [{ form = "long", block = 512, num_warps = 4 }]\n',
    )
    op = bound_op(RMSNorm, pack, Recorder)
    for rows in (1, 2, 3):
        op(rows_of(rows, 64))
    (on,) = op._own.bound.values()
    kernel = on.kernels["rmsnorm_forward"]
    assert kernel.many_rows == 1 and len([key for key in kernel.recent if len(key) == 5]) == 1
