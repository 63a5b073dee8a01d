"""Logits, and -inf for those that top-k, top-p and min-p leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Schema, check_flag
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.in_place import share_an_element
from liger_aot.ops.op import Problem, check_same_device, check_tensor, check_writable_rows, written
from liger_aot.ops.sampling._logits import FILTERS, Logits, Plan, SamplingOp, Thresholds, kept, processed
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.layout import overlap


class TopKTopPMask(SamplingOp):
    """``top_k_top_p_mask(logits, top_k=None, top_p=None, min_p=None, *, out=None, inplace=False) -> Tensor``: the
    logits, with -inf in the place of those that are left out, as in vLLM's ``apply_top_k_top_p``.

    First min-p, then top-k, then top-p, whose probabilities are those of what the others keep. Of the logits that equal
    the k-th greatest, top-k keeps all. Top-p keeps a token where those before it, in the order of (greatest logit,
    lowest column), have less than p of the probability; the first is always kept. vLLM keeps as many; which of several
    equal logits those are depends there on its sort.

    Probabilities are counted in units of 2^-30 of the greatest one, rounded down: what is kept depends on the row
    alone, bit for bit, and the sum that is compared with p is off by less than n * 2^-30. A NaN counts as -inf and
    becomes it.
    No gradient. Works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch
    reference, which gives the same bits.

    Args:
        logits: (rows, n) bfloat16, float16 or float32; n up to 262144. Rows may have any stride; other layouts are
            copied.
        top_k: (rows,) int32 or int64: keep so many of a row. 0, what is negative or at least n keep all.
        top_p: (rows,) float32: keep so much of the probability; 1 keeps all.
        min_p: (rows,) float32: keep what has at least so much of the greatest probability; 0 keeps all.
        out: memory for the result, of logits' dtype and shape; it may be ``logits``.
        inplace: write to ``logits``.

    Returns:
        a tensor of logits' shape and dtype: ``out`` or ``logits`` where those are written, else a contiguous one.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape or device is not allowed, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Fan et al., Hierarchical Neural Story Generation (2018); Holtzman et al., The Curious Case of Neural Text
        Degeneration (2020); Nguyen et al., Turning Up the Heat: Min-p Sampling (2024). The arguments are vLLM's.
    """

    name = "top_k_top_p_mask"
    tensors = ("logits", *(f"{name}?" for name in FILTERS))
    settings = Schema()
    arguments = FILTERS

    def __call__(
        self,
        logits: Tensor,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        *,
        out: Tensor | None = None,
        inplace: bool = False,
    ) -> Tensor:
        if inplace is not False and check_flag(self.name, "inplace", inplace):
            if out is not None and out is not logits:
                raise ArgumentError(f"{self.name}: out is given, and inplace=True writes to logits")
            out = logits
        result: Tensor = self.differentiable(
            (logits, top_k, top_p, min_p), (), None if out is None else (out,)
        )
        return result

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        if out is not None:
            self._check_out(out[0], tensors, settings)
        results = super().run_forward(tensors, settings, keep, out)
        if out is not None:
            written(out[0])
        return results

    def _check_out(self, out: Any, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, argument = tensors[0], "logits" if out is tensors[0] else "out"
        self.check(tensors, settings)
        if out is not x:
            check_tensor(self.name, argument, out)
            check_same_device(self.name, argument, out, "logits", x)
            if out.dtype != x.dtype or out.shape != x.shape:
                raise ArgumentError(
                    f"{self.name}: out must be of logits' shape {tuple(x.shape)} and dtype {x.dtype}; got "
                    f"{tuple(out.shape)}, {out.dtype}"
                )
            if overlap(out, x):
                raise ArgumentError(
                    f"{self.name}: out overlaps logits; it may be logits itself or memory of its own"
                )
        for name, t in zip(FILTERS, tensors[1:], strict=True):
            if t is not None and share_an_element(out, t):
                raise ArgumentError(f"{self.name}: {argument}, which is written, overlaps {name}")
        if out.numel():
            check_writable_rows(self.name, argument, out)

    def plan_for(self, on: OpOn, tensors: Tensors, settings: tuple[Any, ...], out: Tensor | None) -> Plan:
        logits = Logits.of(tensors[0])
        find = Thresholds(on, logits, tensors[1] is not None, tensors[2] is not None)
        y_stride = logits.n if out is None else out.stride(0) if logits.rows > 1 else logits.n
        y_at = 0 if out is None else out.data_ptr()
        aligned = logits.aligned and not (y_at | y_stride) & 15
        mask = on.kernels[self.name].for_rows((logits.dtype, aligned), logits.n, logits.rows)
        blocks, device = -(-logits.n // mask.block), on.device
        numbers = (y_stride, logits.stride, logits.n, blocks)

        def run(tensors: Tensors, addresses: tuple[int, ...], to: Tensor | None) -> Tensors:
            x, stream = tensors[0], on.stream(device)
            found = find(stream, x, addresses[0], addresses[1:4], 0)
            y = x.new_empty(x.shape) if to is None else to
            mask.launch(
                device, stream, logits.rows * blocks, 1, 1, y.data_ptr(), addresses[0], found.last,
                *numbers,
            )  # fmt: skip
            return (y,)

        return run

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        rows, n = shape
        aligned = n % 16 == 0
        kernels = ("logits_groups", "logits_bracket", "logits_collect")
        return (
            *(Problem(kernel, (dtype,), aligned, n, rows) for kernel in kernels),
            Problem("logits_threshold", (dtype,), True, n, rows),
            Problem(self.name, (dtype,), aligned, n, rows),
        )

    @staticmethod
    def reference(
        logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
    ) -> tuple[Tensor, ...]:
        x = processed(logits)
        keep = kept(x, top_k, top_p, min_p)
        return (torch.where(keep, x, torch.full_like(x, -torch.inf)).to(logits.dtype),)


OP = TopKTopPMask
