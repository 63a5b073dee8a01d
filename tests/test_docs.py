"""The generated pages: up to date, complete, and saying no more than the plans and docs/executed.toml hold."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import liger_aot
from benchmarks import readme, records
from benchmarks.markdown import RESULTS, ROOT
from docs.generate import __main__ as generate
from docs.generate import chart, docstring, facts, op_page, support
from liger_aot.op import Op
from tests.test_benchmarks import ENVIRONMENT, sample_run

CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PAGES = ("docs/migration.md", "docs/pack-format.md")  # written by hand
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
    texts |= {ROOT / name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", *PAGES)}
    for path, text in texts.items():
        for link in LINK.findall(CODE.sub("", text)):
            assert "://" in link or (path.parent / link).exists(), f"{path.name}: {link}"


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


def test_whether_numbers_are_measured_is_the_profile_s_to_say() -> None:
    profile = facts.planned("sm90").profile
    assert facts.numbers(profile, "column_sums") == "measured"
    assert facts.numbers(profile, "flash_decoding_combine") == "derived"
    assert re.fullmatch(r"\d+ of 33 rows measured", facts.numbers(profile, "rmsnorm_forward"))
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
    if (
        got.dtype == torch.bfloat16
    ):  # probabilities, which sum to 1, and the result are rounded, on both sides
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


# The README ------------------------------------------------------------------------------------------------


def test_the_readme_s_figures_are_those_of_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme.rendered(text, RESULTS) == text, "`make docs` writes them anew"
    assert {name for _, name, _, _ in readme.MARKED.findall(text)} == set(readme.SECTIONS)


def marked(name: str) -> str:
    return f"before\n<!-- measured: {name} -->\nold\n<!-- /measured -->\nafter\n"


@pytest.mark.parametrize("name", readme.SECTIONS)
def test_a_section_without_results_is_left_out(tmp_path: Path, name: str) -> None:
    assert readme.rendered(marked(name), tmp_path) == marked(name).replace("old\n", "")


def test_a_marker_of_no_section_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no section 'speed': there are rmsnorm"):
        readme.rendered(marked("speed"), tmp_path)


def section(name: str, results: Path) -> list[list[str]]:
    """The cells of a section's tables."""
    lines = readme.rendered(marked(name), results).splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_records_become_tables(tmp_path: Path) -> None:
    records.write(tmp_path / "rmsnorm.json", sample_run())
    cells = section("rmsnorm", tmp_path)
    assert cells[:5] == [
        ["n", "1024", "4096", "131072"],
        ["---"] * 4,
        ["liger-aot", "0.96", "0.96", "0.96"],
        ["Liger (Triton JIT)", "-", "-", "fails"],
        ["torch eager", "0.62", "0.62", "0.62"],
    ]
    records.write(tmp_path / "cross_entropy.json", sample_run())
    cells = section("losses", tmp_path)
    assert cells[0][1:] == ["forward: ours", "Liger", "torch.compile", "step: ours", "Liger", "torch.compile"]
    assert cells[-1] == ["`cross_entropy` 131072", "0.96", "fails", "-", "0.96", "-", "-"]


POINT = {"batch": 1, "cached": 8192, "page": 0, "dim": 128, "heads": 64, "kv_heads": 8, "tokens": 1}
TRAINED = {"model": "phi3-mini", "batch": 4, "tokens": 512, "optimizer": "adamw"}
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
    "fused linear jsd": (
        "fused_linear_jsd_steps",
        {"environment": {"gpu": "G"}, "results": [
            {"shape": [8, 4, 2], "provider": "products", "median_ms": 38.44, "failed": None},
            {"shape": [8, 4, 2], "provider": "liger_aot", "of_products": 1.046, "peak_gib": 1.53, "failed": None},
        ]},
        ["8 x 4 x 2", "38.4", "1.05, 1.53 GiB"],
    ),
    "training": (
        "training",
        {"environment": {"gpu": "G"}, "results": [
            {"point": TRAINED, "provider": "liger", "tokens_per_second": 9000.0, "peak_bytes": 3 << 29, "failed": None},
            {"point": TRAINED, "provider": "liger_aot", "tokens_per_second": None, "peak_bytes": None, "failed": "no"},
        ]},
        ["phi3-mini 4 x 512, adamw", "fails", "9000, 1.5 GiB"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps_become_tables(tmp_path: Path, name: str) -> None:
    """In the shapes that their benchmarks write."""
    file, content, row = STEPS[name]
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / f"{file}.json").write_text(json.dumps(content))
    assert section(name, tmp_path)[-1] == row


def test_first_steps_stand_with_training(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "training.json").write_text(json.dumps(STEPS["training"][1]))
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
    (tmp_path / "steps" / "first_step.json").write_text(json.dumps(first))
    assert section("training", tmp_path)[-1] == ["to the first token", "2.46 (0.46)"]
