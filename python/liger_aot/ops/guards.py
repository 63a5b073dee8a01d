"""What torch's dispatcher would see of a call, and the direct path, which reads memory past it, has to look for itself.

``TABLE`` has a row for each such thing; the tests run every op through every row. A call pays for one look at its
tensors (``layout.traits``) and three reads (``in_torch``); only one that has something of it asks ``row_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch._C._functorch import maybe_get_level as level_of
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.op import PLAIN
from liger_aot.runtime.layout import INDIRECT, traits

DEAD = -2  # the level of a wrapper whose transform has ended


class Way(Enum):
    """What becomes of a call."""

    LIBRARY = "it goes through torch.library"
    REFERENCE = (
        "the op's reference computes, in torch's own steps, which carry gradients and tangents of any order"
    )
    PLAIN = "the tensor is replaced by a plain one"
    ERROR = "an error names the argument"
    DIRECT = "the direct path is right: the row says why"


class Row(NamedTuple):
    """One thing that the dispatcher would see.

    Attributes:
        seen: whether a tensor, or the thread, has it; None where there is nothing to look for.
    """

    name: str
    way: Way
    seen: Callable[[Tensor], bool] | None = None
    why: str = ""


TABLE = (
    Row("tensor subclass", Way.LIBRARY, lambda t: type(t) not in PLAIN and isinstance(t, Tensor)),
    Row("torch.jit.trace", Way.REFERENCE, lambda t: is_tracing()),
    Row("dispatch mode", Way.LIBRARY, lambda t: dispatch_modes() > 0),
    Row("ended transform", Way.PLAIN, lambda t: is_wrapped(t) and level_of(t) == DEAD),
    Row("transform of torch.func", Way.REFERENCE, lambda t: is_wrapped(t) or transforms_active()),
    Row("dual tensor", Way.REFERENCE, lambda t: _has_tangent(t)),
    Row("sparse or nested layout", Way.ERROR, lambda t: t.layout != torch.strided or t.is_nested),
    Row("quantised", Way.ERROR, lambda t: t.is_quantized),
    Row("negative bit", Way.PLAIN, lambda t: t.is_neg()),
    Row("no memory of its own", Way.ERROR, lambda t: t.device.type != "meta" and not _has_memory(t)),
    Row("conjugate bit", Way.DIRECT, None, "of complex numbers alone: no op takes them but rope_llama4, which looks"),
    Row("version counter", Way.DIRECT, None, "whatever is written in place is passed to op.written"),
    Row("grad mode", Way.DIRECT, None, "asked where a tensor requires a gradient; in a backward it is create_graph"),
    Row("autocast", Way.DIRECT, None, "kernels take dtypes as they are; references run without it (op.plain_torch)"),
    Row("inference tensor", Way.DIRECT, None, "torch saves it for no backward; check_versions sees what is written"),
    Row("other stream", Way.DIRECT, None, "memory and launches are those of torch's current stream"),
    Row("deterministic mode", Way.DIRECT, None, "attention's backward asks for it; all else is deterministic"),
    Row("function mode", Way.DIRECT, None, "it sees the calls of torch's functions alone; no result depends on it"),
)  # fmt: skip


def in_torch() -> bool:
    """Whether this thread is where plain tensors, too, may have something that only the dispatcher sees."""
    return forward_ad._current_level >= 0 or dispatch_modes() > 0 or is_tracing()


def row_of(tensors: Sequence[Any]) -> Row | None:
    """The first row that one of the tensors has, in the table's order; None where the direct path is right."""
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    for row in TABLE:
        if row.seen is not None and any(map(row.seen, tensors)):
            return row
    return None


def check_plain(op: str, **tensors: Any) -> None:
    """ArgumentTypeError for a tensor that has a row of the table: of functions for plain tensors alone."""
    if traits(tuple(tensors.values())) == INDIRECT or in_torch():
        for name, t in tensors.items():
            if (row := row_of((t,))) is not None:
                raise ArgumentTypeError(f"{op}: {name} must be a plain tensor, got one with: {row.name}")


def check_versions(op: str, names: Sequence[str], tensors: Sequence[Any], out: Sequence[Tensor]) -> None:
    """ArgumentError where a tensor of inference mode would be written outside of it: it has no version that could say
    so, and torch's own operators refuse it. ``out`` may be arguments: ``tensors``, called ``names``."""
    for to in out:
        if to.is_inference() and not torch.is_inference_mode_enabled():
            found = (name.rstrip("?") for name, t in zip(names, tensors, strict=True) if t is to)
            raise ArgumentError(
                f"{op}: {next(found, 'out')} was made in inference mode: outside of torch.inference_mode() it can't be "
                "overwritten; a clone can"
            )


def no_gradient(op: str, reason: str, instead: str = "") -> ArgumentError:
    """The error of an op without a backward where a gradient is needed."""
    other = f", or use {instead}" if instead else ""
    return ArgumentError(
        f"{op}: a gradient is needed, and {reason}: call it under torch.no_grad() or with tensors that do not require "
        f"a gradient{other}"
    )


def needs_gradient(tensors: Sequence[Any]) -> bool:
    return any(getattr(t, "requires_grad", False) for t in tensors)


def plain(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors, of what ``Way.PLAIN`` is for plain ones in its place."""
    return tuple(unwrap_if_dead(t).resolve_neg() if isinstance(t, Tensor) else t for t in tensors)


def _has_memory(t: Tensor) -> bool:
    """Not a wrapper, nor one whose storage was resized to 0."""
    try:
        return not t.numel() or t.data_ptr() != 0
    except RuntimeError:
        return False


def _has_tangent(t: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
