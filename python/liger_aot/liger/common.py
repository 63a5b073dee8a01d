"""What the replacements of Liger's functions share: its arguments turned into those of the ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

from liger_aot.errors import ArgumentError
from liger_aot.liger.fallback import served
from liger_aot.ops import guards
from liger_aot.ops.differentiable import DifferentiableOp

CASTING_MODES = {"llama": 0, "gemma": 1, "none": -1}  # with Liger's numbers
_NAMES = {number: name for name, number in CASTING_MODES.items()}


def casting_name(mode: str | int) -> str:
    name = _NAMES.get(mode) if isinstance(mode, int) else mode
    if name not in CASTING_MODES:
        raise ArgumentError(
            f"casting_mode must be one of {', '.join(CASTING_MODES)} or {', '.join(map(str, _NAMES))}; got {mode!r}"
        )
    return name


def launch_numbers(n: int) -> tuple[int, int]:
    """(BLOCK_SIZE, num_warps), which Liger's forwards return and its backwards take. Nothing here reads them."""
    block = 1 << max(n - 1, 0).bit_length()
    return block, 4 if block < 2048 else 8 if block < 8192 else 16 if block < 32768 else 32


def whole(x: Any) -> Any:
    """A DTensor's full tensor, as in Liger's norms; any other argument itself."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def checked_forward(
    op: DifferentiableOp, tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]
) -> tuple[Any, ...]:
    """``op.run_forward`` with all results, for callers that bring their own tensors and settings: both are put right or
    refused as in a call of the op. It leaves autograd to the caller."""
    return op.run_forward(guards.plain(tensors), op.settings.checked(op.name, settings), True, None)


def checked_backward(
    op: DifferentiableOp,
    grads: tuple[Tensor | None, ...],
    tensors: tuple[Tensor | None, ...],
    saved: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    needed: tuple[bool, ...],
) -> tuple[Any, ...]:
    """``op.run_backward``, which trusts that its tensors come from autograd, for callers that bring their own: a
    gradient of another dtype, or statistics that Liger keeps in the input's, would be read as what they are not.

    Args:
        tensors: the op's arguments, checked as its forward checks them.
        saved: what its backward reads. What is no argument is statistics.

    Raises:
        ArgumentError: a gradient or statistics have another shape or device than the first tensor needs.
    """
    grads, tensors, saved = guards.plain(grads), guards.plain(tensors), guards.plain(saved)
    op.check(tensors, settings)
    x = tensors[0]
    assert x is not None
    for g in grads:
        if g is not None and (g.shape != x.shape or g.device != x.device):
            raise ArgumentError(
                f"{op.name}: a gradient must be of shape {tuple(x.shape)} on {x.device}; got {tuple(g.shape)} on "
                f"{g.device}"
            )
    fitted = tuple(None if g is None else g.to(x.dtype) for g in grads)
    return op.run_backward(fitted, saved, settings, needed)


def statistics(op: str, argument: str, value: Tensor, x: Tensor, numbers: int) -> Tensor:
    """What a forward kept of ``numbers`` rows or groups of x, as the backwards read it: float32 without gaps."""
    if value.numel() != numbers or value.device != x.device:
        raise ArgumentError(
            f"{op}: {argument} must hold {numbers} numbers on {x.device}; got {tuple(value.shape)} on {value.device}"
        )
    return value.float().contiguous()


def gradients_of(
    loss: Tensor, inputs: tuple[Tensor | None, ...], grad: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that require one; None for the others. An unreduced loss is summed."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if not wanted:
        return (None,) * len(inputs)
    grad = torch.ones_like(loss) if grad is None else grad.to(loss.dtype).reshape(loss.shape)
    found = iter(torch.autograd.grad(loss, wanted, grad))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


class _Traced(FunctionMeta):
    """torch.compile traces ``apply`` as it traces any function: of autograd functions of the plain metaclass it would
    trace ``forward`` and ``backward`` instead."""


class Function(torch.autograd.Function, metaclass=_Traced):
    """Base of what stands for Liger's autograd functions. A subclass gives ``call``, with the arguments of Liger's
    ``forward``.

    ``apply`` is ``call``: the op's own autograd, which can be differentiated twice. ``forward(ctx, ...)`` and
    ``backward(ctx, ...)`` are for functions that call them with a context of their own.
    """

    call: ClassVar[Callable[..., Any]]
    prefix: ClassVar[str] = ""  # of its name in ``fallback.theirs``

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        call = served(f"{cls.prefix}{cls.__name__}", cls.call)
        signature = inspect.signature(call)

        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            leaves = [_leaf(value) for value in bound.arguments.values()]
            with torch.enable_grad():
                results = call(*leaves)
            ctx.of_liger_aot = leaves[: len(args)], results
            return _detached(results)

        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = [context, *signature.parameters.values()]
        forward.__signature__ = signature.replace(parameters=arguments)  # type: ignore[attr-defined]
        for name, function in (("apply", call), ("forward", forward), ("backward", _backward)):
            setattr(cls, name, staticmethod(function))


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _detached(results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(map(_detached, results))
    return results.detach() if isinstance(results, Tensor) else results


def _backward(ctx: Any, *grads: Tensor | None) -> Any:
    """A gradient for each argument that ``forward`` was given: None for what is no tensor or needs none."""
    leaves, results = ctx.of_liger_aot
    results = results if isinstance(results, tuple) else (results,)
    pairs = [
        (result, grad)
        for result, grad in zip(results, grads, strict=False)
        if grad is not None and isinstance(result, Tensor) and result.requires_grad
    ]
    wanted = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in pairs],
            wanted,
            [grad.to(result.dtype) for result, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        if pairs and wanted
        else (None,) * len(wanted)
    )
    gradients = tuple(next(found) if isinstance(t, Tensor) and t.requires_grad else None for t in leaves)
    return gradients if len(gradients) > 1 else gradients[0]
