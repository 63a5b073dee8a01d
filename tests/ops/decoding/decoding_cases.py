"""What the tests of decoding on the CPU, on the emulator, on the interpreter and on a GPU share: problems, the check of
a result against float64 with a limit for every element, and a driver that launches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.runtime.manifest import Pack, Variant
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.tolerances import LEAST, NAMES, UNIT_ROUNDOFF
from tests.ops.attention import attention_cases

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
Arguments = tuple[Any, ...]  # in the order of FlashDecoding.tensors


class Problem(NamedTuple):
    """One call; ``window``, ``softcap``, ``causal`` and ``splits`` as the op takes them. Batch is len(lengths)."""

    heads: int
    kv_heads: int
    tokens: int
    capacity: int
    lengths: tuple[int, ...]
    dim: int
    dtype: torch.dtype = BF16
    page: int = 0  # keys a page; 0: contiguous
    splits: int | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    shift: int = 0  # elements that the caches start after an aligned address
    full: bool = False  # no cache_seqlens: lengths are the capacity
    fp8: bool = False  # a cache of codes, of the architecture's dtype; where it has none, as without
    scales: str = "none"  # of it: "one", or one a "head"
    unscaled: str = ""  # "k" or "v" has none

    def tensors(self, seed: int = 0, device: str = "cpu", fp8: torch.dtype | None = None) -> Arguments:
        """NaN is where no key was written and before the window; entries of the block table for such are no pages."""
        generator = torch.Generator(device).manual_seed(seed)
        batch, shape = len(self.lengths), (self.kv_heads, self.dim)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, generator=generator).to(self.dtype)

        q = normal(batch, self.tokens, self.heads, self.dim)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        table = None
        size = self.page or self.capacity
        a_sequence = -(-self.capacity // size) if size else 0
        pages = batch * a_sequence + 3 if self.page else batch
        caches = []
        for _ in range(2):
            flat = torch.full(
                (pages * size * self.kv_heads * self.dim + self.shift,), torch.nan, dtype=self.dtype
            )
            caches.append(flat.to(device)[self.shift :].view(pages, size, *shape))
        if self.page:
            order = torch.randperm(pages, device=device, generator=generator)
            table = order[: batch * a_sequence].view(batch, a_sequence).to(torch.int32)
        for b, length in enumerate(self.lengths):
            for cache in caches:
                values = normal(length, *shape)
                values[: self.unseen(length)] = torch.nan
                for first in range(0, length, size or 1):
                    some = values[first : first + size]
                    cache[int(table[b, first // size]) if table is not None else b, : len(some)] = some
            if table is not None:
                table[b, -(-length // size) :] = 99 if b % 2 else -1
                table[b, : self.unseen(length) // size] = 99
        sinks = torch.randn(self.heads, device=device, generator=generator) if self.sinks else None
        scales: list[Tensor | None] = [None, None]
        if fp8 is not None:
            caches = [self._as_codes(cache, fp8) for cache in caches]
            if self.scales != "none":
                count = self.kv_heads if self.scales == "head" else 1
                scales = [
                    torch.exp2(torch.randn(count, device=device, generator=generator)) for _ in range(2)
                ]
                scales = [None if name == self.unscaled else t for name, t in zip("kv", scales, strict=True)]
        return q, *caches, None if self.full else lengths, table, sinks, *scales

    def _as_codes(self, cache: Tensor, fp8: torch.dtype) -> Tensor:
        """In memory that starts as far after an aligned address."""
        flat = torch.empty(cache.numel() + self.shift, dtype=fp8, device=cache.device)
        flat[self.shift :] = cache.reshape(-1).clamp(-200, 200).to(fp8)
        return flat[self.shift :].view(cache.shape)

    def unseen(self, length: int) -> int:
        """Keys before the first token's window."""
        left = (self.window or (None, None))[0]
        return 0 if left is None else max(0, length - self.tokens - left)

    def keywords(self, tensors: Arguments) -> dict[str, Any]:
        """The op's arguments but q, k_cache and v_cache."""
        return {
            "cache_seqlens": tensors[3],
            "block_table": tensors[4],
            "sinks": tensors[5],
            "k_scale": tensors[6],
            "v_scale": tensors[7],
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
            "splits": self.splits,
            "return_lse": True,
        }

    def settings(self) -> tuple[float, int, int, float, int]:
        """As the reference takes them."""
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        scale = self.dim**-0.5 if self.scale is None else self.scale
        bounds = -1 if left is None else left, -1 if right is None else right
        return scale, *bounds, self.softcap, self.splits or 0


def far_behind(gap: float, dtype: torch.dtype, splits: int, device: str = "cpu") -> tuple[Problem, Arguments]:
    """As in ``attention_cases``; with several splits all of them are as far behind the first key."""
    problem = Problem(1, 1, 1, 200, (200,), 64, dtype, splits=splits, full=True)
    _, (q, k, v, _) = attention_cases.far_behind(gap, dtype, device)
    return problem, (q, k, v, None, None, None, None, None)


def fp8_of(op: Any) -> torch.dtype | None:
    """The dtype of codes where ``op`` runs; None where it has none."""
    kernels = [on.kernels["flash_decoding_split"] for on in op._own.bound.values()]
    found = {axis for kernel in kernels for key in kernel._tables for axis in key} if kernels else {E4M3}
    return next((dtype for dtype in (E4M3, E4M3FNUZ) if dtype in found), None)


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` and compare with float64; without return_lse the same bits; the arguments must stay as they were."""
    tensors = problem.tensors(seed, device, fp8_of(op) if problem.fp8 else None)
    before = [None if t is None else t.clone() for t in tensors]
    keywords = problem.keywords(tensors)
    o, lse = op(*tensors[:3], **keywords)
    assert o.is_contiguous() and o.shape == tensors[0].shape and o.dtype == problem.dtype
    assert lse.shape == (o.shape[0], o.shape[2], o.shape[1]) and lse.dtype == torch.float32
    worst = errors(o, lse, tensors, problem, allowed)
    assert max(worst) <= 1, (
        f"{problem}, seed {seed}: errors of o and lse as fractions of what is allowed {worst}"
    )
    for t, was in zip(tensors, before, strict=True):
        assert t is None or torch.equal(_bits(t), _bits(was))
    again = op(*tensors[:3], **{**keywords, "return_lse": False})
    assert torch.equal(again, o), f"{problem}: not the same twice"


def errors(
    o: Tensor, lse: Tensor, tensors: Arguments, problem: Problem, allowed: Mapping[str, float]
) -> tuple[float, float]:
    """The largest errors of o and lse as fractions of what is allowed; NaN and wrong infinities count as infinite.

    O is rounded once, and so is each P before it is multiplied with V: a unit roundoff of the dtype of P |V|, or among
    the subnormals LEAST of |V| for each key, as in ``attention_cases``. Scores are sums in float32, and their error is
    P's relative one.
    """
    q, k, v, *rest = tensors
    q, k, v = (torch.nan_to_num(t.double()) for t in (q, k, v))
    for t, scale in ((k, rest[-2]), (v, rest[-1])):  # the limits are those of a cache of values
        if scale is not None:
            t *= scale.double().reshape(-1, 1)
    rest[-2:] = None, None
    wanted, wanted_lse = FlashDecoding.reference(q, k, v, *rest, *problem.settings())
    size, _ = FlashDecoding.reference(q, k, v.abs(), *rest, *problem.settings())
    mean, log_keys = FlashDecoding.reference(
        torch.zeros_like(q), k, v.abs(), *rest[:2], None, None, None, *problem.settings()
    )
    keys = torch.exp(log_keys.transpose(1, 2))[..., None]
    norms = (t.norm(dim=-1).max().item() if t.numel() else 0.0 for t in (q, k))
    # |q| |k| bounds the sum of a score's terms.
    terms = 1.0 + problem.settings()[0] * next(norms) * next(norms)
    score = allowed["fp32"] * UNIT_ROUNDOFF[torch.float32] * terms
    roundoff = allowed[NAMES[o.dtype]] * UNIT_ROUNDOFF[o.dtype]
    limit = roundoff * (wanted.abs() + size) + 2 * score * size + LEAST[o.dtype] * (1 + mean * keys)
    ratio = (o.double() - wanted).abs() / limit
    finite = torch.isfinite(wanted_lse)
    lse_error = torch.where(finite, (lse.double() - wanted_lse).abs(), 0.0) / (score * (1 + wanted_lse.abs()))
    lse_error = torch.where(finite, lse_error, torch.where(lse.double() == wanted_lse, 0.0, torch.inf))
    worst = (torch.where(torch.isnan(r), torch.inf, r) for r in (ratio, lse_error))
    first, second = (float(r.max()) if r.numel() else 0.0 for r in worst)
    return first, second


def _bits(t: Tensor) -> Tensor:
    """NaN equals itself."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


# Small ones, for the emulator: every dimension's kernel, both dtypes, paged and not, ratios 1, 3, 8 and many rows, one
# split and several, lengths that end anywhere, none among them, every mask.
SMALL = (
    Problem(8, 1, 1, 200, (200, 137, 1, 0), 64),
    Problem(8, 1, 1, 200, (200, 137, 1, 0), 64, FP16, page=16, splits=3),
    Problem(3, 1, 1, 150, (150, 77), 128, FP16, splits=2),
    Problem(6, 2, 3, 128, (101, 2), 128, page=32, sinks=True),
    Problem(2, 2, 1, 70, (70, 33), 256, splits=3),
    Problem(2, 1, 2, 64, (64, 20), 256, FP16, page=16),
    Problem(3, 1, 1, 112, (112,), 96, page=16, splits=2, full=True, scale=0.5),
    Problem(1, 1, 1, 40, (37,), 192, softcap=5.0),
    Problem(3, 3, 2, 90, (90, 60), 48, splits=2, causal=False),
    Problem(8, 1, 4, 150, (150, 130), 64, FP16, splits=2),
    Problem(8, 1, 4, 150, (150, 3), 128, page=64, splits=3, sinks=True),
    Problem(24, 2, 1, 100, (90,), 64, page=16, window=(20, 0)),
    Problem(20, 1, 1, 80, (80,), 160, FP16, splits=2, window=(50, None)),
    Problem(4, 2, 3, 160, (150, 71), 64, page=16, splits=2, window=(37, None)),
    Problem(17, 1, 1, 64, (50,), 128, FP16, splits=2),
    Problem(18, 1, 1, 80, (80, 17), 64, page=16, splits=2),
    Problem(18, 1, 1, 64, (50,), 208, page=16, softcap=20.0),
    Problem(3, 1, 2, 100, (100, 50), 64, splits=2, window=(3, 1), causal=False),
    Problem(6, 2, 1, 50, (50, 31), 33, splits=2),
    Problem(6, 2, 1, 48, (48, 31), 33, FP16, page=16),
    Problem(18, 1, 1, 48, (48, 31), 100, FP16, splits=2),
    Problem(6, 1, 3, 48, (48, 31), 72, page=16, sinks=True),
    Problem(2, 1, 1, 40, (40,), 64, shift=1),
    Problem(8, 1, 3, 100, (1, 2, 0), 64, splits=2, sinks=True),
    Problem(12, 1, 1, 70, (70, 37), 64, splits=2),
    Problem(12, 1, 1, 70, (70,), 128, splits=2),
    Problem(4, 1, 1, 80, (80, 40), 128, page=16, splits=2),
)
# What SMALL leaves of the tables of the AMD packs: other dtypes, and pages, of the same head dims.
MORE_BINARIES = (
    *(Problem(3, 1, 1, 60, (60,), dim, FP16, splits=2) for dim in (64, 256, 33)),
    *(Problem(3, 1, 1, 64, (60,), dim, BF16, page=16, splits=2) for dim in (256, 33)),
    Problem(3, 1, 1, 60, (60,), 128, BF16, splits=2),
    Problem(3, 1, 1, 64, (60,), 128, FP16, page=16, splits=2),
    *(Problem(18, 1, 1, 48, (48,), dim, BF16) for dim in (128, 160, 100)),
    *(Problem(18, 1, 1, 48, (40,), dim, FP16, page=16) for dim in (64, 128, 208, 100)),
)
FP8 = (
    Problem(8, 1, 1, 200, (200, 137, 1, 0), 64, fp8=True, scales="one"),
    Problem(6, 2, 3, 128, (101, 2), 128, FP16, page=32, sinks=True, fp8=True, scales="head"),
    Problem(
        8, 2, 4, 150, (150, 3), 128, page=64, splits=3, softcap=5.0, fp8=True, scales="head", unscaled="v"
    ),
    Problem(3, 1, 1, 60, (60,), 128, splits=2, fp8=True),
    *(Problem(3, 1, 1, 60, (60,), dim, FP16, splits=2, fp8=True, scales="one") for dim in (64, 128, 256, 33)),
    *(Problem(3, 1, 1, 64, (60,), dim, page=16, splits=2, fp8=True) for dim in (64, 128, 256, 33)),
    *(Problem(3, 1, 1, 64, (60,), dim, FP16, page=16, fp8=True) for dim in (64, 256, 33)),
    *(Problem(3, 1, 1, 64, (60,), dim, fp8=True, shift=shift) for dim, shift in ((256, 0), (64, 1))),
    *(
        Problem(18, 1, 1, 48, (48,), dim, dtype, page=page, fp8=True, scales="head", unscaled=unscaled)
        for dim, unscaled in ((64, ""), (128, "k"), (208, ""), (100, "v"))
        for dtype in (BF16, FP16)
        for page in (0, 16)
    ),
)
EMPTY = (
    Problem(2, 1, 1, 8, (), 64),
    Problem(2, 1, 0, 8, (8,), 64),
    Problem(2, 1, 1, 0, (0, 0), 64),
    Problem(2, 1, 1, 0, (0,), 64, page=16, sinks=True),
)


class Recorder:
    """A driver that launches nothing and keeps what it was asked."""

    def __init__(self, op: str, pack: Pack) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def load(self, variant: Variant) -> Any:
        recorder = self

        class Kernel:
            def launch(self, *arguments: Any) -> None:
                recorder.launches.append((variant, *arguments))

        return Kernel()

    def stream(self, device: int) -> int:
        return 7


def recorded(arch: str) -> tuple[FlashDecoding, Recorder]:
    """The op with the tables of ``arch``, and what it launches."""
    made: list[Recorder] = []

    def driver(op: str, pack: Pack) -> Recorder:
        made.append(Recorder(op, pack))
        return made[-1]

    return bound_op(FlashDecoding, tables_of(arch), driver), made[0]
