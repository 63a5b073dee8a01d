"""Triton on AMD binaries that the emulator executes: each launch goes through the C launcher to the stand-in driver,
and what that was asked for is then done, to the memory of CPU tensors.

pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures", "tests.harness.triton_emulator")
brings ``triton_emulator``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from liger_aot.runtime import devices
from tests.emulator.amd_emulator import Memory, Program
from tests.harness import storages
from tests.harness.drivers import _map_storages, _translate
from tests.harness.stand_in import StandIn, image

_LETTERS = {8: "p", 4: "i", 2: "h", 1: "b"}


class _Binary:
    def __init__(self, binary: Any, program: Program, programs: dict[int, Program]) -> None:
        self._binary, self._program, self._programs = binary, program, programs

    def prepare(self, device: int) -> tuple[int, int, int, int]:
        answer: tuple[int, int, int, int] = self._binary.prepare(device)
        self._programs[answer[0]] = self._program
        return answer


class _Launcher:
    def __init__(self, launch: Callable[..., None], after: Callable[[int], None]) -> None:
        self._launch, self._after = launch, after

    def launch(self, *arguments: Any) -> None:
        self._launch(*arguments)
        self._after(arguments[4])


class EmulatedDriver:
    """A Driver whose launches take place."""

    def __init__(self, driver: Any, stand_in: StandIn, arch: str) -> None:
        self._driver, self._stand_in, self._arch = driver, stand_in, arch
        self._programs: dict[int, Program] = {}
        self.executed: list[str] = []  # names of the kernels that ran
        self.instructions = 0  # of all their waves
        storages.watch()

    def call_key(self, *arguments: Any) -> Any:
        """The launcher's, which takes addresses itself."""
        found = self._driver.call_key(*arguments)
        for value in found[1] if found is not None else ():
            if isinstance(value, Tensor):
                value.data_ptr()  # which notes what may be touched
        return found

    def binary(self, data: bytes, name: str, /, *, shared: int) -> _Binary:
        program = Program(data, self._arch, name)
        # The stand-in adds the last two.
        letters = "".join(_LETTERS[field[".size"]] for field in _own(program)[:-2])
        return _Binary(
            self._driver.binary(image(f"{name}={letters}"), name, shared=shared), program, self._programs
        )

    def triton_launcher(self, name: str, letters: str, /, **more: Any) -> _Launcher:
        return _Launcher(self._driver.triton_launcher(name, letters, **more).launch, self._execute)

    def _execute(self, function: int) -> None:
        program = self._programs[function]
        record = self._stand_in.launches()[-1]
        parts, at = [], 0
        fields = _own(program)
        for field in fields:
            parts.append(record.parameters[at : at + field[".size"]])
            at += field[".size"]
        assert at == len(record.parameters)
        pointers = [
            int.from_bytes(part, "little") if field[".value_kind"] == "global_buffer" else 0
            for field, part in zip(fields, parts, strict=True)
        ]
        memory = Memory()
        mapped = _map_storages(memory, [pointer for pointer in pointers if pointer])
        values = [
            _translate(pointer, mapped) if pointer else part
            for pointer, part in zip(pointers, parts, strict=True)
        ]
        self.instructions += program.launch(memory, record.grid, values, record.block[0], record.shared)
        self.executed.append(record.name)


def _own(program: Program) -> list[Any]:
    """The kernel's parameters; the runtime adds others, which are hidden."""
    fields = program.descriptor.metadata.get(".args", ())
    return [field for field in fields if not field[".value_kind"].startswith("hidden_")]


@pytest.fixture
def triton_emulator(triton_amd_gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """An MI300X whose launches the emulator executes."""
    driver = EmulatedDriver(devices.driver(), triton_amd_gpu, "gfx942")
    monkeypatch.setattr(devices, "driver", lambda: driver)
    yield driver
