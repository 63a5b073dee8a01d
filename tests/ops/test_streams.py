"""Which stream a launch goes to and whose memory it gets: torch's current one, op by op.

An op's tensors are used on torch's current stream, as those of torch's own operators. Who frees a tensor while another
stream uses it calls ``record_stream``, as there.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.runtime.manifest import Pack, Variant
from tests.conftest import built_pack
from tests.harness.drivers import bound_op
from tests.harness.recording import RecordingDriver
from tests.harness.small_calls import Named, other_calls, small_calls

OTHERS = other_calls()
OPS = sorted([*small_calls(), *OTHERS])
WITHOUT_GRADIENT = {*OTHERS, *(name for name, call in small_calls().items() if not call.graded)}


class OnStreams(RecordingDriver):
    """Notes each launch: kernel, stream, arguments. The current stream is ``current``."""

    current: ClassVar[int] = 0
    made: ClassVar[list[tuple[str, int, tuple[Any, ...]]]] = []

    def load(self, variant: Variant) -> Any:
        def launch(device: int, stream: int, x: int, y: int, z: int, /, *arguments: Any) -> None:
            self.made.append((variant.name, stream, arguments))

        return SimpleNamespace(launch=launch)

    def stream(self, device: int) -> int:
        return self.current


@cache
def _tables() -> Pack:
    return built_pack("sm90")


def _outputs(name: str, op: Any, tensors: Named) -> tuple[Tensor, ...]:
    if name not in OTHERS:
        return small_calls()[name].outputs(op, tensors)
    found = op(**tensors, **OTHERS[name][1])
    return tuple(y for y in found if y is not None) if isinstance(found, tuple) else (found,)


def _tensors(name: str, device: str = "cpu") -> Named:
    found = OTHERS[name][0] if name in OTHERS else small_calls()[name].tensors
    return {k: t.detach().to(device, copy=True) for k, t in found.items()}


def _run(name: str, op: Any, tensors: Named) -> tuple[Tensor, ...]:
    """The outputs and, where there are any, the gradients of their sum."""
    graded = () if name in WITHOUT_GRADIENT else small_calls()[name].graded
    given = {k: t.requires_grad_() if k in graded else t for k, t in tensors.items()}
    outputs = _outputs(name, op, given)
    wanted = [y for y in outputs if y.requires_grad]
    if not wanted:
        return outputs
    ones = [torch.ones_like(y) for y in wanted]
    found = torch.autograd.grad(wanted, [given[k] for k in graded], ones, allow_unused=True)
    return (*(y.detach() for y in outputs), *(g for g in found if g is not None))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_all_is_launched_on_the_current_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; what a launch leaves for the next is that stream's own."""
    monkeypatch.setattr(OnStreams, "made", [])
    op = bound_op(type(liger_aot.load(name)), _tables(), OnStreams)
    addresses: dict[int, list[Any]] = {}
    for stream in (7, 9, 7):
        monkeypatch.setattr(OnStreams, "current", stream)
        OnStreams.made.clear()
        _run(name, op, _tensors(name))
        assert OnStreams.made and {s for _, s, _ in OnStreams.made} == {stream}
        addresses[stream] = [a for _, _, arguments in OnStreams.made for a in arguments]
    for runtimes in op._runtimes.values():
        for words in runtimes.on(-1).workspaces.values():
            kept = {stream: t.data_ptr() for stream, t in words._by_stream.items()}
            assert set(kept) <= {7, 9} and len(set(kept.values())) == len(kept)
            for stream, at in kept.items():
                others = [other for s, other in kept.items() if s != stream]
                assert at in addresses[stream] and not set(others) & set(addresses[stream])


def test_ops_that_keep_words_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees words: of attention's tile counter."""
    op = bound_op(type(liger_aot.load("flash_attention")), _tables(), OnStreams)
    q = torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16)
    for stream in (7, 9):
        monkeypatch.setattr(OnStreams, "current", stream)
        op(q, q, q)
    (words,) = op._own.on(-1).workspaces.values()
    assert set(words._by_stream) == {7, 9}


# ---- on a GPU -------------------------------------------------------------------------------------------------


def _overwrite() -> list[Tensor]:
    """Memory of all sizes that the current stream may have now, all bits set."""
    taken = []
    for power in range(9, 21):
        taken += [torch.full((1 << power,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    return taken


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_memory_that_is_freed_while_the_kernels_wait(name: str) -> None:
    """They wait behind a long kernel of their stream, while the main stream frees the arguments, which it recorded,
    calls the same op and writes to all memory that it can have."""
    op = liger_aot.load(name)
    wanted = _run(name, op, _tensors(name, "cuda"))
    side = torch.cuda.Stream()
    for _ in range(3):
        tensors = _tensors(name, "cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)
            got = _run(name, op, tensors)
        for t in tensors.values():
            t.record_stream(side)
        del t, tensors
        _overwrite()
        beside = _run(name, op, _tensors(name, "cuda"))
        torch.cuda.synchronize()
        for found in (got, beside):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


KEEPING = (
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_paged",
    "flash_decoding",
    "groupnorm",
)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KEEPING)
def test_graphs_of_torch_compile(name: str) -> None:
    """Those of mode="reduce-overhead", whose first call has the graph's pool for its memory: in parts, so that a later
    part is called first where an earlier one is replayed. An op of its own, which has no words yet."""
    torch.compiler.reset()
    op, outputs = (
        type(liger_aot.load(name))(),
        small_calls()[name].outputs,
    )  # looked up here: not to be traced
    key, first = next((k, t) for k, t in _tensors(name, "cuda").items() if t.is_floating_point())
    fixed = {k: t for k, t in _tensors(name, "cuda").items() if k != key}

    def before(t: Tensor) -> Tensor:
        return t * 2

    def after(t: Tensor) -> tuple[Tensor, ...]:
        return tuple(y * 2 for y in outputs(op, {**fixed, key: t}))

    parts = [torch.compile(part, backend="cudagraphs") for part in (before, after)]
    with torch.no_grad():
        for step in range(6):
            t = first * (1 + step)
            torch.compiler.cudagraph_mark_step_begin()
            made = parts[0](t)
            if step < 3:
                continue  # the second part is called first when the first one is a graph
            found = tuple(y.clone() for y in parts[1](made))
            wanted = after(before(t))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), step
