"""RMSNorm over the last dimension, forward and backward.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)

Zhang and Sennrich, Root Mean Square Layer Normalization (2019). The casting modes are those of Liger-Kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.loader import load
from liger_aot.op import (
    PLAIN,
    Op,
    Problem,
    as_rows,
    check_same_device,
    check_tensor,
    persistent_programs,
    row_stride,
)
from liger_aot.runtime import OpOn
from liger_aot.torch_library import define

# Whether x * rstd is rounded to x's dtype before it is scaled. Statistics and arithmetic are fp32 in every mode.
ROUND_FIRST = {"llama": True, "gemma": False, "none": False}


class RMSNorm(Op):
    """``rmsnorm(x, weight=None, *, eps=1e-6, offset=0.0, casting_mode="llama", out=None) -> Tensor``

    Differentiable in ``x`` and ``weight``; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors
    take the plain-torch reference.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; a last dimension that is not contiguous, or
            rows that no single stride spans, are copied first.
        weight: (n,) of x's dtype or float32, or None.
        eps: added to the mean of squares.
        offset: added to the weight (1.0 for Gemma); without effect where there is no weight.
        casting_mode: "llama" rounds x / rms to x's dtype before the weight is applied, "gemma" and "none" round once,
            at the end. Statistics are float32 in all of them.
        out: where to write the result: x's shape, dtype and device; ``x`` itself is allowed. Not with gradients.

    Returns:
        a contiguous tensor of x's shape and dtype, or ``out``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: the weight's or out's shape, device or layout does not fit; casting_mode is unknown; ``out``
            is given where a gradient is needed, or overlaps an input.
        PackNotFound: no installed pack serves the GPU.
    """

    name = "rmsnorm"
    uses = ("column_sums",)

    def __init__(self, runtimes: Mapping[str, Any] | None = None) -> None:
        super().__init__(runtimes)
        from liger_aot.ops.column_sums import ColumnSums

        self._column_sums = ColumnSums({"column_sums": self._runtimes["column_sums"]})

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        out: Tensor | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling() or type(x) not in PLAIN:
            return _through_torch(x, weight, eps, offset, casting_mode, out)
        if torch.is_grad_enabled() and (
            getattr(x, "requires_grad", False)
            or (weight is not None and getattr(weight, "requires_grad", False))
        ):
            if out is not None:
                raise ArgumentError(
                    "rmsnorm: out is given, but a gradient is needed: use torch.no_grad() or no out"
                )
            y: Tensor = _RMSNorm.apply(x, weight, eps, offset, casting_mode, self)
            return y
        return self.forward(
            x, weight, eps=eps, offset=offset, casting_mode=casting_mode, out=out, store_rstd=False
        )[0]

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        out: Tensor | None = None,
        store_rstd: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The forward alone, no autograd: arguments as in the op.

        Returns:
            y, and 1 / rms of each row as float32 (rows,) where ``store_rstd``, else None.
        """
        _check(x, weight, casting_mode)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if out is not None:
            _check_out(out, x, weight)
        on = self._own.on(x.get_device()) if x.is_cuda else self._own.of(x, "x")
        n = x.shape[-1]
        if on is None or not x.numel():
            return _reference_into(y, x, weight, eps, offset, casting_mode, store_rstd)
        rows = x.numel() // n
        x, x_stride = as_rows(x)
        y_stride = n if out is None else row_stride(out)
        if y_stride is None:
            raise ArgumentError(
                f"rmsnorm: out has strides {y.stride()}: its rows must be contiguous and evenly spaced"
            )
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if store_rstd else None
        x_ptr, y_ptr = x.data_ptr(), y.data_ptr()
        w_ptr = 0 if weight is None else weight.data_ptr()
        w_dtype = x.dtype if weight is None else weight.dtype
        aligned = not (x_ptr | y_ptr | w_ptr | x_stride | y_stride | n) & 15
        loaded = on.kernel("rmsnorm_forward")((x.dtype, w_dtype, aligned), n)
        loaded.launch(
            on.device, on.stream(on.device), -(-rows // loaded.numbers.get("rows", 1)), 1, 1,
            y_ptr, x_ptr, w_ptr, None if rstd is None else rstd.data_ptr(), y_stride, x_stride, rows, n,
            eps, offset if w_ptr else 1.0, 1 if w_ptr else 0, ROUND_FIRST[casting_mode], store_rstd,
        )  # fmt: skip
        return y, rstd

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        *,
        offset: float = 0.0,
        need_dx: bool = True,
        need_dweight: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The backward alone. What is not needed costs no memory traffic and is returned as None.

        Args:
            dy: gradient of y, of x's shape and dtype.
            x, weight, offset: as in the forward.
            rstd: (rows,) float32 as the forward returns it.

        Returns:
            dx of x's shape and dtype; dweight (n,) of weight's dtype: summed in float32 over all rows in a fixed order,
            rounded once.
        """
        need_dweight = need_dweight and weight is not None
        _check_backward(dy, x, weight, rstd)
        on = self._own.of(x, "x")
        n = x.shape[-1]
        if on is None or not x.numel():
            return _reference_backward(dy, x, weight, rstd, offset, need_dx, need_dweight)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else None
        if not (need_dx or need_dweight):
            return None, None
        rows = x.numel() // n
        x, x_stride = as_rows(x)
        dy, dy_stride = as_rows(dy)
        x_ptr, dy_ptr, dx_ptr = x.data_ptr(), dy.data_ptr(), 0 if dx is None else dx.data_ptr()
        w_ptr = 0 if weight is None else weight.data_ptr()
        w_dtype = x.dtype if weight is None else weight.dtype
        aligned = not (x_ptr | dy_ptr | dx_ptr | w_ptr | x_stride | dy_stride | n) & 15
        loaded = on.kernel("rmsnorm_backward")((x.dtype, w_dtype, aligned), n)
        programs, groups, split = _backward_grid(on, loaded.numbers, rows)
        partials = torch.empty((groups, n), dtype=torch.float32, device=x.device) if need_dweight else None
        words = torch.zeros((rows, split), dtype=torch.int64, device=x.device) if split > 1 else None
        loaded.launch(
            on.device, on.stream(on.device), programs, 1, 1,
            dx_ptr, dy_ptr, x_ptr, w_ptr, rstd.data_ptr(),
            None if partials is None else partials.data_ptr(), None if words is None else words.data_ptr(),
            n, dy_stride, x_stride, rows, n, offset if w_ptr else 1.0, 1 if w_ptr else 0, need_dx, need_dweight,
        )  # fmt: skip
        return dx, None if partials is None else self._column_sums(partials, w_dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        weight = (dtypes or {}).get("weight", dtype)
        aligned = n % 16 == 0
        return (
            Problem("rmsnorm_forward", (dtype, weight), aligned, n),
            Problem("rmsnorm_backward", (dtype, weight), aligned, n),
        )


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """The forward in plain torch: y, and 1 / rms of each row. Float64 input is computed in float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if ROUND_FIRST[casting_mode]:
        y = y.to(x.dtype).to(wide.dtype)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype))
    return y.to(x.dtype), rstd.reshape(-1)


def reference_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, *, offset: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """The backward in plain torch: dx and dweight. Float64 input is computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    xw, dyw, rstd = x.to(wide), dy.to(wide), rstd.to(wide).reshape(*x.shape[:-1], 1)
    scaled = dyw if weight is None else dyw * (offset + weight.to(wide))
    c = (xw * scaled).mean(-1, keepdim=True) * rstd.pow(3)
    dx = (scaled * rstd - xw * c).to(x.dtype)
    if weight is None:
        return dx, None
    dweight = (dyw * xw * rstd).sum(tuple(range(x.dim() - 1)))
    return dx, dweight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, op: RMSNorm
    ) -> Tensor:
        y, rstd = op.forward(x, weight, eps=eps, offset=offset, casting_mode=casting_mode)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.op = offset, op
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        dx, dweight = ctx.op.backward(
            dy, x, weight, rstd, offset=ctx.offset, need_dx=need_dx, need_dweight=need_dweight
        )
        return dx, dweight, None, None, None, None


def _check(x: Tensor, weight: Tensor | None, casting_mode: str) -> None:
    check_tensor("rmsnorm", "x", x)
    if x.dim() == 0:
        raise ArgumentError("rmsnorm: x must have at least one dimension, got a scalar")
    if weight is not None:
        check_tensor("rmsnorm", "weight", weight)
        check_same_device("rmsnorm", "weight", weight, "x", x)
        if weight.dtype != x.dtype and weight.dtype != torch.float32:
            raise ArgumentTypeError(
                f"rmsnorm: weight must be of x's dtype {x.dtype} or float32, got {weight.dtype}"
            )
        if weight.dim() != 1 or weight.shape[0] != x.shape[-1] or not weight.is_contiguous():
            raise ArgumentError(
                f"rmsnorm: weight must be contiguous of shape ({x.shape[-1]},), the last dimension of x; got shape "
                f"{tuple(weight.shape)} with strides {weight.stride()}"
            )
    if casting_mode not in ROUND_FIRST:
        raise ArgumentError(
            f"rmsnorm: casting_mode must be one of {', '.join(ROUND_FIRST)}; got {casting_mode!r}"
        )


def _check_out(out: Tensor, x: Tensor, weight: Tensor | None) -> None:
    check_tensor("rmsnorm", "out", out)
    check_same_device("rmsnorm", "out", out, "x", x)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ArgumentError(
            f"rmsnorm: out must be of x's shape {tuple(x.shape)} and dtype {x.dtype}; got {tuple(out.shape)}, {out.dtype}"
        )
    if out is not x:
        for argument, value in (("x", x), ("weight", weight)):
            if value is not None and _overlap(out, value) and not _same_elements(out, value):
                raise ArgumentError(
                    f"rmsnorm: out overlaps {argument}; it may be x itself or memory of its own"
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges meet. Interleaved columns of one buffer count as meeting only if a row's columns do."""
    a_first, b_first = a.data_ptr(), b.data_ptr()
    if a_first >= _end(b) or b_first >= _end(a) or not a.numel() or not b.numel():
        return False
    stride, b_stride = row_stride(a), row_stride(b)
    if stride is None or stride != b_stride or a.element_size() != b.element_size():
        return True
    distance = ((b_first - a_first) // a.element_size()) % stride
    return distance < a.shape[-1] or distance + b.shape[-1] > stride


def _end(x: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()


def _same_elements(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _check_backward(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> None:
    _check(x, weight, "none")
    check_tensor("rmsnorm backward", "dy", dy)
    check_same_device("rmsnorm backward", "dy", dy, "x", x)
    check_same_device("rmsnorm backward", "rstd", rstd, "x", x)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise ArgumentError(
            f"rmsnorm backward: dy must be of x's shape {tuple(x.shape)} and dtype {x.dtype}; got {tuple(dy.shape)}, "
            f"{dy.dtype}"
        )
    rows = x.shape[:-1].numel()
    if rstd.dtype != torch.float32 or rstd.numel() != rows or not rstd.is_contiguous():
        raise ArgumentError(
            f"rmsnorm backward: rstd must be contiguous float32 with {rows} elements, one a row; got {rstd.dtype} with "
            f"{rstd.numel()}"
        )


def _backward_grid(on: OpOn, numbers: Mapping[str, int], rows: int) -> tuple[int, int, int]:
    """(programs, groups of them that share rows, programs a group)."""
    split = numbers.get("split", 1)
    steps = -(-rows // numbers.get("rows", 1)) * split
    groups = max(1, persistent_programs(on, numbers["programs_per_multiprocessor"], steps) // split)
    return groups * split, groups, split


def _reference_into(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    store_rstd: bool,
) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():
        result, rstd = reference(x, weight, eps=eps, offset=offset, casting_mode=casting_mode)
        y.copy_(result)
    return y, rstd if store_rstd else None


def _reference_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweight = reference_backward(dy, x, weight, rstd, offset=offset)
    return dx if need_dx else None, dweight if need_dweight else None


def _through_torch(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, out: Tensor | None
) -> Tensor:
    """The way of torch.compile and of tensor subclasses."""
    _check(x, weight, casting_mode)
    grad = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    if out is None:
        y: Tensor = torch.ops.liger_aot.rmsnorm_forward(x, weight, eps, offset, casting_mode, grad)[0]
        return y
    if grad:
        raise ArgumentError("rmsnorm: out is given, but a gradient is needed: use torch.no_grad() or no out")
    torch.ops.liger_aot.rmsnorm_out(x, weight, eps, offset, casting_mode, out)
    return out


def _library_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, store_rstd: bool
) -> tuple[Tensor, Tensor]:
    y, rstd = load("rmsnorm").forward(
        x, weight, eps=eps, offset=offset, casting_mode=casting_mode, store_rstd=store_rstd
    )
    return y, x.new_empty(0, dtype=torch.float32) if rstd is None else rstd


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, store_rstd: bool
) -> tuple[Tensor, Tensor]:
    rows = x.shape[:-1].numel() if store_rstd else 0
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(rows, dtype=torch.float32)


def _library_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx, dweight = load("rmsnorm").backward(
        dy, x, weight, rstd, offset=offset, need_dx=need_dx, need_dweight=need_dweight
    )
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dweight is None else dweight


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    return dx, x.new_empty(0) if weight is None or not need_dweight else torch.empty_like(weight)


def _library_out(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, out: Tensor
) -> None:
    load("rmsnorm").forward(
        x, weight, eps=eps, offset=offset, casting_mode=casting_mode, out=out, store_rstd=False
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, offset, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset
    ctx.mark_non_differentiable(output[1])


def _autograd_backward(ctx: Any, dy: Tensor, _: Any) -> Any:
    x, weight, rstd = ctx.saved_tensors
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    dx, dweight = torch.ops.liger_aot.rmsnorm_backward(dy, x, weight, rstd, ctx.offset, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None, None, None, None, None


define(
    "rmsnorm_forward(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, bool store_rstd)"
    " -> (Tensor, Tensor)",
    _library_forward,
    _fake_forward,
    backward=_autograd_backward,
    setup_context=_setup_context,
)
define(
    "rmsnorm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_dx,"
    " bool need_dweight) -> (Tensor, Tensor)",
    _library_backward,
    _fake_backward,
)
define(
    "rmsnorm_out(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, Tensor(a!) out) -> ()",
    _library_out,
    lambda x, weight, eps, offset, casting_mode, out: None,
)


OP = RMSNorm
