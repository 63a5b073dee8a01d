"""What the tests of all losses of a linear layer share: cases against float64, what autograd and torch ask of an op,
and CUDA graphs. The exact results are in ``row_cases``, of losses by row, and ``sequence_cases``, of whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from liger_aot.ops.losses._linear import LinearLoss
from liger_aot.ops.torch_library import register
from tests.ops.losses.linear_loss_cases import FP16, FP32, WAYS, made


class LinearLossTests:
    """Base of ``RowTests`` and ``SequenceTests``.

    A subclass gives ``op_class``; ``cases``; ``more``, cases for the reference and a GPU alone; ``student``, the names
    of what may have a gradient; ``some_chunks``, a case's ``chunks`` that are several; ``for_graph``, what its case of
    a CUDA graph has; ``draw``, the op's tensors by name, or what ``tensors`` finds them in; and ``exact``.
    """

    op_class: ClassVar[type[LinearLoss]]
    cases: ClassVar[tuple[Any, ...]]
    more: ClassVar[tuple[Any, ...]] = ()
    student: ClassVar[tuple[str, str, str]]
    some_chunks: ClassVar[Any]
    for_graph: ClassVar[Mapping[str, Any]]

    def draw(self, case: Any, seed: int, device: str) -> Any:
        raise NotImplementedError

    def tensors(self, drawn: Any) -> dict[str, Any]:
        found: dict[str, Any] = drawn
        return found

    def chunk_bytes(self, case: Any) -> int:
        raise NotImplementedError

    def exact(
        self, case: Any, drawn: Any, grad: float, rounded_logits: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(outputs and gradients in float64, how far they may be off), by name."""
        raise NotImplementedError

    # ---- running it -------------------------------------------------------------------------------------------

    def graded(self, tensors: Mapping[str, Any]) -> list[str]:
        return [name for name in self.student if name and tensors[name] is not None]

    def run(
        self, op: Any, case: Any, drawn: Any, grad: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(outputs, gradients) by name."""
        given = dict(self.tensors(drawn))
        graded = self.graded(given)
        for name in graded:
            given[name] = given[name].detach().requires_grad_()
        outputs = by_name(op(**given, chunk_bytes=self.chunk_bytes(case), **case.keywords))
        outputs["loss"].backward(grad)
        return {name: t.detach() for name, t in outputs.items()}, {name: given[name].grad for name in graded}

    def check(self, op: Any, case: Any, device: str, seed: int, rounded_logits: bool) -> None:
        drawn = self.draw(case, seed, device)
        tensors = self.tensors(drawn)
        before = {name: t.clone() for name, t in tensors.items() if isinstance(t, Tensor)}
        grad = torch.tensor(0.625, device=device)
        outputs, gradients = self.run(op, case, drawn, grad)
        for name, t in before.items():
            assert torch.equal(tensors[name], t), f"{case}: {name} was overwritten"
        exact, allowed = self.exact(case, drawn, float(grad), rounded_logits)
        for name, t in {**outputs, **gradients}.items():
            if name not in allowed:
                continue
            assert t.dtype == (FP32 if name in outputs else case.dtype) and t.shape == exact[name].shape, name
            assert name in outputs or t.isfinite().all(), name
            worst = float(((t.double() - exact[name]).abs() / allowed[name]).max()) if t.numel() else 0.0
            assert worst <= 1, f"{case}: {name} is off by {worst} of what is allowed"

    # ---- tests ------------------------------------------------------------------------------------------------

    @pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.usefixtures("poisoned")
    def test_cases(self, way: str) -> None:
        op, device = made(self.op_class, way)
        for case in self.cases:
            self.check(op, case, device, 0, rounded_logits=way != "reference")

    @pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
    @pytest.mark.parametrize("way", WAYS)
    def test_frozen(self, way: str) -> None:
        """What is frozen gets nothing; what is not, the same but for the order of a sum; so the results."""
        op, device = made(self.op_class, way)
        case = replace(self.cases[0], bias=True, chunks=self.some_chunks)
        drawn = self.draw(case, 0, device)
        tensors = self.tensors(drawn)
        outputs, gradients = self.run(op, case, drawn, torch.ones((), device=device))
        for name in self.graded(tensors):
            given = {**tensors, name: tensors[name].detach().requires_grad_()}
            found = by_name(op(**given, **case.keywords))
            found["loss"].backward()
            torch.testing.assert_close(given[name].grad, gradients[name], rtol=1e-4, atol=1e-6)
            assert not any(t.requires_grad for key, t in found.items() if key != "loss")
        with torch.no_grad():
            found = by_name(op(**tensors, **case.keywords))
        for name, t in found.items():
            torch.testing.assert_close(t, outputs[name], rtol=1e-5, atol=1e-6, equal_nan=True)

    @pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("dtype", [FP32, FP16])
    def test_backwards_one_after_the_other(self, way: str, dtype: torch.dtype) -> None:
        op, device = made(self.op_class, way)
        case = replace(self.cases[0], dtype=dtype, bias=True)
        tensors = self.tensors(self.draw(case, 0, device))
        leaves = {name: tensors[name].detach().requires_grad_() for name in self.graded(tensors)}
        loss = by_name(op(**{**tensors, **leaves}, **case.keywords))["loss"]
        grad = torch.tensor(0.375, device=device)
        first = torch.autograd.grad(loss, tuple(leaves.values()), grad, retain_graph=True)
        second = torch.autograd.grad(loss, tuple(leaves.values()), grad, retain_graph=True)
        for a, b in zip(first, second, strict=True):
            allowed = 16 * torch.finfo(dtype).eps * float(a.abs().max())
            torch.testing.assert_close(b, a, rtol=0, atol=allowed)

    def test_second_derivatives(self) -> None:
        """With create_graph=True, and by torch.func: the derivatives that are written out are autograd's own."""
        op, _ = made(self.op_class, "reference")
        name = self.student[0]
        for case in (*self.cases, *self.more):
            if case.dtype != FP32:
                continue
            tensors = self.tensors(self.draw(case, 0, "cpu"))
            x = tensors[name].requires_grad_()

            def loss(x: Tensor, case: Any = case, tensors: dict[str, Any] = tensors) -> Tensor:
                return by_name(op(**{**tensors, name: x}, **case.keywords))["loss"]

            (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
            by_func = torch.func.grad(loss)(x.detach())
            torch.testing.assert_close(dx.detach(), by_func, rtol=1e-4, atol=1e-6, msg=str(case))
            if dx.requires_grad:
                (ddx,) = torch.autograd.grad(dx.square().sum(), x)
                assert ddx.isfinite().all()

    def test_compile_is_one_graph(self) -> None:
        op, _ = made(self.op_class, "reference")
        case = replace(self.cases[0], bias=True)
        drawn = self.draw(case, 0, "cpu")
        grad = torch.tensor(0.5)
        outputs, gradients = self.run(op, case, drawn, grad)
        torch.compiler.reset()
        compiled = torch.compile(lambda **t: op(**t), fullgraph=True, backend="aot_eager")
        again, found = self.run(compiled, case, drawn, grad)
        torch.testing.assert_close(again, outputs)
        torch.testing.assert_close(found, gradients)

    def test_registration(self) -> None:
        op_class = self.op_class
        register(op_class.name)
        case = replace(self.cases[0], bias=True)
        tensors = self.tensors(self.draw(case, 0, "cpu"))
        settings: list[Any] = []

        class Recording(op_class):  # type: ignore[misc, valid-type]
            def differentiable(self, tensors: Any, asked: Any = (), out: Any = None) -> Any:
                settings.extend(asked)
                return super().differentiable(tensors, asked, out)

        Recording()(**tensors, **case.keywords)
        forward = getattr(torch.ops.liger_aot, f"{op_class.name}_forward").default
        given = [tensors.get(name.rstrip("?")) for name in op_class.tensors]
        checked = op_class().settings.checked(op_class.name, (*settings, (True,) * len(op_class.graded)))
        torch.library.opcheck(forward, (*given, *checked, True))

    @pytest.mark.gpu
    def test_cuda_graph(self) -> None:
        op, device = made(self.op_class, "gpu")
        op.preload()
        case = replace(self.cases[0], dtype=torch.bfloat16, **self.for_graph)
        one = torch.ones((), device=device)
        drawn = self.draw(case, 0, device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run(op, case, drawn, one)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs, gradients = self.run(op, case, drawn, one)
        other = self.draw(case, 1, device)
        for name, t in self.tensors(drawn).items():
            if isinstance(t, Tensor):
                t.copy_(self.tensors(other)[name])
        graph.replay()
        again, wanted = self.run(op, case, other, one)
        assert all(torch.equal(outputs[name], t) for name, t in again.items())
        assert all(torch.equal(gradients[name], t) for name, t in wanted.items())


def by_name(found: Any) -> dict[str, Tensor]:
    """What an op returned: a loss alone, or several results."""
    return {"loss": found} if isinstance(found, Tensor) else found._asdict()
