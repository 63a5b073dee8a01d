"""How much of a wrong binary the tests of the ops notice: bits of the packs' code are flipped, one at a time.

A flip may be harmless: a reserved bit, a cache hint, a register that holds the same, what only NaN needs. So not all
can be noticed: 68 to 72% were of rmsnorm, 52 to 56% of softmax, 64 to 72% of flash_attention. What is asserted lies
below, and the numbers stand in the summary of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.norms.rmsnorm import RMSNorm
from liger_aot.ops.softmax.softmax import Softmax
from tests.conftest import built_pack
from tests.emulator.amd_emulator import EmulatorError, Program, matrix
from tests.emulator.amd_emulator.instruction import Instruction
from tests.emulator.amd_emulator.mutation import flipped
from tests.emulator.amd_emulator.scalar import Step
from tests.emulator.amd_emulator.wave import Wave
from tests.harness import drivers
from tests.harness.op_cases import BF16, Case
from tests.ops.attention import attention_cases
from tests.ops.norms import test_rmsnorm
from tests.ops.softmax import test_softmax

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("poisoned"),
]
MOST_INSTRUCTIONS = 60_000  # of a launch: a flip may make an endless loop

Check = Callable[[Any, Mapping[str, float]], None]


def rmsnorm(op: Any, allowed: Mapping[str, float]) -> None:
    test_rmsnorm.TestRMSNorm().check(op, Case((2, 240), BF16, weight=BF16), allowed)


def softmax(op: Any, allowed: Mapping[str, float]) -> None:
    test_softmax.TestSoftmax().check(op, Case((3, 203), BF16), allowed)


def flash_attention(op: Any, allowed: Mapping[str, float]) -> None:
    attention_cases.check(op, attention_cases.Problem(1, 1, 1, 20, 30, 64, causal=True), allowed)


class Limited(Program):
    def launch(self, *arguments: Any, **more: Any) -> int:
        return super().launch(*arguments, **more, max_instructions=MOST_INSTRUCTIONS)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
@pytest.mark.parametrize(
    ("op_class", "check", "flips", "least"),
    [
        (RMSNorm, rmsnorm, 100, 0.6),
        (Softmax, softmax, 50, 0.42),
        (FlashAttention, flash_attention, 25, 0.6),
    ],
    ids=["rmsnorm", "softmax", "flash_attention"],
)
def test_flipped_bits_are_noticed(
    op_class: Any,
    check: Check,
    flips: int,
    least: float,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    pack = built_pack(arch)
    whole: dict[bytes, Program] = {}
    wrong: dict[bytes, bytes] = {}

    def program(image: bytes, arch: str, symbol: str) -> Program:
        if image not in wrong:
            return (
                whole.setdefault(image, Limited(image, arch, symbol)) if image not in whole else whole[image]
            )
        return Limited(wrong[image], arch, symbol)

    def run() -> None:
        check(drivers.bound_op(op_class, pack, drivers.EmulatorDriver), pack.tolerance)

    monkeypatch.setattr(drivers, "_program", program)
    monkeypatch.delenv("LIGER_AOT_EXECUTED", raising=False)  # a wrong binary does not count
    run()
    launched = {image: [*program.reached] for image, program in whole.items()}
    sizes = np.array([len(reached) for reached in launched.values()])
    rng, outcomes = np.random.default_rng(0), Counter[str]()
    for _ in range(flips):
        image = [*launched][rng.choice(len(launched), p=sizes / sizes.sum())]
        wrong.clear()
        wrong[image] = flipped(image, launched[image], rng)
        outcomes[outcome(run)] += 1
    noticed = 1 - outcomes["unnoticed"] / flips
    record_property(
        "summary", f"{arch} {check.__name__}: {noticed:.0%} of {flips} flipped bits noticed, {dict(outcomes)}"
    )
    assert noticed >= least


# A matrix read or written in another layout than the instruction's: how lanes (1st axis of 32) and registers change
WRONG_LAYOUTS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows of the result in the other architecture's order": lambda rows: (
        rows.reshape(8, 2, 16).transpose(1, 0, 2).reshape(8, 32)
    ),
    "the result's rows of two lane groups exchanged": lambda rows: np.roll(rows, 16, axis=1),
    "columns in reverse": lambda rows: rows.reshape(8, 2, 16)[:, :, ::-1].reshape(8, 32),
    "registers in reverse": lambda rows: rows[::-1],
}


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("change", WRONG_LAYOUTS)
def test_another_wmma_layout_is_noticed(arch: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of attention fail where the emulator's results of WMMA lie elsewhere: so its layouts are those that the
    compiler counts on."""
    pack = built_pack(arch)
    build, programs = matrix.build, {}

    def wrong(instruction: Instruction) -> Step:
        right, first = build(instruction), instruction.operands[0].register

        def step(wave: Wave) -> None:
            right(wave)
            wave.vectors[first : first + 8] = WRONG_LAYOUTS[change](wave.vectors[first : first + 8].copy())

        return step

    def run() -> None:
        programs.clear()
        flash_attention(drivers.bound_op(FlashAttention, pack, drivers.EmulatorDriver), pack.tolerance)

    monkeypatch.setattr(drivers, "_program", lambda *of: programs.setdefault(of, Program(*of)))
    monkeypatch.delenv("LIGER_AOT_EXECUTED", raising=False)  # a wrong run does not count
    run()
    assert any(i.name.startswith("v_wmma") for program in programs.values() for i in program.reached)
    monkeypatch.setattr(matrix, "build", wrong)
    assert outcome(run) != "unnoticed"


def outcome(run: Callable[[], None]) -> str:
    """What became of a run: "refused" by the emulator, a "wrong" result, or "unnoticed"."""
    try:
        run()
    except EmulatorError:
        return "refused"
    except AssertionError as error:
        return "refused" if isinstance(error.__cause__, EmulatorError) else "wrong"
    return "unnoticed"
