"""A process of its own: models patched by Liger, Triton's JIT turned into an error. Prints what went wrong, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any


def main(order: str, mode: str, device: str, names: list[str]) -> dict[str, str]:
    """
    Args:
        order: of importing liger_kernel.transformers and liger_aot.liger: "before" is ours first.
        mode: "instance" or "class".
        device: where the models are.
        names: of ``transformers_cases.CONFIGS``.
    """
    if order == "after":
        importlib.import_module("liger_kernel.transformers.monkey_patch")
    importlib.import_module("liger_aot.liger")
    import torch
    import triton

    def jit(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError(f"Triton compiles {self}")

    triton.runtime.jit.JITFunction.run = jit
    from liger_kernel.transformers import monkey_patch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # a convolution's gradient would hide what is compared
    return {name: error for name in names if (error := _wrong(monkey_patch, mode, device, name))}


def _wrong(monkey_patch: Any, mode: str, device: str, name: str) -> str:
    """The error, or nothing: of one model, the next ones are of interest too."""
    from tests.models import transformers_cases as cases

    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{name}")
    try:
        model = cases.tiny(name).to(device)
        inputs = {k: v.to(device) for k, v in cases.batch(name).items()}
        plain = cases.step(model, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if mode == "instance":
                apply(model=model)
            else:
                apply()
                model = cases.tiny(name).to(device)
        ours = cases.step(model, inputs)
        cases.assert_close(ours, plain)
        # Granite's logits are scaled after the head: Liger leaves its loss to Transformers.
        assert (ours.output.logits is None) == (name != "granite")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    found = main(*sys.argv[1:4], sys.argv[4:])
    print(json.dumps(found))
