"""A driver that launches nothing and keeps what it was asked: host code's launches, seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from liger_aot.runtime.manifest import Pack, Variant
from tests.harness.drivers import AnyOp, bound_op


class RecordingDriver:
    """Of each kernel its variant, and the grid and arguments of its last launch. A tensor map is what it is made of;
    a driver without them has None for ``tensor_map``."""

    prefix: ClassVar[str] = ""  # left out of kernels' names

    def __init__(self, op: str, pack: Pack) -> None:
        self.launches: dict[str, tuple[Any, ...]] = {}
        self.loaded: dict[str, Variant] = {}

    def load(self, variant: Variant) -> Any:
        kernel = variant.name.split("-")[0].removeprefix(self.prefix)
        self.loaded[kernel] = variant

        def launch(*arguments: Any) -> None:
            self.launches[kernel] = arguments[2:]

        return SimpleNamespace(launch=launch)

    def stream(self, device: int) -> int:
        return 0

    def tensor_map(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


def recorded(
    op_class: type[AnyOp], pack: Pack, driver: type[RecordingDriver] = RecordingDriver
) -> tuple[AnyOp, list[RecordingDriver]]:
    """The op, and what it and each op that it uses launch."""
    made: list[RecordingDriver] = []

    def one(op: str, pack: Pack) -> RecordingDriver:
        made.append(driver(op, pack))
        return made[-1]

    return bound_op(op_class, pack, one), made


def all_launches(made: list[RecordingDriver]) -> dict[str, tuple[Any, ...]]:
    return {kernel: launch for driver in made for kernel, launch in driver.launches.items()}
