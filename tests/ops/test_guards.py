"""What torch's dispatcher would see, op by op and row by row: on the CPU's reference and on the way to the kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError, LigerAOTError
from liger_aot.ops.differentiable import DifferentiableOp
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.guards import TABLE
from liger_aot.ops.registry import names
from tests.conftest import built_pack
from tests.harness.all_ops import LEFT_OUT
from tests.harness.drivers import EmulatorDriver, bound_op
from tests.harness.small_calls import Named, SmallCall, other_calls, small_calls

OPS = sorted(small_calls())
WAYS = [
    "reference",
    "emulator",
    pytest.param("gpu", marks=pytest.mark.gpu),
]
# What they give is chosen, not computed: it has no tangent that says anything.
CHOOSING = {"rejection_sample", "sample", "top_k_top_p_mask"}
NO_GRADIENT = {name for name, call in small_calls().items() if not call.graded}


class Way:
    """An op and its small call, where one of WAYS runs it."""

    def __init__(self, op: Any, call: SmallCall) -> None:
        self.op, self.call = op, call
        self.tensors = call.tensors
        self.loose = any(t.dtype == torch.float16 for t in call.tensors.values())

    def outputs(self, **changed: Tensor) -> tuple[Tensor, ...]:
        return self.call.outputs(self.op, {**self.tensors, **changed})

    def first(self) -> tuple[str, Tensor]:
        """The first floating-point argument."""
        return next((k, t) for k, t in self.tensors.items() if t.is_floating_point())

    def close(self, got: Any, wanted: Any, scale: float = 1.0) -> None:
        for a, b in zip(got, wanted, strict=True):
            most = (5e-3 if self.loose else 2e-5) * scale * max(1.0, float(b.detach().abs().max()))
            torch.testing.assert_close(a.detach().to(b.dtype), b.detach(), rtol=0, atol=most)

    def leaves(self) -> Named:
        return {k: t.detach().clone().requires_grad_(k in self.call.graded) for k, t in self.tensors.items()}


@cache
def _op(name: str, way: str) -> Any:
    if way != "emulator":
        return liger_aot.load(name)
    op_class = type(liger_aot.load(name))
    return bound_op(op_class, built_pack("gfx942"), EmulatorDriver)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, name: str) -> Way:
    call = small_calls()[name]
    if request.param == "gpu":
        call = call._replace(tensors={k: t.cuda() for k, t in call.tensors.items()})
    return Way(_op(name, request.param), call)


@cache
def _followed(name: str) -> Any:
    """The op as its plain-torch reference, which torch's own autograd differentiates step by step."""

    def differentiable(self: Any, tensors: Any, settings: Any = (), out: Any = None) -> Any:
        wanted = [(False,) * len(self.graded)] if hasattr(self, "graded") else []
        results = self.reference(*tensors, *settings, *wanted)[: self.outputs]
        return results[0] if self.outputs == 1 else results

    return type("Followed", (type(liger_aot.load(name)),), {"differentiable": differentiable})()


def _scalar(outputs: tuple[Tensor, ...]) -> Tensor:
    """One number that all outputs count in, not linearly."""
    return torch.stack(
        [(y.float() * y.float().detach().cos() + y.float().square()).sum() for y in outputs]
    ).sum()


# ---- rows whose calls are as if the row were not there --------------------------------------------------------


class Sub(Tensor):
    pass


class Counting(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def _subclass(way: Way) -> tuple[Tensor, ...]:
    name, t = way.first()
    return way.outputs(**{name: t.as_subclass(Sub)})


def _traced(way: Way) -> tuple[Tensor, ...]:
    keys = list(way.tensors)
    other = [t * 0.5 if t.is_floating_point() else t for t in way.tensors.values()]
    traced = torch.jit.trace(
        lambda *given: way.call.outputs(way.op, dict(zip(keys, given, strict=True))), other, check_trace=False
    )
    return tuple(traced(*way.tensors.values()))


def _mode(way: Way) -> tuple[Tensor, ...]:
    with Counting() as mode:
        outputs = way.outputs()
    assert any(op.startswith("liger_aot.") for op in mode.seen), "the mode saw nothing of it"
    return outputs


def _ended(way: Way) -> tuple[Tensor, ...]:
    name, t = way.first()
    seen: list[Tensor] = []

    def leave(one: Tensor) -> Tensor:
        seen.append(t * one)
        return one

    torch.func.grad(leave)(t.new_ones(()))
    return way.outputs(**{name: seen[0]})


def _of_a_transform(way: Way) -> Named:
    """The first floating-point argument, and those that the op writes: torch writes nothing that is not the
    transform's own where one of its tensors is read."""
    name, t = way.first()
    return {name: t, **{k: way.tensors[k] for k in way.op.writes if k in way.tensors}}


def _vmapped(way: Way) -> tuple[Tensor, ...]:
    name, _ = way.first()
    stacked = {k: torch.stack((t, t * (0.5 if k == name else 1))) for k, t in _of_a_transform(way).items()}
    found = torch.vmap(lambda given: way.outputs(**given))(stacked)
    return tuple(y[0] for y in found)


def _functionalized(way: Way) -> tuple[Tensor, ...]:
    return tuple(torch.func.functionalize(lambda given: way.outputs(**given))(_of_a_transform(way)))


def _unknown_to_a_transform(way: Way) -> tuple[Tensor, ...]:
    """Plain tensors, where a transform is active."""
    seen: list[Any] = []
    torch.func.grad(lambda one: (seen.append(way.outputs()), one.sum())[1])(torch.ones(2))
    return tuple(torch._C._functorch.unwrap_if_dead(y) for y in seen[0])


def _negated(way: Way) -> tuple[Tensor, ...]:
    changed = {k: _lazily_negated(t) for k, t in way.tensors.items() if t.dtype == torch.float32}
    assert all(t.is_neg() and torch.equal(t, way.tensors[k]) for k, t in changed.items())
    return way.outputs(**_dense_enough(way, changed))


def _lazily_negated(t: Tensor) -> Tensor:
    """The same values."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def _dense_enough(way: Way, changed: Named) -> Named:
    """Vectors must be contiguous: of those only the rows of one element can be negated lazily."""
    return {k: t for k, t in changed.items() if t.dim() > 1 or t.numel() == 1}


def _frozen(way: Way) -> tuple[Tensor, ...]:
    with torch.no_grad():
        outputs = way.call.outputs(way.op, way.leaves())
    assert not any(y.requires_grad for y in outputs)
    return outputs


def _autocast(way: Way) -> tuple[Tensor, ...]:
    _, t = way.first()
    with torch.autocast(t.device.type, dtype=torch.bfloat16):
        outputs = way.outputs()
    if "linear" not in way.op.name:
        return outputs
    # As torch's linear layers.
    narrow = {k: v.bfloat16() for k, v in way.tensors.items() if k.endswith("input")}
    way.close(outputs, way.outputs(**narrow))
    return way.outputs()


def _inference(way: Way) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        tensors = {k: t.clone() for k, t in way.tensors.items()}
        outputs = way.call.outputs(way.op, tensors)
        assert all(y.is_inference() for y in outputs)
        return tuple(y.clone() for y in outputs)


def _other_stream(way: Way) -> tuple[Tensor, ...]:
    if not way.first()[1].is_cuda:
        return way.outputs()
    with torch.cuda.stream(torch.cuda.Stream()):
        outputs = way.outputs()
    torch.cuda.synchronize()
    return outputs


def _deterministic(way: Way) -> tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return way.outputs()
    finally:
        torch.use_deterministic_algorithms(False)


def _function_mode(way: Way) -> tuple[Tensor, ...]:
    with torch.device("meta"):  # where factories that name no device make their tensors
        return way.outputs()


SAME: dict[str, tuple[Callable[[Way], tuple[Tensor, ...]], ...]] = {
    "tensor subclass": (_subclass,),
    "torch.jit.trace": (_traced,),
    "dispatch mode": (_mode,),
    "ended transform": (_ended,),
    "transform of torch.func": (_vmapped, _functionalized, _unknown_to_a_transform),
    "negative bit": (_negated,),
    "grad mode": (_frozen,),
    "autocast": (_autocast,),
    "inference tensor": (_inference,),
    "other stream": (_other_stream,),
    "deterministic mode": (_deterministic,),
    "function mode": (_function_mode,),
}


def _storage_freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "sparse or nested layout": (
        Tensor.to_sparse,
        lambda t: t.float().to_mkldnn() if t.device.type == "cpu" else t.to_sparse(),
        lambda t: torch.nested.nested_tensor([t, t]),
    ),
    "quantised": (lambda t: torch.quantize_per_tensor(t.float().cpu(), 0.1, 0, torch.qint8),),
    "no memory of its own": (
        _storage_freed,
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    ),
    "conjugate bit": (lambda t: torch.complex(t.float(), t.float()).conj(),),
}
ELSEWHERE = {
    "dual tensor": "test_forward_mode",
    "version counter": "test_in_place_writes_are_counted",
}


def test_each_row_of_the_table_has_a_test() -> None:
    assert sorted([*SAME, *REFUSED, *ELSEWHERE]) == sorted(row.name for row in TABLE)
    assert all(test in globals() for test in ELSEWHERE.values())
    assert set(OPS) | LEFT_OUT == set(names())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_as_if_the_row_were_not_there(name: str, way: Way) -> None:
    wanted = way.outputs()
    for row, calls in SAME.items():
        for call in calls:
            try:
                got = call(way)
            except Exception as error:
                raise AssertionError(f"{row}, {call.__name__}") from error
            assert all(y.device == w.device for y, w in zip(got, wanted, strict=True)), row
            way.close(got, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_what_is_refused(name: str, way: Way) -> None:
    """Each tensor in turn; the error names it."""
    for row, makers in REFUSED.items():
        for argument, t in way.tensors.items():
            if (row == "conjugate bit" or row == "quantised") and not t.is_floating_point():
                continue
            if row == "conjugate bit" and argument == "freqs_cis":
                continue
            for make in makers:
                try:
                    value = make(t)
                except (RuntimeError, NotImplementedError):
                    continue  # torch has no such tensor
                with pytest.raises(LigerAOTError, match=rf"{name}: .*\b{argument}\b"):
                    way.outputs(**{argument: value})


# ---- derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [op for op in OPS if op not in NO_GRADIENT])
def test_second_derivatives(name: str, way: Way) -> None:
    """Of a loss called last, through a gradient penalty: as torch's autograd finds them step by step."""
    found = {}
    for op in (way.op, _followed(name)):
        leaves = way.leaves()
        given = [leaves[k] for k in way.call.graded]
        loss = _scalar(way.call.outputs(op, leaves))
        first = torch.autograd.grad(loss, given, create_graph=True)
        penalty = torch.stack([g.float().square().sum() for g in first]).sum()
        second = torch.autograd.grad(loss + penalty, given)
        found[op is way.op] = first, second
    for got, wanted in zip(found[True], found[False], strict=True):
        way.close(got, wanted, 10)


@pytest.mark.parametrize("name", [op for op in OPS if op not in NO_GRADIENT])
def test_jacobian_vector_products(name: str, way: Way) -> None:
    """By two backward passes, where the gradients that come in are what is differentiated."""
    argument = way.call.graded[0]
    t = way.tensors[argument]

    def along(op: Any) -> Any:
        def outputs(x: Tensor) -> Tensor:
            return _scalar(way.call.outputs(op, {**way.tensors, argument: x}))

        return torch.autograd.functional.jvp(outputs, t, torch.ones_like(t))[1]

    way.close((along(way.op),), (along(_followed(name)),), 10)


@pytest.mark.parametrize("name", [op for op in OPS if op not in CHOOSING])
def test_forward_mode(name: str, way: Way) -> None:
    """Dual tensors, alone and with gradients, and torch.func's jvp and its derivatives' derivatives."""
    argument, t = way.first()
    plain = way.outputs()
    along = torch.linspace(-1, 1, t.numel(), device=t.device).sin().reshape(t.shape).to(t.dtype)

    def scalar(op: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: _scalar(way.call.outputs(op, {**way.tensors, argument: x}))

    with torch.no_grad():
        _, wanted = torch.func.jvp(scalar(_followed(name)), (t,), (along,))
    assert wanted.abs() > 0
    with forward_ad.dual_level():
        outputs = way.outputs(**{argument: forward_ad.make_dual(t, along)})
        way.close(outputs, plain)
        tangents = [forward_ad.unpack_dual(y).tangent for y in outputs]
        assert any(tangent is not None for tangent in tangents)
        found = forward_ad.unpack_dual(scalar(way.op)(forward_ad.make_dual(t, along))).tangent
        way.close((found,), (wanted,), 10)
        way.close(way.outputs(), plain)  # no dual tensor among them
    _, found = torch.func.jvp(scalar(way.op), (t,), (along,))
    way.close((found,), (wanted,), 10)
    if name in NO_GRADIENT:
        return
    gradient = torch.func.grad(scalar(way.op))(t)
    way.close((gradient,), (torch.func.grad(scalar(_followed(name)))(t),), 10)
    _, found = torch.func.jvp(torch.func.grad(scalar(way.op)), (t,), (along,))
    assert found.isfinite().all()


@pytest.mark.parametrize("name", [op for op in OPS if op not in NO_GRADIENT])
def test_gradients_that_only_the_dispatcher_sees(name: str, way: Way) -> None:
    """Negated lazily, or dual; or under a mode."""
    leaves = way.leaves()
    outputs = way.call.outputs(way.op, leaves)
    given = [leaves[k] for k in way.call.graded]
    grads = [torch.full_like(y, 0.25) for y in outputs]
    wanted = torch.autograd.grad(outputs, given, grads, retain_graph=True)
    lazy = [_lazily_negated(g) for g in grads if g.dtype != torch.float16]
    if len(lazy) == len(grads):
        assert all(g.is_neg() for g in lazy)
        way.close(torch.autograd.grad(outputs, given, lazy, retain_graph=True), wanted)
    with Counting() as mode:
        way.close(torch.autograd.grad(outputs, given, grads, retain_graph=True), wanted)
    assert any(op.startswith(f"liger_aot.{name}_backward") for op in mode.seen), "the mode saw nothing of it"
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(g, g) for g in grads]
        found = torch.autograd.grad(outputs, given, dual, retain_graph=True)
        tangents = [forward_ad.unpack_dual(g).tangent for g in found]
        way.close(tangents, wanted)  # the backward is linear in them


@pytest.mark.parametrize("name", [op for op in OPS if op not in NO_GRADIENT])
def test_backward_under_autocast(name: str, way: Way) -> None:
    found = []
    for enabled in (False, True):
        leaves = way.leaves()
        loss = _scalar(way.call.outputs(way.op, leaves))
        with torch.autocast(loss.device.type, dtype=torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(loss, [leaves[k] for k in way.call.graded]))
    way.close(found[1], found[0])


# ---- what is written in place ----------------------------------------------------------------------------------

WRITTEN: dict[str, tuple[str, ...]] = {
    "rmsnorm": ("out",),
    "fused_add_rmsnorm": ("x", "residual"),
    "fused_add_rmsnorm_quantize": ("residual",),
    "rope": ("q", "k"),
    "rope_multimodal": ("q", "k"),
    "rope_llama4": ("q", "k"),
    "write_kv_cache": ("key_cache", "value_cache"),
    "qk_norm_rope": ("qkv",),
    "flash_attention_paged": ("out",),
    "top_k_top_p_mask": ("out", "logits"),
}
LIKE_OUT = {"rmsnorm": "x", "flash_attention_paged": "q", "top_k_top_p_mask": "logits"}
IN_PLACE = {"out", "inplace"}  # by which a call says that it writes


def test_all_that_is_written_is_in_the_table() -> None:
    found = set()
    for name in names():
        op = liger_aot.load(name)
        if op.writes if isinstance(op, DifferentiableOp) else ():
            found.add(name)
        if IN_PLACE & set(inspect.signature(op.__call__).parameters):
            found.add(name)
    assert found == set(WRITTEN)


def _write(way: Way, argument: str, tensors: Named) -> Any:
    name = way.op.name
    if argument == "out":
        return _with_out(way, tensors)
    if name == "top_k_top_p_mask":
        return way.op(**tensors, inplace=True)
    if name == "fused_add_rmsnorm_quantize":
        return way.op(**tensors, dtype=torch.int8, inplace=True)
    if way.op.writes:
        heads = {"num_heads_q": 2, "num_heads_k": 1, "num_heads_v": 1} if name == "qk_norm_rope" else {}
        return way.op(**tensors, **heads)
    sections = [(4, 2, 2)] if name == "rope_multimodal" else []
    return way.op(*tensors.values(), *sections, inplace=True)


def _with_out(way: Way, tensors: Named) -> Any:
    if way.op.name == "flash_attention_paged":
        return way.op(**tensors, max_seqlen_q=3)
    return way.op(**tensors)


def _to_write(way: Way, argument: str) -> Named:
    """A call's tensors, of which ``argument`` may be overwritten."""
    tensors = {k: t.clone() for k, t in way.tensors.items()}
    if argument == "out":
        tensors["out"] = torch.zeros_like(tensors[LIKE_OUT[way.op.name]])
    return tensors


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_in_place_writes_are_counted(name: str, way: Way) -> None:
    """Who saved a tensor for a backward learns that it was overwritten, under no_grad, too."""
    for argument in WRITTEN[name]:
        tensors = _to_write(way, argument)
        before = tensors[argument]
        versions = before._version
        two = torch.full_like(before, 2.0, requires_grad=True)
        product = two * before
        with torch.no_grad():
            _write(way, argument, tensors)
        assert before._version > versions
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_in_place_writes_of_inference_mode(name: str, way: Way) -> None:
    """Its tensors have no versions: they are written there, and refused elsewhere, as torch's own operators do."""
    for argument in WRITTEN[name]:
        with torch.inference_mode():
            tensors = _to_write(way, argument)
            kept = tensors[argument].clone()
            _write(way, argument, tensors)
            tensors[argument].copy_(kept)
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(ArgumentError, match=rf"{name}: {argument} was made in inference mode"):
                _write(way, argument, {**_to_write(way, argument), argument: tensors[argument]})
        assert torch.equal(tensors[argument], kept)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_in_place_writes_that_are_refused(name: str, way: Way) -> None:
    """Rows that overlap themselves, and what torch negates lazily."""
    for argument in WRITTEN[name]:
        tensors = _to_write(way, argument)
        t = tensors[argument]
        flat = torch.zeros(t.numel() * 2, dtype=t.dtype, device=t.device)
        repeated = t[:1].expand(t.shape) if t.shape[0] > 1 else flat[:1].expand(t.shape)
        staggered = flat.as_strided(t.shape, (1,) * t.dim())
        negated = torch.complex(t, t).conj().imag
        assert negated.is_neg()
        for bad, why in ((repeated, "stride"), (staggered, "stride"), (negated, "negat")):
            with torch.no_grad(), pytest.raises(LigerAOTError, match=rf"{name}: .*\b{argument}\b.*{why}"):
                _write(way, argument, {**tensors, argument: bad})


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_in_place_writes_over_what_is_read(name: str, way: Way) -> None:
    """Each other argument in turn lies in the memory that the call writes."""
    refused = 0
    for argument in WRITTEN[name]:
        for other, t in _to_write(way, argument).items():
            tensors = _to_write(way, argument)
            if other == argument:
                continue
            written = tensors[argument].contiguous()
            memory = torch.zeros(
                max(written.nbytes, t.nbytes) + 64, dtype=torch.uint8, device=t.device
            )  # two views of it, a few elements apart
            tensors[argument] = (
                memory[: written.nbytes].view(written.dtype).view(written.shape).copy_(written)
            )
            tensors[other] = memory[16 : 16 + t.nbytes].view(t.dtype).view(t.shape)
            with torch.no_grad(), pytest.raises(ArgumentError, match=rf"{name}: .*overlap"):
                _write(way, argument, tensors)
            refused += 1
    assert refused


@pytest.mark.parametrize("name", ["rmsnorm"])
def test_out_that_requires_a_gradient(name: str, way: Way) -> None:
    """Its history would no longer be that of its values."""
    out = torch.zeros_like(way.tensors["x"], requires_grad=True) * 2
    with pytest.raises(ArgumentError, match="out is given, but a gradient is needed"):
        way.op(way.tensors["x"], out=out)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", sorted(n for n in OPS if isinstance(liger_aot.load(n), ForwardOnlyOp)))
def test_a_gradient_of_an_op_without_one(name: str, compiled: bool) -> None:
    """It is refused as soon as it is asked for, also under torch.compile, and not where autograd is off."""
    op, call = liger_aot.load(name), small_calls()[name]
    assert isinstance(op, ForwardOnlyOp) and not call.graded
    tensors = {k: t.clone().requires_grad_(t.is_floating_point()) for k, t in call.tensors.items()}
    outputs = torch.compile(call.outputs, backend="eager") if compiled else call.outputs
    with torch.no_grad():
        outputs(op, tensors)
    with pytest.raises(Exception, match=f"{name}: a gradient is needed, and {op.no_gradient}: ") as raised:
        outputs(op, tensors)
    if compiled:
        return
    assert type(raised.value) is ArgumentError
    first, plain = next(k for k, t in tensors.items() if t.is_floating_point()), call.tensors
    with pytest.raises(ArgumentError, match=f"{name}: a gradient is needed"):
        torch.func.grad(lambda t: _scalar(call.outputs(op, {**plain, first: t})))(plain[first])


BARE = {"column_sums", "divergence_sums", "flash_attention_backward", "flash_attention_varlen_backward"}


@pytest.mark.parametrize("name", sorted(BARE))
def test_a_gradient_of_an_op_beside_autograd(name: str) -> None:
    """One that asks for it gets an error, not results that look like constants."""
    op, (tensors, settings) = liger_aot.load(name), other_calls()[name]
    wanted = op(**tensors, **settings)
    for k, t in tensors.items():
        if t.is_floating_point():
            graded = {**tensors, k: t.clone().requires_grad_()}
            with pytest.raises(ArgumentError, match=f"{name}: a gradient is needed"):
                op(**graded, **settings)
            with torch.no_grad():
                found = op(**graded, **settings)
            pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["cross_entropy"])
def test_gradients_in_place_are_not_differentiated_again(name: str, way: Way) -> None:
    leaf = way.tensors["logits"].clone().requires_grad_()
    loss = way.op(leaf * 1, way.tensors["target"], inplace_grad=True)
    with pytest.raises(RuntimeError, match="inplace_grad=False"):
        torch.autograd.grad(loss, leaf, create_graph=True)
    rows = way.tensors["logits"][:1].clone().requires_grad_().expand(4, -1) * 1
    overlapping = rows[:1].expand(4, -1)
    with pytest.raises(ArgumentError, match="logits"):
        way.op(overlapping, way.tensors["target"], inplace_grad=True)


# ---- dtypes that only look alike -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_thirty_two_bits_that_are_no_float32(name: str, way: Way) -> None:
    """Integers and half-complex numbers in the place of each floating-point argument."""
    for argument, t in way.tensors.items():
        if not t.is_floating_point():
            continue
        for dtype in (torch.int32, torch.complex32):
            wrong = torch.zeros(t.shape, dtype=dtype, device=t.device)
            with pytest.raises(ArgumentTypeError, match=rf"{name}: .*\b{argument}\b"):
                way.outputs(**{argument: wrong})


@pytest.mark.parametrize("name", ["vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"])
def test_losses_over_ranks_are_not_differentiated_again(name: str) -> None:
    """What a rank gets depends on the others: its reference has the shapes alone."""
    with pytest.raises(ArgumentError, match=f"{name} .*create_graph=True"):
        liger_aot.load(name).backward_in_torch((torch.ones(()),), (torch.ones(4, 8),), (), (True,))
