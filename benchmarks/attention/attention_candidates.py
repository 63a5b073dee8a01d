"""Attention's rows by warp groups, measured: `python -m benchmarks.attention.attention_candidates`.

    python -m benchmarks.attention.attention_candidates build --folder DIR
    python -m benchmarks.attention.attention_candidates measure --folder DIR
    python -m benchmarks.attention.attention_candidates tables

``build`` needs no GPU: packs with the candidates of arch_profiles/candidates, DIR/<direction>/<number>, a candidate of
each head dimension in a pack. Directions are the backward, that of sliding windows (local) and of soft caps (capped),
the packed forward with a bound, without one and of short sequences (varlen, varlen_full, varlen_short) and backward
(varlen_backward) and the forward, whose number 0 is the profile as it is.
``measure`` first checks every kernel but the forward's against float64 and against the tiles (``attention_trial``), in
processes that are killed when a case takes too long: a kernel may wait forever. Then it times what passed (the backward
with dQ in order, too), beside the tiles and cuDNN (windows beside FlashAttention-2, soft caps beside the tiles alone,
the packed forms beside the dense ones), and the forward with 2 and 3 warp groups. It writes results-<directions>.json
and, as tables to add to the profile, the winners of those that the profile may lack: winners.toml. ``tables`` prints
such tables of rows that nothing was measured of.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.attention import attention_trial as trial
from build_tools.audit import audit
from build_tools.build import Tree, build_packs, make_plans
from build_tools.compile import try_variants
from build_tools.errors import AuditError, BuildError
from build_tools.paths import PROFILES
from build_tools.rows_text import tomllib
from build_tools.tune import Problem, read_problems

FORWARD, BACKWARD = "flash_attention_forward", "flash_attention_backward"
DENSE_BACKWARD = ("backward", "local", "capped")
KERNELS = {
    "forward": FORWARD, **dict.fromkeys(DENSE_BACKWARD, f"{BACKWARD}_groups"),
    **dict.fromkeys(("varlen", "varlen_full", "varlen_short"), "flash_attention_varlen_forward_groups"),
    "varlen_backward": "flash_attention_varlen_backward_groups",
}  # fmt: skip
PACKED = ("varlen", "varlen_full", "varlen_short", "varlen_backward")
# directions of kernels that a profile may lack, one a head dimension
NEW = (*DENSE_BACKWARD, *PACKED)
# What a direction's kernels need beside them. A profile that has rows for windows or soft caps has what they need.
BESIDE = {
    "backward": (f"{BACKWARD}_finish",),
    "varlen_backward": ("flash_attention_varlen_backward_rows", "flash_attention_varlen_backward_finish"),
}
OPS = {
    "forward": ("flash_attention",),
    **dict.fromkeys(DENSE_BACKWARD, ("flash_attention_backward",)),
    **dict.fromkeys(PACKED[:3], ("flash_attention_varlen", "flash_attention")),
    "varlen_backward": (
        "flash_attention_varlen_backward", "flash_attention_backward", "flash_attention_varlen", "flash_attention",
    ),
}  # fmt: skip
DIMS = (64, 96, 128, 192, 256)
KINDS = {"full": "", "causal": "_causal"}
WINDOWS = {"window 1024": 1024, "window 4096": 4096}  # keys before a row's own, of causal calls
# Of a direction whose kernels are not those of KINDS: how they end, and the calls that run them.
ENDINGS = {
    "local": "_local", "capped": "_capped", "varlen": "", "varlen_full": "_full", "varlen_short": "_short",
    "varlen_backward": "",
}  # fmt: skip
CALLS = {
    "local": (*WINDOWS,), "capped": ("causal", *WINDOWS), "varlen": ("causal",), "varlen_full": ("full",),
    "varlen_short": ("causal",), "varlen_backward": (*KINDS,),
}  # fmt: skip
SOFTCAP = 50.0  # Gemma 2's
# dQ in any order, and in a fixed one: kernels of their own
ORDER = dict.fromkeys(("backward", "local", "capped"), ("", "_ordered"))
MEASURED = (2048, 8192, 16384)  # lengths that a winner is chosen by; shorter ones are in the table
FIRST_ROWS = {
    "backward": "the settings of a prototype",
    "local": "rows of the causal kernels",
    "capped": "rows of the causal kernels",
    **dict.fromkeys(PACKED[:2], "the rows of flash_attention_forward"),
    "varlen_short": "the rows of flash_attention_forward_short",
    "varlen_backward": "the rows of the dense causal form",
}
Chosen = dict[str, list[tuple[Problem, Mapping[str, Any]]]]  # kernel -> the candidates that are its rows


def candidates(arch: str, direction: str, dims: Iterable[int] = DIMS) -> list[Chosen]:
    """What each pack holds: of every problem with one of ``dims`` the candidate of the pack's number, for the full and
    the causal kernel, where they are two."""
    name = KERNELS[direction]
    ending = ENDINGS.get(direction, "")
    found = read_problems(PROFILES / "candidates" / f"{arch}-{name}{ending}.toml")
    problems = [problem for problem in found if problem.sizes[0] in dims]
    packs: list[Chosen] = [{}] if direction == "forward" else []
    for number in range(max((len(p.candidates) for p in problems), default=0)):
        chosen: Chosen = {}
        for problem in problems:
            if number < len(problem.candidates):
                kinds = [ending] if direction in ENDINGS else KINDS.values()
                for kind, order in product(kinds, ORDER.get(direction, ("",))):
                    dim = "" if direction == "forward" else f"_{problem.sizes[0]}"
                    kernel = f"{name}{dim}{kind}{order}"
                    chosen.setdefault(kernel, []).append((problem, problem.candidates[number]))
        packs.append(chosen)
    return packs


def tables(arch: str, chosen: Chosen, provenance: str) -> str:
    """Kernels of new directions as tables of a profile, with what they need beside them."""
    found = {kernel: [row] for kernel, ((_, row),) in chosen.items()}
    whole = [
        k for k in chosen if not k.removesuffix("_ordered").endswith((ENDINGS["local"], ENDINGS["capped"]))
    ]
    for direction, kernels in BESIDE.items():
        if any(kernel.startswith(KERNELS[direction]) for kernel in whole):
            for kernel in kernels:
                problems = read_problems(PROFILES / "candidates" / f"{arch}-{kernel}.toml")
                found[kernel] = [_bounded(p.max_n, p.candidates[0]) for p in problems]
    return "".join(_table(kernel, provenance, rows) for kernel, rows in found.items())


def _bounded(max_n: int | None, row: Mapping[str, Any]) -> dict[str, Any]:
    return dict(row) if max_n is None else {"max_n": max_n, **row}


def _table(kernel: str, provenance: str, rows: Iterable[Mapping[str, Any]]) -> str:
    lines = "".join(
        f"  {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in row.items())} }},\n"
        for row in rows
    )
    return f"\n[kernel.{kernel}]\nprovenance = {json.dumps(provenance)}\nrows = [\n{lines}]\n"


def build(options: argparse.Namespace) -> int:
    entries = []
    for direction in options.direction.split(","):
        for number, chosen in enumerate(candidates(options.arch, direction, options.dims)):
            folder = options.folder / direction / str(number)
            refused = _build_pack(options.arch, direction, folder, chosen)
            for kernel, rows in chosen.items():
                for problem, row in rows:
                    why = refused.get(kernel)
                    entries.append(
                        {
                            "direction": direction,
                            "pack": number,
                            "kernel": kernel,
                            "dim": problem.sizes[0],
                            "row": row,
                            "refused": why,
                        }
                    )
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "candidates.json").write_text(json.dumps(entries, indent=1) + "\n")
    for entry in entries:
        print(entry["direction"], entry["pack"], entry["kernel"], entry["dim"], entry["refused"] or "built")
    return 0


def _build_pack(arch: str, direction: str, folder: Path, chosen: Chosen) -> dict[str, str]:
    """Build a pack of ``chosen``; of the kernels that it lacks, because a binary did not pass, why."""
    _write_profile(arch, direction, folder, chosen)
    tree = Tree(profiles=folder, packs=folder)
    profile, plans = make_plans(arch, OPS[direction], tree)
    variants = {v.name: v for p in plans for v in p.variants if v.kernel in chosen}
    refused: dict[str, str] = {}
    for name, made in try_variants(list(variants.values()), profile, progress=False):
        try:
            why = made if isinstance(made, str) else None
            if not isinstance(made, str):
                audit(variants[name], made, profile.arch)
        except AuditError as error:
            why = str(error)
        if why is not None:
            refused[variants[name].kernel] = why[-300:]
    if refused:
        _write_profile(arch, direction, folder, {k: rows for k, rows in chosen.items() if k not in refused})
    build_packs((arch,), OPS[direction], tree, progress=False)
    return refused


def _write_profile(arch: str, direction: str, folder: Path, chosen: Chosen) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arch}.toml"
    shutil.copy(PROFILES / path.name, path)
    if direction in NEW:
        text = without(path.read_text(), direction)  # winners of another time
        path.write_text(text + (tables(arch, chosen, "a candidate") if chosen else ""))
        return
    for kernel, rows in chosen.items():
        text = path.read_text()
        instead = {problem.max_n: {"max_n": problem.max_n, **row} for problem, row in rows}
        kept = [instead.get(row.get("max_n"), row) for row in tomllib.loads(text)["kernel"][kernel]["rows"]]
        present = [{key: value for key, value in row.items() if value is not None} for row in kept]
        section = re.compile(rf"^\[kernel\.{kernel}\]\n.*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
        table = _table(kernel, "candidates", present).lstrip() + "\n"
        path.write_text(section.sub(lambda _: table, text))  # noqa: B023


def without(profile: str, direction: str) -> str:
    """A profile's text without the tables of a new direction; where there is an ending, the others stay."""
    if ending := ENDINGS.get(direction):
        orders = "|".join(ORDER.get(direction, ("",)))
        table = rf"\n\[kernel\.{KERNELS[direction]}_\d+{ending}({orders})\]\n[^\[]*rows = \[[^\]]*\]\n"
        return re.sub(table, "", profile)
    return profile.partition(f"\n[kernel.{KERNELS[direction]}")[0]


# ---- On the GPU ----


def measure(options: argparse.Namespace) -> int:
    entries = json.loads((options.folder / "candidates.json").read_text())
    out = options.out or options.folder
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"about": trial.about(), "candidates": entries}

    def save() -> None:
        name = f"results-{options.direction.replace(',', '-')}.json"
        (out / name).write_text(json.dumps(found, indent=1) + "\n")

    mine = [e for e in entries if e["direction"] in options.direction.split(",")]
    found["checks"] = check(options, mine)
    save()
    for direction in options.direction.split(","):
        found[direction] = time(options, direction, mine)
        save()
    if lines := [line for direction in NEW for line in found.get(direction, ())]:
        chosen, reached = winners(mine, lines)
        gpu, triton, date = (found["about"][key] for key in ("gpu", "triton", "date"))
        lengths = ", ".join(map(str, MEASURED))
        provenance = (
            f"measured on one {gpu}, triton {triton}, {date}: bf16, how many times as fast as "
            f"the tiles, geometric mean over lengths {lengths}: {reached}"
        )
        (out / "winners.toml").write_text(tables(options.arch, chosen, provenance) if chosen else "")
        print(f"winners: {reached or 'none: the tiles stay'}")
    return 0


def check(options: argparse.Namespace, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case of every kernel of a new direction; a kernel that fails one is refused."""
    lines = []
    for direction, pack in sorted({(e["direction"], e["pack"]) for e in entries if e["direction"] in NEW}):
        own = [e for e in entries if (e["direction"], e["pack"]) == (direction, pack)]
        kernels = [e["kernel"] for e in own if not e["refused"]]
        folder = options.folder / direction / str(pack) / options.arch
        wrong: dict[str, str] = {}
        for line in trial.run_checks(folder, kernels, options.limit):
            lines.append({"pack": pack, **line})
            if line["wrong"]:
                wrong.setdefault(line["kernel"], f"{line['case']}: {line['wrong']}")
                print(f"pack {pack} {line['kernel']} {line['case']}: {line['wrong']}", flush=True)
        for entry in own:
            entry["refused"] = entry["refused"] or wrong.get(entry["kernel"])
            print(f"pack {pack} {entry['kernel']}: {entry['refused'] or 'right'}", flush=True)
    return lines


def time(
    options: argparse.Namespace, direction: str, entries: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """TFLOP/s by provider at each point; a candidate's name is its pack's number."""
    jobs = []
    for dim in options.dims:
        for kind in CALLS.get(direction, KINDS):
            mine = [
                e for e in entries
                if e["direction"] == direction and e["dim"] == dim and not e["refused"]
                and kind in kinds_of(e)
            ]  # fmt: skip
            packs = [e["pack"] for e in mine if not in_order(e)]
            ordered = [e["pack"] for e in mine if in_order(e)]
            if direction == "forward":
                packs = [0, *packs]
            if not packs and not ordered:
                continue
            jobs += [
                {
                    "dim": dim,
                    "causal": kind != "full",
                    "window": WINDOWS.get(kind),
                    "softcap": SOFTCAP if direction == "capped" else 0.0,
                    "length": length,
                    "packs": packs,
                    "ordered": ordered,
                }
                for length in map(int, options.lengths.split(","))
                if length > WINDOWS.get(kind, 0)
            ]
    lines = []
    for line in trial.run_times(options.folder / direction, options.arch, direction, jobs, options.limit):
        lines.append({"direction": direction, **line})
        shown = ", ".join(f"{name} {value:.0f}" for name, value in line.get("tflops", {}).items())
        where = f"{direction} {line['dim']} {kind_of(line)} {line['length']}"
        print(f"{where}: {shown or line['wrong']}", flush=True)
    return lines


def kind_of(line: Mapping[str, Any]) -> str:
    """What was timed."""
    window = line.get("window")
    return f"window {window}" if window else "causal" if line["causal"] else "full"


def kinds_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Calls that run a candidate's kernel."""
    if entry["direction"] in CALLS:
        return CALLS[entry["direction"]]
    return ("causal",) if "_causal" in entry["kernel"] else ("full",)


def in_order(entry: Mapping[str, Any]) -> bool:
    """Whether a candidate's kernel is a deterministic call's."""
    return str(entry["kernel"]).endswith("_ordered")


def timed_as(entry: Mapping[str, Any]) -> str:
    """What a candidate's kernel is called among the times."""
    return f"{entry['pack']} ordered" if in_order(entry) else str(entry["pack"])


def winners(
    entries: Iterable[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> tuple[Chosen, dict[str, float]]:
    """Of each kernel the candidate that is most times as fast as the tiles, where one is faster, and by how much."""
    chosen: Chosen = {}
    reached: dict[str, float] = {}
    for entry in entries:
        if entry["direction"] not in NEW or entry["refused"]:
            continue
        ratios = [
            line["tflops"][timed_as(entry)] / line["tflops"]["tiles"]
            for line in lines
            if (line["direction"], line["dim"]) == (entry["direction"], entry["dim"])
            and kind_of(line) in kinds_of(entry) and line["length"] in MEASURED
            and timed_as(entry) in line.get("tflops", {})
        ]  # fmt: skip
        mean = math.prod(ratios) ** (1 / len(ratios)) if ratios else 0.0
        if mean > max(1.0, reached.get(entry["kernel"], 0.0)):
            problem = Problem(None, (entry["dim"],), ("bf16", "fp16"), ())
            chosen[entry["kernel"]] = [(problem, entry["row"])]
            reached[entry["kernel"]] = round(mean, 3)
    return chosen, reached


def print_tables(options: argparse.Namespace) -> int:
    for direction in NEW:
        if direction in options.direction.split(","):
            chosen = candidates(options.arch, direction, options.dims)[0]
            print(tables(options.arch, chosen, f"derived, not measured: {FIRST_ROWS[direction]}"), end="")
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.attention.attention_candidates")
    parser.add_argument("step", choices=("build", "measure", "tables"))
    parser.add_argument("--folder", type=Path, default=Path("build/attention_candidates"))
    parser.add_argument("--out", type=Path, help="where measure writes (default: --folder)")
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--direction", default="backward,forward", help="(default: %(default)s)")
    parser.add_argument(
        "--dims",
        default=DIMS,
        type=lambda text: tuple(map(int, text.split(","))),
        help="head dimensions, such as 64,128 (default: all)",
    )
    parser.add_argument("--lengths", default="512,2048,8192,16384")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds a case (default: %(default)s)")
    options = parser.parse_args(arguments)
    steps = {"build": build, "measure": measure, "tables": print_tables}
    try:
        return steps[options.step](options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
