"""Triton's interpreter, made to run whole test suites: one launch with typed arguments, the PTX that csrc_triton uses,
and shorter ways for what takes it longest."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock, local
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch

from tests.harness.interpreter_speed import save_time

PATIENCE = 600.0  # seconds a program waits for another's word before that counts as a deadlock
ROUNDED_ONCE = ("csrc_triton/quantization/", "csrc_triton/sampling/")


def interpret(
    function: Any,
    grid: tuple[int, int, int],
    types: list[str],
    names: list[str],
    arguments: tuple[Any, ...],
    constants: dict[str, int | bool],
    concurrent: bool,
) -> None:
    """Launch a device function.

    Args:
        types: of the run-time arguments, as Triton writes them ("*bf16", "i64").
        names: of the same.
        constants: the compile-time arguments.
        concurrent: programs wait for each other, so all must be under way.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    _teach()
    numpy_types = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}
    bound: dict[str, Any] = {name: tl.constexpr(value) for name, value in constants.items()}
    for name, kind, value in zip(names, types, arguments, strict=True):
        ty = tl.str_to_ty(kind, None)
        data = np.array([value or 0], dtype=np.uint64 if kind[0] == "*" else numpy_types[kind])
        bound[name] = tl.tensor(interpreter.TensorHandle(data, ty), ty)
    body = function.rewrite()
    interpreter.interpreter_builder.set_grid_dim(*grid)

    def program(x: int) -> None:
        interpreter.interpreter_builder.set_grid_idx(x, 0, 0)
        body(**bound)

    assert grid[1:] == (1, 1)
    if concurrent:
        with ThreadPoolExecutor(grid[0]) as pool:
            list(pool.map(program, range(grid[0])))
    else:
        for x in range(grid[0]):
            program(x)


@cache
def _teach() -> None:
    """Once a process, which interprets for good."""
    from triton.runtime import interpreter

    _teach_inline_assembly()
    _teach_reductions()
    _teach_arithmetic()
    save_time()
    _parse_alone(interpreter)


def _parse_alone(interpreter: Any) -> None:
    """Programs that run at once would parse the functions they call at once, and CPython 3.11's ``ast.parse`` counts
    its depth for all threads together: it fails where one begins while another is under way."""
    parsing, rewrite = Lock(), interpreter.InterpretedFunction.rewrite

    def rewritten(self: Any) -> Any:
        with parsing:
            return rewrite(self)

    interpreter.InterpretedFunction.rewrite = rewritten


def _teach_reductions() -> None:
    """As on a GPU, in a tree. A reduction by a function of one's own takes its elements one by one: neighbours, all
    pairs at once, give the same in log n steps. NumPy adds along the last axis in a tree, along others one by one, with
    an error that grows with n."""
    from triton.runtime.interpreter import ReduceOps

    def generic_reduce(self: Any, given: tuple[Any, ...]) -> list[Any]:
        shape = given[0].handle.data.shape
        whole = self.axis is None
        data = [
            d.handle.data.reshape(-1) if whole else np.moveaxis(d.handle.data, self.axis, -1) for d in given
        ]
        while (length := data[0].shape[-1]) > 1:
            even = length // 2 * 2
            pairs = [
                self.to_tensor(d[..., first:even:2], g.dtype)
                for first in (0, 1)
                for d, g in zip(data, given, strict=True)
            ]
            found = self.combine_fn.fn(*pairs)
            found = found if isinstance(found, tuple) else (found,)
            data = [
                np.concatenate((f.handle.data, d[..., even:]), -1) for f, d in zip(found, data, strict=True)
            ]
        if not self.keep_dims:
            data = [d[..., 0].item() if whole else d[..., 0] for d in data]
        elif whole:
            data = [d.reshape((1,) * len(shape)) for d in data]
        else:
            data = [np.moveaxis(d, -1, self.axis) for d in data]
        return [self.to_tensor(d, g.dtype) for d, g in zip(data, given, strict=True)]

    def sum_of(self: Any, given: Any) -> Any:
        data = given.handle.data.reshape(-1) if self.axis is None else given.handle.data
        axis = data.ndim - 1 if self.axis is None else self.axis
        total = np.add.reduce(np.ascontiguousarray(np.moveaxis(data, axis, -1)), axis=-1)
        if self.keep_dims:
            shape = given.handle.data.shape
            total = total.reshape([1 if self.axis in (None, i) else size for i, size in enumerate(shape)])
        return self.to_tensor(total, given.dtype)

    ReduceOps.generic_reduce = generic_reduce
    ReduceOps.sum = sum_of


def _called_from(folders: tuple[str, ...]) -> bool:
    """Whether the kernel that runs lies in one of the folders of device code."""
    frame = sys._getframe(1)
    while frame is not None and not any(folder in frame.f_code.co_filename for folder in folders):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _teach_arithmetic() -> None:
    """As on a GPU: a fused multiply-add rounds once where a kernel depends on it, minima and maxima pass over NaN, and
    what becomes e4m3 is rounded to nearest even and saturates."""
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    patch_core = interpreter._patch_lang_core

    def with_e4b8(lang: Any, scope: Any) -> None:
        """Its list of types lacks one that its builder has."""
        patch_core(lang, scope)
        of_others = tl.core.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            return builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else of_others(self, builder)

        scope.set_attr(tl.core.dtype, "to_ir", to_ir)

    interpreter._patch_lang_core = with_e4b8
    e4m3 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e4b8: (torch.float8_e4m3fnuz, 240.0)}
    convert = InterpreterBuilder.create_fp_to_fp

    def fp_to_fp(self: Any, given: Any, kind: Any, rounding: Any) -> Any:
        if kind.scalar not in e4m3:
            return convert(self, given, kind, rounding)
        dtype, largest = e4m3[kind.scalar]
        codes = torch.from_numpy(np.array(given.data, np.float32)).clamp(-largest, largest).to(dtype)
        return TensorHandle(codes.view(torch.uint8).numpy(), kind.scalar)

    of_two_roundings = InterpreterBuilder.create_fma

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Rounded once for the ops with 8-bit results and those that sample, whose bits depend on it. Softmax's kernels
        rely on a GPU's compiler to fuse x * scale - peak, too, which the interpreter does not: there both are rounded
        twice."""
        if not _called_from(ROUNDED_ONCE):
            return of_two_roundings(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fp_to_fp = fp_to_fp
    InterpreterBuilder.create_fma = fma
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def _teach_inline_assembly() -> None:
    """The interpreter knows no PTX: these are the instructions that csrc_triton uses. Program ids become per thread."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _interpreter

    where = local()
    InterpreterBuilder.grid_idx = property(
        lambda self: where.index, lambda self, index: setattr(where, "index", index)
    )

    def assemble(
        self: Any, text: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int
    ) -> Any:
        (ty,) = types
        data = [v.data for v in values]
        operation = text.split()[0]
        if operation in ("mov.b32", "mov.b64"):
            result = data[0].copy()
        elif "griddepcontrol" in text:  # one kernel ends before the next starts here
            result = data[0].copy() if data else np.zeros(1, np.int32)
        elif operation == "ld.relaxed.gpu.global.u64":
            mask = np.ones_like(data[0], dtype=bool)
            result = _interpreter.load(
                data[0].astype(np.uint64), mask, np.zeros_like(data[0]), np.dtype(np.int64)
            )
        elif "bra retry" in text:  # wait_for_words
            mask, zeros = np.ones_like(data[0], dtype=bool), np.zeros_like(data[0])
            result, addresses, until = zeros, data[0].astype(np.uint64), monotonic() + PATIENCE
            while not result.all():
                assert monotonic() < until, "a word that nobody posts"
                sleep(0.001)  # other programs get on meanwhile
                result = _interpreter.load(addresses, mask, zeros, np.dtype(np.int64))
        elif operation == "ld.acquire.gpu.global.u32":
            mask = np.ones_like(data[0], dtype=bool)
            nothing = np.zeros(data[0].shape, np.int32)
            result = _interpreter.load(data[0].astype(np.uint64), mask, nothing, np.dtype(np.int32))
        elif "cvt.rn.f16x2.e4m3x2" in text:  # csrc_triton.common.fp8.widened
            codes = torch.from_numpy(data[0].copy()).view(torch.float8_e4m3fn)
            return _Results([TensorHandle(codes.to(torch.float16).numpy(), ty.scalar)])
        elif operation == "lg2.approx.ftz.f32":
            result = np.log2(data[0])
        elif operation == "ex2.approx.ftz.f32":
            result = np.exp2(data[0])
        elif operation == "rcp.approx.ftz.f32":
            with np.errstate(divide="ignore"):
                result = np.float32(1) / data[0]
        elif operation == "shl.b32":  # widen_pairs
            result = (data[0].astype(np.uint32) << 16).view(np.float32)
        elif "mul.rn." in text or "max." in text:  # of 16-bit pairs, neighbours of one tensor
            dtype = torch.bfloat16 if "bf16x2" in text else torch.float16
            a, b = (torch.from_numpy(d.copy()).view(dtype).float().numpy() for d in data)
            wide = torch.from_numpy(a * b if "mul.rn." in text else np.fmax(a, np.abs(b)))
            result = wide.to(dtype).view(torch.int16).numpy().view(data[0].dtype)
        elif operation in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            dtype = torch.bfloat16 if "bf16" in operation else torch.float16
            halves = [
                torch.from_numpy(d.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16) for d in data
            ]
            if len(data) == 1:  # of pairs of neighbours
                bits = halves[0].view(np.float16) if dtype == torch.float16 else halves[0]
                return _Results([TensorHandle(bits, ty.scalar)])
            result = (halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << 16).view(np.int32)
        else:
            raise NotImplementedError(text)
        handle = TensorHandle(result, ty.scalar)
        return _Results([handle])

    class _Results(list):  # type: ignore[type-arg]
        def get_result(self, index: int) -> Any:
            return self[index]

    interpreter.InterpreterBuilder.create_inline_asm = assemble
