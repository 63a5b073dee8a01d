"""Decoding's launch numbers, measured: `python -m benchmarks.decoding.decoding_candidates`.

    python -m benchmarks.decoding.decoding_candidates build --folder DIR --kernel flash_decoding_split
    python -m benchmarks.decoding.decoding_candidates measure --folder DIR

``build`` needs no GPU: it makes a pack for each candidate of arch_profiles/candidates, with its row in the profile.
``measure`` times each pack's op at the points of its kernel, beside a copy of as many bytes, and names for each problem
the candidate whose least fraction of the copy is greatest. A row has to be good for a few sequences and for many: how
many programs share the keys follows from its numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.ceiling import copy_calls
from benchmarks.decoding import decoding
from benchmarks.decoding.decoding import Point
from benchmarks.providers import COPY
from benchmarks.workload import TOLERANCE, rotated_sets
from build_tools.build import Tree, build_packs, make_plans
from build_tools.compile import try_variants
from build_tools.errors import BuildError
from build_tools.paths import PROFILES
from build_tools.rows_text import Winner, write_rows
from build_tools.tune import read_problems

OP = "flash_decoding"
KINDS = ("split", "split_paged", "wide", "wide_paged", "stream", "once", "once_paged", "combine")
Sizes = tuple[tuple[int, int], ...]  # batch, cached keys
SIZES: Sizes = ((1, 32768), (8, 32768), (24, 16384), (128, 8192))
STREAM_SIZES: Sizes = (
    (20, 16384),
    (32, 8192),
    (32, 32768),
    (128, 8192),
)  # what is streamed: many long sequences


def read_sizes(text: str) -> Sizes:
    """What the command is given: "1x8192,8x32768"."""
    sizes = tuple(tuple(int(n) if n.isdigit() else 0 for n in size.split("x")) for size in text.split(","))
    if not all(len(size) == 2 and all(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch x keys, such as 1x8192,8x32768")
    return tuple((batch, cached) for batch, cached in sizes)


def points(kernel: str, dim: int, sizes: Sizes = SIZES) -> list[Point]:
    """What a kernel is measured at: 8 heads of keys, 8 rows of queries each, 32 of the wide kernels."""
    if kernel.endswith("_stream") and sizes == SIZES:
        sizes = STREAM_SIZES
    page, tokens = 64 if kernel.endswith("_paged") else 0, 4 if "_wide" in kernel else 1
    found = [Point(*size, page=page, dim=dim, tokens=tokens) for size in sizes]
    return [*found, replace(found[1], page=16)] if page and len(found) > 1 else found


def build(options: argparse.Namespace) -> int:
    """Packs as DIR/<number>/<arch>, and DIR/candidates.json."""
    entries: list[dict[str, Any]] = []
    trees: list[Tree] = []
    for kernel in options.kernel.split(","):
        for problem in read_problems(PROFILES / "candidates" / f"{options.arch}-{kernel}.toml"):
            if options.dims and not {*problem.sizes} & {*options.dims}:
                continue
            for candidate in problem.candidates:
                folder = options.folder / str(len(trees))
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(PROFILES / f"{options.arch}.toml", folder)
                row = Winner(problem.max_n, problem.dtypes, candidate, "candidate")
                write_rows(folder / f"{options.arch}.toml", kernel, [row], "a candidate")
                trees.append(Tree(profiles=folder, packs=folder))
                entries.append(
                    {"kernel": kernel, "max_n": problem.max_n, "n": problem.sizes, "row": candidate}
                )
    _compile_all(options.arch, trees)
    for entry, tree in zip(entries, trees, strict=True):
        if refused := _refused(options.arch, tree):
            entry["refused"] = refused
    (options.folder / "candidates.json").write_text(json.dumps(entries, indent=1) + "\n")
    left_out = sum("refused" in entry for entry in entries)
    print(f"{len(entries)} candidates in {options.folder}, {left_out} refused")
    return 0


def _refused(arch: str, tree: Tree) -> str | None:
    """Why a candidate has no pack, or None: it has one now."""
    try:
        build_packs((arch,), (OP,), tree, progress=False)
    except BuildError as problem:
        return str(problem)[-300:]
    return None


def _compile_all(arch: str, trees: Sequence[Tree]) -> None:
    """All at once into the cache: one candidate's few binaries don't fill the cores."""
    planned = [make_plans(arch, (OP,), tree) for tree in trees]
    variants = {v.name: v for _, plans in planned for p in plans for v in p.variants}
    for _ in try_variants(list(variants.values()), planned[0][0]):
        pass


def bound(folder: Path, device: torch.device) -> decoding.Run:
    """The op of a candidate's pack."""
    from liger_aot.ops.decoding.flash_decoding import FlashDecoding
    from liger_aot.runtime.devices import gpu
    from liger_aot.runtime.dispatch import GPUDriver, OpOn, Runtimes
    from liger_aot.runtime.manifest import Pack

    here = gpu(device.index)
    on = OpOn(Pack(folder).op(OP), GPUDriver(here.shared_per_block), device.index, here.multiprocessors)
    op = FlashDecoding({OP: Runtimes(OP, {device.index: on})})
    return lambda i: op(i.q, i.k, i.v, cache_seqlens=i.lengths, block_table=i.table)


def measure_point(
    point: Point, runs: dict[int, decoding.Run], rounds: int, device: torch.device
) -> dict[int, Any]:
    """Of each candidate, by number: its fraction of the copy's bandwidth, or why it has none."""
    count = rotated_sets(point.bytes, torch.cuda.get_device_properties(device).L2_cache_size)
    sets = [decoding.drawn(point, device, seed) for seed in range(count)]
    calls: dict[Any, list[measure.Call]] = {COPY: copy_calls(point.bytes, device, count, 0)}
    found: dict[int, Any] = {}
    for number, run in runs.items():
        refused = _wrong(point, run, sets[0])
        if refused:
            found[number] = refused
        else:
            calls[number] = [decoding.call_of(run, inputs) for inputs in sets]
    times = measure.time_interleaved(calls, rounds=rounds, min_ms=2.0)
    medians = {name: measure.summarize(samples).median_ms for name, samples in times.items()}
    copy = medians.pop(COPY)
    return found | {number: copy / median for number, median in medians.items()}


def _wrong(point: Point, run: decoding.Run, inputs: decoding.Inputs) -> str | None:
    """Why a candidate is not timed, or None; a launch that the GPU refuses is a result, too."""
    try:
        off = decoding.error(point, inputs, run(inputs))
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None if off < TOLERANCE[torch.bfloat16] else f"error {off:.1e}"


def measure_all(options: argparse.Namespace) -> int:
    device = torch.device("cuda", 0)
    entries = json.loads((options.folder / "candidates.json").read_text())
    groups: dict[tuple[str, int], list[int]] = {}
    for number, entry in enumerate(entries):
        if "refused" not in entry:
            entry["of_copy"] = {}
            for n in entry["n"]:
                groups.setdefault((entry["kernel"], n), []).append(number)
    for (kernel, n), numbers in groups.items():
        runs = {i: bound(options.folder / str(i) / options.arch, device) for i in numbers}
        for point in points(kernel, n, options.sizes):
            for i, result in measure_point(point, runs, options.rounds, device).items():
                if isinstance(result, str):
                    entries[i]["refused"] = result
                    runs.pop(i)
                else:
                    entries[i]["of_copy"][f"{n}: {point.batch} x {point.cached}, page {point.page}"] = result
            torch.cuda.empty_cache()
        for i in numbers:
            one = entries[i]
            print(kernel, n, one["row"], one.get("refused") or list(one["of_copy"].values()), flush=True)
        options.report.write_text(json.dumps(entries, indent=1) + "\n")
    for (kernel, max_n), one in best(entries).items():
        print(f"best {kernel} n <= {max_n or 'any'}: {one['row']}: {one['of_copy']}", flush=True)
    return 0


def least(entry: dict[str, Any]) -> float:
    """The least fraction over all sizes and points; 0 where the candidate did not run."""
    return 0.0 if "refused" in entry or not entry.get("of_copy") else min(entry["of_copy"].values())


def best(entries: Sequence[dict[str, Any]]) -> dict[tuple[str, int | None], dict[str, Any]]:
    """For each kernel and bound the candidate whose least fraction is greatest."""
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for entry in entries:
        key = (entry["kernel"], entry["max_n"])
        if least(entry) > (least(found[key]) if key in found else 0.0):
            found[key] = entry
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.decoding.decoding_candidates", description=__doc__)
    parser.add_argument("step", choices=("build", "measure"))
    parser.add_argument("--folder", type=Path, required=True, help="of the candidates' packs")
    parser.add_argument("--arch", default="sm90")
    kernels = ",".join(f"{OP}_{kind}" for kind in KINDS)
    parser.add_argument("--kernel", default=kernels, help="(default: %(default)s)")
    parser.add_argument("--sizes", type=read_sizes, default=SIZES, help="measure: as 1x8192,8x32768")
    parser.add_argument("--dims", type=int, nargs="*", help="build: head dimensions (default: all)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("decoding_candidates.json"))
    options = parser.parse_args(arguments)
    return build(options) if options.step == "build" else measure_all(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
