"""Short ways through Triton's interpreter, which spends nine tenths of a small kernel's time on types. Values and
dtypes are what they are without, but for bf16: it is rounded to the nearest, as on a GPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np


def save_time() -> None:
    """Once a process; whatever the short ways don't know goes Triton's own way."""
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_once(tl, interpreter)
    _remember_types(tl, interpreter)
    _broadcast_views(tl, interpreter)
    _convert_bf16(tl, interpreter)
    _operators(tl, interpreter)
    tl.tensor.__index__ = lambda self: self.handle.data.item()  # int() of an array: NumPy warns each time
    # Integers were added once more in 64 bits, for an assertion that is made in debug mode alone.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once(tl: Any, interpreter: Any) -> None:
    """triton.language was patched anew for every device function that is called; a call to it went through two wrappers
    that copy its keywords."""
    semantic, wrapper = interpreter.interpreter_semantic, tl.core.builtin(lambda: None).__code__

    def patch(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def call(*arguments: Any, **keywords: Any) -> Any:
            keywords["_semantic"] = semantic
            return function(*arguments, **keywords)

        scope.set_attr(of, name, call)

    interpreter._patch_attr = patch
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: None


def _remember_types(tl: Any, interpreter: Any) -> None:
    """A block's type, a tensor's shape and a table of dtypes were made anew for every value."""
    core = tl.core
    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
    unwrap, constexpr = core._unwrap_if_constexpr, tl.constexpr

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o if kind in plain else o.value if kind is constexpr else unwrap(o)

    core._unwrap_if_constexpr = unwrapped

    make_block, blocks = tl.block_type.__init__, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([s if type(s) is int else unwrap(s) for s in unwrapped_shape(shape)])
        known = blocks.get(key)
        if known is None:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def unwrapped_shape(shape: Any) -> Any:
        return shape.values if type(shape) is core.tuple else unwrap(shape)

    tl.block_type.__init__ = block_type

    make, shapes = tl.tensor.__init__, {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            make(self, handle, type)
            shapes[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    tl.tensor.__init__ = tensor

    look_up, dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return dtypes.get(scalar.name) or dtypes.setdefault(scalar.name, look_up(scalar))

    interpreter._get_np_dtype = np_dtype

    to_tensor = interpreter.TritonSemantic.to_tensor

    def as_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else to_tensor(self, x, check_type)

    interpreter.TritonSemantic.to_tensor = as_tensor


def _shape(t: Any) -> list[int]:
    return t.type.shape.values if t.type.is_block() else []


def _broadcast_views(tl: Any, interpreter: Any) -> None:
    """Blocks were copied to the shape of what they were computed with."""
    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, a: Any, b: Any) -> Any:
        left, right = _shape(a), _shape(b)
        if left == right:
            return a, b
        if left and right and len(left) != len(right):
            return broadcast(self, a, b)
        shape = np.broadcast_shapes(tuple(left), tuple(right))

        def spread(t: Any, own: list[int]) -> Any:
            if own == list(shape):
                return t
            data = np.broadcast_to(t.handle.data, shape)
            return tl.tensor(interpreter.TensorHandle(data, t.dtype), tl.block_type(t.dtype, list(shape)))

        return spread(a, left), spread(b, right)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _convert_bf16(tl: Any, interpreter: Any) -> None:
    """Between fp32 and bf16 in two steps, to the nearest as a GPU does; Triton's took thirty and cut bits off. Matrices
    of bf16 it multiplied as the integers that it keeps them as."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, type: Any) -> Any:
        a, b = source.dtype.scalar.name, type.scalar.name
        if a == "bf16" and b == "fp32":
            data = (source.data.astype(np.uint32) << 16).view(np.float32)
        elif a == "fp32" and b == "bf16":
            data = rounded_to_bf16(source.data)
        else:
            return cast(self, source, type)
        return interpreter.TensorHandle(data, type.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def rounded_to_bf16(x: Any) -> Any:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _operators(tl: Any, interpreter: Any) -> None:
    """Arithmetic of values whose types need no thought: fp32, signed integers of 32 and 64 bits, booleans and
    addresses."""
    tensor, handle_of, block_type = tl.tensor, interpreter.TensorHandle, tl.block_type
    numbers = {"fp32", "int32", "int64"}
    numpy_types = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}

    def made(data: Any, dtype: Any, a: Any, b: Any) -> Any:
        """A tensor of ``dtype`` with the shape that a and b have together."""
        left, right = _shape(a), _shape(b)
        if not left and not right:
            return tensor(handle_of(data, dtype), dtype)
        of = a if left == list(data.shape) else b if right == list(data.shape) else None
        if of is not None and of.dtype is dtype:
            return tensor(handle_of(data, dtype), of.type)
        return tensor(handle_of(data, dtype), block_type(dtype, list(data.shape)))

    def both(a: Any, b: Any) -> tuple[Any, Any, Any] | None:
        """Values of two tensors as the dtype that they have together, and that."""
        x, y, left, right = a.handle.data, b.handle.data, a.dtype.name, b.dtype.name
        if len(_shape(a)) != len(_shape(b)) and _shape(a) and _shape(b):
            return None
        if left == right and (left in numbers or left == "int1"):
            return x, y, a.dtype
        if left in numbers and right in numbers:
            wide = "fp32" if "fp32" in (left, right) else "int64"
            dtype = a.dtype if left == wide else b.dtype
            kind = numpy_types[wide]
            return x if left == wide else x.astype(kind), y if right == wide else y.astype(kind), dtype
        return None

    def fits(number: Any, t: Any) -> bool:
        """A Python number that takes a tensor's dtype."""
        name, kind = t.dtype.name, type(number)
        if name == "fp32":
            return kind is float or kind is int
        return kind is int and name in numbers and abs(number) < 1 << (31 if name == "int32" else 63)

    def patch(name: str, function: Callable[[Any, Any], Any], of: set[str], compares: bool = False) -> None:
        slow = getattr(tensor, f"__{name}__")

        def short(self: Any, other: Any) -> Any:
            if type(other) is tl.constexpr:
                other = other.value
            if type(other) is tensor:
                values = both(self, other)
                if values is None or values[2].name not in of:
                    return slow(self, other)
                x, y, dtype = values
                return made(function(x, y), tl.int1 if compares else dtype, self, other)
            if self.dtype.name not in of or not fits(other, self):
                return slow(self, other)
            data = function(self.handle.data, other)
            if compares:
                return made(data, tl.int1, self, self)
            return tensor(handle_of(data, self.dtype), self.type)

        setattr(tensor, f"__{name}__", short)

    def divided(x: Any, y: Any) -> Any:
        return (x - np.fmod(x, y)) // y  # towards 0, as on a GPU

    integers = {"int32", "int64"}
    for name, function, of in (
        ("add", np.add, numbers), ("radd", np.add, numbers), ("mul", np.multiply, numbers),
        ("rmul", np.multiply, numbers), ("sub", np.subtract, numbers),
        ("rsub", lambda x, y: np.subtract(y, x), numbers), ("truediv", np.divide, {"fp32"}),
        ("rtruediv", lambda x, y: np.divide(y, x), {"fp32"}), ("floordiv", divided, integers),
        ("mod", np.fmod, integers), ("and", np.bitwise_and, {"int1", *integers}),
        ("or", np.bitwise_or, {"int1", *integers}), ("xor", np.bitwise_xor, {"int1", *integers}),
    ):  # fmt: skip
        patch(name, function, of)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        patch(name, getattr(operator, name), numbers, compares=True)

    add = tensor.__add__

    def moved(self: Any, other: Any) -> Any:
        """An address and a distance in elements."""
        if self.type.scalar.is_ptr():
            if type(other) is tl.constexpr:
                other = other.value
            size = max(1, self.type.scalar.element_ty.primitive_bitwidth // 8)
            if type(other) is tensor and other.dtype.name in integers:
                if not _shape(self) or not _shape(other) or len(_shape(self)) == len(_shape(other)):
                    data = self.handle.data + other.handle.data.astype(np.uint64) * np.uint64(size)
                    return made(data, self.dtype, self, other)
            elif type(other) is int and other >= 0:
                data = self.handle.data + np.uint64(size * other)
                return tensor(handle_of(data, self.dtype), self.type)
        return add(self, other)

    tensor.__add__ = moved

    cast = tensor.to
    plain = {("fp32", "int32"), ("fp32", "int64"), ("fp32", "int1"), ("int64", "int32")}

    def to(self: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Any:
        dtype = dtype.value if type(dtype) is tl.constexpr else dtype
        if not bitcast and fp_downcast_rounding is None and type(dtype) is tl.dtype:
            if dtype.name == self.dtype.name:
                return self
            if (dtype.name, self.dtype.name) in plain:
                data = self.handle.data.astype(numpy_types[dtype.name])
                return made(data, dtype, self, self)
        return cast(self, dtype, fp_downcast_rounding, bitcast)

    tensor.to = to
