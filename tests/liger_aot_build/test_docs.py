"""The generated pages: up to date, complete, and saying no more than the plans and docs/executed.toml hold."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import liger_aot
from benchmarks import op_entry, performance, records
from benchmarks.environment import ROOT
from benchmarks.markdown import gpus
from benchmarks.records import Run
from docs.generate import __main__ as generate
from docs.generate import chart, docstring, facts, op_page, same_code, support, wheels
from liger_aot.ops.op import Op
from liger_aot_build.compiler import start_worker
from liger_aot_build.device_wheel import write_device_wheel
from tests.benchmarks.test_benchmarks import ENVIRONMENT, sample_run
from tests.harness.planned_packs import planned_pack

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
# Written by hand, but for the tables of figures.
PAGES = (
    "README.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/migration.md", "docs/pack-format.md",
    "docs/performance.md", "docs/triton-pack-format.md", "docs/triton-packs.md", "docs/tuning-your-chip.md",
    "examples/triton_pack/README.md",
)  # fmt: skip
COMMAND = re.compile(r"python -m ((?:benchmarks|examples|liger_aot_build|tests)[\w.]*)((?: [a-z]\w+)*)")
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return generate.made()


def test_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    assert not generate.stale(pages), "`make docs` writes these anew"
    assert pages == generate.made()


def test_a_page_of_an_op_that_is_no_more_is_stale(
    pages: dict[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_page, "FOLDER", tmp_path)
    (tmp_path / "gone.md").write_text("")
    missing = {tmp_path / "new.md": ""}
    assert generate.stale(pages | missing) == [tmp_path / "gone.md", tmp_path / "new.md"]


def test_every_op_has_a_page_in_the_index_and_a_row_in_the_matrix(pages: dict[Path, str]) -> None:
    for op in liger_aot.ops():
        assert op_page.FOLDER / f"{op}.md" in pages
        assert (
            f"[{op}](ops/{op}.md)" in pages[generate.INDEX] and f"[{op}](ops/{op}.md)" in pages[support.PAGE]
        )
    assert set(facts.ops()) == set(liger_aot.ops())


def test_links_lead_somewhere(pages: dict[Path, str]) -> None:
    texts = {path: text for path, text in pages.items() if path.suffix == ".md"}
    texts |= {ROOT / name: (ROOT / name).read_text() for name in PAGES}
    for path, text in texts.items():
        for link in LINK.findall(CODE.sub("", text)):
            assert "://" in link or (path.parent / link).exists(), f"{path.name}: {link}"


def test_commands_name_what_there_is(pages: dict[Path, str]) -> None:
    """Modules that Python finds, and ops that ``python -m benchmarks`` measures."""
    texts = {str(path): text for path, text in pages.items() if path.suffix == ".md"}
    texts |= {name: (ROOT / name).read_text() for name in PAGES}
    found = {(page, *command) for page, text in texts.items() for command in COMMAND.findall(text)}
    assert len(found) > 20
    known = {"plot", "summary", "performance", *op_entry.modules()}
    for page, module, words in found:
        assert importlib.util.find_spec(module), f"{page}: there is no module {module}"
        if module == "benchmarks" and (unknown := set(words.split()) - known):
            pytest.fail(f"{page}: python -m benchmarks measures no {', '.join(unknown)}")


def test_the_matrix_has_what_the_plans_have() -> None:
    executed = support.read()
    assert set(executed.ops) == set(facts.ops())
    header, *rows = [line for line in support.page(executed).splitlines() if line.startswith("|")]
    assert header == f"| op | {' | '.join(facts.ARCHS)} |"
    states = {run.arch: run.state for run in executed.ops["cross_entropy"]}
    cells = next(row for row in rows if "cross_entropy.md" in row).split(" | ")[1:]
    for arch, cell in zip(facts.ARCHS, cells, strict=True):
        assert cell.startswith(states.get(arch, support.AUDITED))


RUN = '[runs.a]\narch = "{arch}"\nstate = "{state}"\nwhat = ""\ndate = ""\n[ops]\n'


@pytest.mark.parametrize(
    ("arch", "state", "rope", "message"),
    [
        ("sm99", support.AUDITED, 'rope = ["a"]', "no architecture 'sm99'"),
        ("sm90", "believed to run", 'rope = ["a"]', "state 'believed to run' is none of"),
        ("sm90", support.AUDITED, 'rope = ["b"]', "rope: there is no run 'b'"),
        ("sm90", support.AUDITED, 'rope = ["a", "a"]', "rope: two runs of one architecture"),
        (
            "sm90",
            support.AUDITED,
            'rope = ["a"]\nhoop = ["a"]',
            "hoop: ran on sm90, which has no binaries of it",
        ),
    ],
)
def test_what_was_executed_is_checked(tmp_path: Path, arch: str, state: str, rope: str, message: str) -> None:
    path = tmp_path / "executed.toml"
    path.write_text(RUN.format(arch=arch, state=state) + rope)
    with pytest.raises(ValueError, match=message):
        support.read(path)


def test_an_op_that_ran_nowhere_is_compiled_and_audited(tmp_path: Path) -> None:
    path = tmp_path / "executed.toml"
    path.write_text(RUN.format(arch="sm90", state=support.AUDITED) + 'rope = ["a"]')
    row = next(line for line in support.page(support.read(path)).splitlines() if "softmax.md" in line)
    assert row.count(support.AUDITED) == len(facts.ARCHS)


TTGIR = """\
#a = #ttg.blocked<{order = [0]}>
#b = #ttg.slice<{dim = 0, parent = #a}>
module attributes {ttg.target = "cuda:90", "ttg.num-warps" = 4 : i32} {
  tt.func @f(%X: !tt.ptr<f32> loc("X"(#loc))) {
    %c = arith.constant dense<1.0> : tensor<8xf32, #b> loc(#loc)
    %d = arith.constant dense<2.0> : tensor<8xf32, #a> loc(#loc)
    %y = arith.addf %x, %c : tensor<8xf32, #b> loc(#loc)
    %z = arith.mulf %y, %d : tensor<8xf32, #a> loc(#loc)
"""


def test_code_is_compared_but_for_names() -> None:
    """The same with other names, constants in another order, another machine; not with another constant or layout."""
    lines = TTGIR.splitlines()
    other = "\n".join((*lines[:4], lines[5], lines[4], *lines[6:])).replace("cuda:90", "cuda:100")
    for old, new in (("%y", "%0"), ("%c", "%c-1_i32"), ("#b", "#blocked1"), ("#a", "#blocked")):
        other = other.replace(old, new)
    assert other != TTGIR and same_code.without_names(other) == same_code.without_names(TTGIR)
    for old, new in (("%y, %d", "%d, %y"), ("dense<2.0>", "dense<3.0>"), ("order = [0]", "order = [1]")):
        assert same_code.without_names(TTGIR.replace(old, new)) != same_code.without_names(TTGIR), old
    assert same_code.without_machine(".version 8.7\n.target sm_120\nret;") == same_code.without_machine(
        ".version 8.4\n.target sm_89\nret;"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "other", "stage", "op", "wanted"),
    [
        ("sm89", "sm80", "ptx", "rmsnorm", True),
        ("sm100", "sm90", "ptx", "softmax", False),
        ("sm100", "sm90", "ttgir", "softmax", True),
    ],
)
def test_code_of_two_architectures(arch: str, other: str, stage: str, op: str, wanted: bool) -> None:
    """In a process of its own, as the workers are."""
    jobs = next((job, like) for of, job, like in same_code.pairs(arch, other) if of == op and like)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(1, get_context("spawn"), start_worker, (scratch,)) as pool,
    ):
        assert pool.submit(same_code.equal, stage, *jobs).result() == wanted


def test_counts_of_equal_code_are_of_the_plans() -> None:
    for name, ops in same_code.read().items():
        assert tuple(name.split()) in same_code.PAIRS
        assert all(same <= binaries for binaries, same in ops.values())


def test_wheels_are_measured(tmp_path: Path) -> None:
    """Those that are there anew; what is known of others stays."""
    path = tmp_path / "wheels.json"
    path.write_text(wheels.text({"sm80": {"bytes": 1, "binaries": 2}, "sm90": {"bytes": 3, "binaries": 4}}))
    wheel = write_device_wheel(planned_pack("sm90", False).folder, tmp_path)
    assert wheels.main([str(tmp_path), str(path)]) == 0
    binaries = sum(facts.binaries(op, "sm90") for op in facts.ops())
    assert wheels.read(path) == {
        "sm80": {"bytes": 1, "binaries": 2},
        "sm90": {"bytes": wheel.stat().st_size, "binaries": binaries},
    }


def test_whether_numbers_are_measured_is_the_profile_s_to_say() -> None:
    profile = facts.planned("sm90").profile
    assert facts.numbers(profile, "column_sums") == "measured"
    assert facts.numbers(profile, "flash_decoding_combine") == "derived"
    told = re.fullmatch(r"(\d+) of (\d+) rows measured", facts.numbers(profile, "rmsnorm_forward"))
    assert told is not None and int(told[1]) < int(told[2]) == len(profile.tables["rmsnorm_forward"].rows)
    assert facts.numbers(facts.planned("gfx942").profile, "rmsnorm_forward") == "derived"


class Told(Op):
    """``told(x, *, y=1) -> Tensor``: twice ``x``: 2*x.

    Differentiable in x and nothing else; the rest is
    another line.

    Args:
        x: (n,), of
            any dtype.
        y: all else.

    Returns:
        the result.

    Raises:
        ArgumentError: never.

    Source:
        Arithmetic.
    """

    name = "told"


def test_a_docstring_is_read() -> None:
    told = docstring.read(Told)
    assert told.first == r"twice `x`." and told.summary.startswith(r"twice `x`: 2\*x.")
    assert told.differentiable == "x and nothing else"
    assert told.arguments == (("x", "(n,), of any dtype."), ("y", "all else."))
    assert (told.returns, told.errors, told.source) == (
        "the result.", (("ArgumentError", "never."),), "Arithmetic.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("``told(x, *, y=1) -> Tensor``: ", "must begin with ``told"),
        ("    Source:\n        Arithmetic.\n", "no section Source"),
        ("    Raises:\n        ArgumentError: never.\n", "no section Raises"),
        ("y: ", "'all else.' does not begin with names"),
    ],
)
def test_what_a_docstring_lacks_is_named(removed: str, message: str) -> None:
    lacking = type("Lacking", (Told,), {"__doc__": (Told.__doc__ or "").replace(removed, "")})
    with pytest.raises(ValueError, match=message):
        docstring.read(lacking)


@pytest.mark.parametrize("op", liger_aot.ops())
def test_every_argument_is_documented(op: str) -> None:
    kind = type(liger_aot.load(op))
    named = {name for names, _ in docstring.read(kind).arguments for name in names.split(", ")}
    assert named == set(inspect.signature(kind.__call__).parameters) - {"self"}


def test_a_chart_shows_every_point_and_failure() -> None:
    drawn = chart.svg(sample_run())
    assert drawn.count("<circle") == 2 * 3 * 2 + 3  # ours and torch, three points, two directions; the legend
    assert drawn.count("m0 -8") == 1  # Liger's failure
    assert 'stroke-width="2.5"' in drawn and "131072" in drawn


# The migration page ----------------------------------------------------------------------------------------

MIGRATION = (ROOT / "docs" / "migration.md").read_text()
ROWS = re.findall(r"^\| `(F\..*)` \| `(load\(.*)` \|$", MIGRATION, re.MULTILINE)


@pytest.mark.parametrize(("torchs", "ours"), ROWS, ids=[ours.split('"')[1] for _, ours in ROWS])
def test_what_is_said_of_torch_is_so(torchs: str, ours: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, y, table, head = (torch.randn(rows, 8, generator=g) for rows in (6, 6, 8, 5))
    q, k, v = (torch.randn(2, 3, 7, 16, generator=g).bfloat16() for _ in range(3))
    names = {
        "F": torch.nn.functional, "load": liger_aot.load, "n": 8, "x": x, "y": y, "table": table, "head": head,
        "weight": torch.randn(8, generator=g), "bias": torch.randn(8, generator=g), "q": q, "k": k, "v": v,
        "target": torch.randint(5, (6,), generator=g), "p": x.softmax(-1), "log_q": y.log_softmax(-1),
    }  # fmt: skip
    wanted, got = eval(torchs, names), eval(ours, names)
    # Probabilities, which sum to 1, and the result are rounded, on both sides.
    if got.dtype == torch.bfloat16:
        torch.testing.assert_close(got, wanted, rtol=0, atol=4 * 2**-9 * float(v.abs().max()))
    else:
        torch.testing.assert_close(got, wanted)


def test_every_name_of_the_migration_page_exists() -> None:
    assert set(re.findall(r'load\("(\w+)"\)', MIGRATION)) <= set(liger_aot.ops())
    modules = set(re.findall(r"(?:lnn|liger_aot\.nn)\.(\w+)", MIGRATION))
    assert len(modules) > 15 and not [name for name in modules if not hasattr(liger_aot.nn, name)]
    assert not [n for n in re.findall(r"liger_aot\.(\w+)\(", MIGRATION) if not hasattr(liger_aot, n)]
    not_there = MIGRATION.split(" | not there |")[0].rpartition("\n")[2]
    assert ("flash_attn_varlen_func" in not_there) != ("flash_attention_varlen" in liger_aot.ops())


# The tables of figures ---------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_results() -> None:
    texts = {page: page.read_text() for page in performance.PAGES}
    for page, text in texts.items():
        assert performance.rendered(text, gpus(), page.parent) == text, "`make docs` writes them anew"
    marked = [name for text in texts.values() for _, name, _, _ in performance.MARKED.findall(text)]
    assert sorted(marked) == sorted(performance.SECTIONS)


def test_pages_that_are_not_up_to_date_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(marked("rmsnorm"))
    monkeypatch.setattr(performance, "PAGES", (page,))
    assert performance.write(check=True) == [page] and page.read_text() == marked("rmsnorm")
    assert performance.write() == [page] and "| liger-aot | " in page.read_text()
    assert performance.write() == []


def marked(name: str) -> str:
    return f"before\n<!-- measured: {name} -->\nold\n<!-- /measured -->\nafter\n"


def rendered(name: str, results: Path) -> str:
    return performance.rendered(marked(name), gpus(results), ROOT)


@pytest.mark.parametrize("name", performance.SECTIONS)
def test_a_section_without_results_is_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "h200").mkdir()
    assert rendered(name, tmp_path) == marked(name).replace("old\n", "")


def test_a_marker_of_no_section_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no section 'speed': there are headline"):
        rendered("speed", tmp_path)


def section(name: str, results: Path) -> list[list[str]]:
    """The cells of a section's tables."""
    lines = rendered(name, results).splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_gpus_are_the_folders_of_results(tmp_path: Path) -> None:
    for name in ("b200", "h100-pcie", "h200"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.md").write_text("")
    assert [gpu.name for gpu in gpus(tmp_path)] == ["H200", "B200", "H100 PCIE"]


def test_records_become_tables(tmp_path: Path) -> None:
    records.write(tmp_path / "h200" / "rmsnorm.json", sample_run())
    cells = section("rmsnorm", tmp_path)
    assert cells[:5] == [
        ["", "1024", "4096", "131072"],
        ["---"] * 4,
        ["liger-aot", "0.96", "0.96", "0.96"],
        ["Liger (Triton JIT)", "-", "-", "fails"],
        ["torch eager", "0.62", "0.62", "0.62"],
    ]
    records.write(tmp_path / "h200" / "cross_entropy.json", sample_run())
    cells = section("losses", tmp_path)
    assert cells[0][1:] == [
        "forward: liger-aot", "Liger", "torch.compile", "step: liger-aot", "Liger", "torch.compile",
    ]  # fmt: skip
    assert cells[-1] == ["`cross_entropy` 131072", "0.96", "fails", "-", "0.96", "-", "-"]


def fewer_points() -> Run:
    """What a short run on a second GPU has: one point of forward, ours and torch."""
    run = sample_run()
    short = tuple(m for m in run.measurements if m.direction == "forward" and m.point == "4096")
    environment = dataclasses.replace(run.environment, gpu="NVIDIA H100 80GB HBM3", date="2026-02-02")
    return Run(run.op, environment, short)


def test_a_second_gpu_stands_beside_the_first(tmp_path: Path) -> None:
    for op in ("rmsnorm", "cross_entropy"):
        records.write(tmp_path / "h200" / f"{op}.json", sample_run())
        records.write(tmp_path / "h100" / f"{op}.json", fewer_points())
    cells = section("rmsnorm", tmp_path)
    assert cells[0] == ["", "GPU", "1024", "4096", "131072"]
    assert ["liger-aot", "H200", "0.96", "0.96", "0.96"] in cells
    assert ["liger-aot", "H100", "-", "0.96", "-"] in cells
    cells = section("losses", tmp_path)
    assert cells[0][:2] == ["op, point", "GPU"]
    first = next(i for i, row in enumerate(cells) if row[0] == "`cross_entropy` 4096")
    assert [row[1:3] for row in cells[first : first + 2]] == [["H200", "0.96"], ["H100", "0.96"]]
    assert "`cross_entropy` 131072" not in [row[0] for row in cells if row[1] == "H100"]
    text = rendered("losses", tmp_path)
    assert "one NVIDIA H200 (" in text and "one NVIDIA H100 80GB HBM3 (" in text and "2026-02-02" in text


def test_the_headline_has_a_column_a_gpu(tmp_path: Path) -> None:
    records.write(tmp_path / "h200" / "rmsnorm.json", sample_run())
    (row,) = (row for row in section("headline", tmp_path) if row[0].startswith("RMSNorm"))
    assert row[1:] == ["4130 / 4130", "2684 / 2684 torch eager"]
    (row,) = (row for row in section("headline", tmp_path) if row[0].startswith("First"))
    assert row[1:] == ["9.5", "-"] and "leaves out torch eager, which compiles nothing: 10.5 ms" in rendered(
        "headline", tmp_path
    )
    (tmp_path / "h200" / "steps").mkdir()
    timed = [
        {"shape": [8192, 4096, 128256], "provider": name, "median_ms": ms, "failed": failed}
        for name, ms, failed in (
            ("products", 30.0, None),  # no peer
            ("liger_aot", 38.04, None),
            ("liger_aot, float32 dW", 37.0, None),
            ("torch", 50.0, None),
            ("liger", 41.0, None),
            ("torch_compile", None, "out of memory"),
        )
    ]
    steps = tmp_path / "h200" / "steps" / "fused_linear_cross_entropy_steps.json"
    steps.write_text(json.dumps({"environment": {"gpu": "G"}, "results": timed}))
    records.write(tmp_path / "h100" / "rmsnorm.json", fewer_points())
    assert section("headline", tmp_path)[0] == ["", "H200: liger-aot", "best peer"]  # H100: half a row
    records.write(tmp_path / "h100" / "rmsnorm.json", sample_run())
    cells = section("headline", tmp_path)
    assert cells[0][1:] == ["H200: liger-aot", "best peer", "H100: liger-aot", "best peer"]
    assert [row[1:] for row in cells if row[0].startswith("RMSNorm")] == [
        ["4130 / 4130", "2684 / 2684 torch eager"] * 2
    ]
    (row,) = (row for row in cells if row[0].startswith("Fused linear"))
    assert row[1:] == ["38.0", "41.0 Liger", "-", "-"]
    assert "reaches 4295 GB/s on the H200 and 4295 GB/s on the H100" in rendered("headline", tmp_path)


@pytest.mark.parametrize("row", performance.ROWS, ids=lambda row: row.title.partition(",")[0])
def test_every_row_of_the_headline_has_figures(row: performance.Row) -> None:
    figures = row.figures(gpus()[0])
    assert figures and all(performance.OURS in one and len(one) > 1 for one in figures)


POINT = {"batch": 1, "cached": 8192, "page": 0, "dim": 128, "heads": 64, "kv_heads": 8, "tokens": 1}
TRAINED = {"model": "phi3-mini", "batch": 4, "tokens": 512, "optimizer": "adamw"}
USERS = {"dtype": "bf16", "sequences": 8}
STEP = {"whole": 5.0, "products": 4.2, "attention": 0.5}
SERVED = {
    "environment": {"gpu": "G"}, "model": "llama", "prompt": [1, 9], "answer": [2, 8], "results": [
        {"point": USERS, "provider": "liger_aot", "tokens_per_second": 1234.5, "first_ms": 20.2, "next_ms": 5.04,
         "steps": {"64": STEP}, "failed": None},
        {"point": USERS, "provider": "transformers", "tokens_per_second": None, "steps": {}, "failed": "no"},
    ],
}  # fmt: skip
STEPS = {
    "attention backward": (
        "attention_backward",
        {"gpu": "G", "tokens": 16384, "backward": [
            {"dim": 64, "length": 512, "causal": True, "tflops": {"liger_aot": 200.0, "cudnn": 220.0}},
        ]},
        ["64", "200 / 220"],
    ),
    "decoding": (
        "flash_decoding_points",
        {"environment": {"gpu": "G"}, "results": [
            {"point": POINT, "provider": "liger_aot", "of_copy": 0.876, "failed": None},
            {"point": POINT, "provider": "cudnn", "of_copy": None, "failed": "no"},
        ]},
        ["1", "8192", "64/8", "128", "1", "-", "0.88", "fails"],
    ),
    "few rows": (
        "few_rows",
        {"environment": {"gpu": "G"}, "results": [
            {"point": {"kind": "rmsnorm", "columns": 64, "rows": 1}, "provider": name, "us": us, "failed": None}
            for name, us in (("liger_aot", 1.204), ("vllm", 2.0), ("liger", 1.5), ("copy", 1.1), ("empty", 0.7))
        ]},
        ["rmsnorm", "64", "1.20 / 1.50 l"],
    ),
    "fused linear jsd": (
        "fused_linear_jsd_steps",
        {"environment": {"gpu": "G"}, "results": [
            {"shape": [8, 4, 2], "provider": "products", "median_ms": 38.44, "failed": None},
            {"shape": [8, 4, 2], "provider": "liger_aot", "of_products": 1.046, "peak_gib": 1.53, "failed": None},
        ]},
        ["8 x 4 x 2", "38.4", "1.05, 1.53 GiB"],
    ),
    "fused linear distillation": (
        "fused_linear_distillation_loss_steps",
        {"environment": {"gpu": "G"}, "results": [
            {"shape": [8, 4, 2], "provider": "products", "median_ms": 26.85, "failed": None},
            {"shape": [8, 4, 2], "provider": "liger", "of_products": None, "peak_gib": None, "failed": "no"},
        ]},
        ["8 x 4 x 2", "26.9", "fails"],
    ),
    "training": (
        "training",
        {"environment": {"gpu": "G"}, "results": [
            {"point": TRAINED, "provider": "liger", "tokens_per_second": 9000.0, "peak_bytes": 3 << 29, "failed": None},
            {"point": TRAINED, "provider": "liger_aot", "tokens_per_second": None, "peak_bytes": None, "failed": "no"},
        ]},
        ["phi3-mini 4 x 512, adamw", "fails", "9000, 1.5 GiB"],
    ),
    "serving": ("serve", SERVED, ["bf16", "8", "1234, 20 / 5.0", "fails"]),
    "serving steps": ("serve", SERVED, ["bf16", "8", "5.00, 10.0% / 6.0%"]),
}  # fmt: skip


def write_steps(folder: Path, file: str, content: object) -> None:
    (folder / "steps").mkdir(parents=True, exist_ok=True)
    (folder / "steps" / f"{file}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", STEPS)
def test_steps_become_tables(tmp_path: Path, name: str) -> None:
    """In the shapes that their benchmarks write."""
    file, content, row = STEPS[name]
    write_steps(tmp_path / "h200", file, content)
    assert section(name, tmp_path)[-1] == row
    write_steps(tmp_path / "h100", file, content)
    header, _, *rows = section(name, tmp_path)
    at = header.index("GPU")
    assert [one[at] for one in rows] == ["H200", "H100"]
    assert all([*one[:at], *one[at + 1 :]] == row for one in rows)


def test_the_readme_says_what_the_server_serves(tmp_path: Path) -> None:
    write_steps(tmp_path / "h200", "serve", SERVED)
    text = rendered("server", tmp_path)
    assert "1234 tokens a second for 8 sequences" in text and "16% (attention 10%) of a step for 8" in text


def test_first_steps_stand_with_training(tmp_path: Path) -> None:
    write_steps(tmp_path / "h200", "training", STEPS["training"][1])
    found = [
        {
            "goal": "token",
            "provider": "liger_aot",
            "total": 2.456,
            "phases": [1, 1, 0.4, 0.056],
            "failed": None,
        }
    ]
    first = {"environment": {"gpu": ENVIRONMENT.gpu}, "model": "llama-1b", "results": found}
    write_steps(tmp_path / "h200", "first_step", first)
    assert section("training", tmp_path)[-1] == ["to the first token", "2.46 (0.46)"]
