"""The machine code of an installed gfx942 pack, executed on the CPU and compared with float64.

``tests/emulator/amd_emulator`` runs every instruction of a launch, on torch's CPU tensors. It needs this checkout and
numpy; no GPU, no Triton, no compiler. ``examples/demo.py`` calls ``run``; alone: ``python -m examples.emulated``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

import liger_aot
from liger_aot.runtime.manifest import Pack, Variant
from liger_aot.runtime.packs import installed_packs
from tests.emulator.amd_emulator import Program
from tests.harness.drivers import EmulatorDriver, bound_op
from tests.harness.tolerances import UNIT_ROUNDOFF

ARCH = "gfx942"
BF16 = torch.bfloat16
EPS = 1e-6


@dataclass(frozen=True)
class Result:
    """One output or gradient beside float64.

    ``rounded`` is what is rounded to bf16 on the way, ``summed`` the absolute values of the terms added in float32:
    the profile's tolerance counts unit roundoffs of both.
    """

    name: str
    got: Tensor
    exact: Tensor
    rounded: Tensor
    summed: Tensor

    def line(self, allowed: Mapping[str, float]) -> tuple[bool, str]:
        """Whether all elements are within the tolerance, and the one that comes nearest to it."""
        limit = allowed["bf16"] * UNIT_ROUNDOFF[BF16] * self.rounded
        limit = limit + allowed["fp32"] * UNIT_ROUNDOFF[torch.float32] * self.summed
        error = (self.got.double() - self.exact).abs()
        ratio = torch.nan_to_num(error / limit, nan=torch.inf)
        at = int(ratio.argmax())
        fine = bool(ratio.flatten()[at] <= 1)
        parts = f"error {float(error.flatten()[at]):.1e} where {float(limit.flatten()[at]):.1e} is allowed"
        return fine, f"{self.name:<8} {parts}{'' if fine else ': WRONG'}"


class Recorder(EmulatorDriver):
    """Runs binaries and keeps which, with how many instructions."""

    def __init__(self, op: str, pack: Pack, launches: list[tuple[Variant, Program, int]]) -> None:
        super().__init__(op, pack)
        self._launches = launches

    def launched(self, variant: Variant, program: Program, instructions: int) -> None:
        self._launches.append((variant, program, instructions))


def rmsnorm(op: Any) -> list[Result]:
    x, weight, dy = drawn(4, 1024), drawn(1024), drawn(4, 1024)
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = op(*leaves, eps=EPS)
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    a, w, g = (t.detach().double() for t in (x, weight, dy))
    rstd = (a.square().mean(-1, keepdim=True) + EPS).rsqrt()
    exact, exact_dx, exact_dweight = gradients(lambda a, w: torch.rms_norm(a, w.shape, w, EPS), g, a, w)
    terms = (g * w).abs() * rstd + a.abs() * (a * g * w).abs().mean(-1, keepdim=True) * rstd**3
    return [
        Result("y", y.detach(), exact, 2 * exact.abs(), exact.abs()),  # x / rms is rounded, and its product
        Result("dx", dx, exact_dx, exact_dx.abs(), terms),
        Result("dweight", dweight, exact_dweight, exact_dweight.abs(), (g * a * rstd).abs().sum(0)),
    ]


def swiglu(op: Any) -> list[Result]:
    gate, up, dy = drawn(4, 1024), drawn(4, 1024), drawn(4, 1024)
    leaves = gate.requires_grad_(), up.requires_grad_()
    y = op(*leaves)
    dgate, dup = torch.autograd.grad(y, leaves, dy)
    a, b, g = (t.detach().double() for t in (gate, up, dy))
    exact, exact_dgate, exact_dup = gradients(lambda a, b: torch.nn.functional.silu(a) * b, g, a, b)
    sigmoid = torch.sigmoid(a)
    terms = (g * b).abs() * (a.abs() * (1 - sigmoid) + 1) * sigmoid  # they cancel near -1.28
    return [
        Result("y", y.detach(), exact, exact.abs(), exact.abs()),
        Result("dgate", dgate, exact_dgate, exact_dgate.abs(), terms),
        Result("dup", dup, exact_dup, exact_dup.abs(), exact_dup.abs()),
    ]


def flash_attention(op: Any) -> list[Result]:
    q, k, v = (drawn(1, 64, 2, 64) for _ in range(3))
    o = op(q, k, v, causal=True)
    a, b, c = (t.double().transpose(1, 2) for t in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True).transpose(1, 2)
    size = torch.nn.functional.scaled_dot_product_attention(a, b, c.abs(), is_causal=True).transpose(1, 2)
    score = 1 + float(a.norm(dim=-1).max() * b.norm(dim=-1).max()) / 8
    # the weights of the values are rounded before they are multiplied, and o is
    return [Result("o", o, exact, exact.abs() + size, 2 * score * size)]


EXAMPLES: dict[str, tuple[str, Callable[[Any], list[Result]]]] = {
    "rmsnorm": ("rmsnorm, 4 x 1024, forward and backward", rmsnorm),
    "swiglu": ("swiglu, 4 x 1024, forward and backward", swiglu),
    "flash_attention": ("flash_attention, causal, 64 tokens, 2 heads of 64", flash_attention),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The result of ``function`` and its gradients."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def run() -> bool:
    """Execute what the installed pack has of the examples; False if a result is not within its tolerance."""
    pack = next((pack for pack in installed_packs() if pack.arch == ARCH), None)
    names = [name for name in EXAMPLES if pack is not None and name in pack.ops]
    if pack is None or not names:
        print(f"left out: no pack of {ARCH} with {', '.join(EXAMPLES)} is installed")
        return True
    print("Of each result, the value that comes nearest to its limit: how far it lies off float64.\n")
    right = True
    for name in names:
        title, example = EXAMPLES[name]
        launches: list[tuple[Variant, Program, int]] = []
        op = bound_op(type(liger_aot.load(name)), pack, partial(Recorder, launches=launches))
        results = example(op)
        print(f"{title}, bf16")
        for variant, program, instructions in launches:
            image = variant.read()
            digest = sha256(image).hexdigest()[:12]
            print(f"  {variant.name} of {variant.blob.path.name}: {len(image)} bytes, sha256 {digest}")
            matrix = sorted({i.base_name for i in program.reached if i.name.startswith("v_mfma")})
            print(f"    executed {instructions} instructions{' with ' * bool(matrix)}{', '.join(matrix)}")
        for result in results:
            fine, line = result.line(pack.tolerance)
            print(f"  {line}")
            right = right and fine
    return right


if __name__ == "__main__":
    raise SystemExit(not run())
