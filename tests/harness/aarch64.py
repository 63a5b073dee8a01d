"""What ``.ci/aarch64 test`` runs under emulation: ops of the installed wheel on the CPU, then the launcher's tests."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

import liger_aot

TESTS = ("test_launcher.py", "test_launcher_lifetime.py", "test_tensor_rows.py", "test_tensor_map.py")


def check_ops() -> None:
    """Every op loads; a few compute, with gradients, what torch does."""
    ops = {name: liger_aot.load(name) for name in liger_aot.ops()}
    x = torch.randn(5, 64, requires_grad=True)
    weight = torch.randn(64, requires_grad=True)
    gate, up = torch.randn(2, 5, 64, requires_grad=True).unbind()
    target = torch.randint(64, (5,))
    for ours, theirs in (
        (ops["rmsnorm"](x, weight, eps=1e-6), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)),
        (ops["swiglu"](gate, up), torch.nn.functional.silu(gate) * up),
        (ops["softmax"](x), x.softmax(-1)),
        (ops["cross_entropy"](x, target), torch.nn.functional.cross_entropy(x, target)),
    ):
        torch.testing.assert_close(ours, theirs)
        (found,) = torch.autograd.grad(ours.square().sum(), x, allow_unused=True, retain_graph=True)
        (wanted,) = torch.autograd.grad(theirs.square().sum(), x, allow_unused=True, retain_graph=True)
        assert (found is None) is (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted)
    print(f"{len(ops)} ops load on {platform.machine()}, torch {torch.__version__}")


def main() -> int:
    assert platform.machine() == "aarch64" and "installed" in liger_aot.__file__, liger_aot.__file__
    check_ops()
    options = ("-q", "-p", "no:cacheprovider", "-o", "pythonpath=", "-m", "not slow")
    return int(pytest.main([*options, *(f"tests/runtime/{name}" for name in TESTS)]))


if __name__ == "__main__":
    sys.exit(main())
