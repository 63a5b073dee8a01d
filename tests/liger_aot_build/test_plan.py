"""Plans: pinned by golden files, free of Triton, and every row that can't be met is named.

``make golden`` writes the files again after a profile or a declaration has changed; read the difference before you
commit it: it is what will be compiled and how it is dispatched.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from liger_aot_build.__main__ import describe
from liger_aot_build.build import Tree, make_plans
from liger_aot_build.declaration import read_declaration
from liger_aot_build.errors import BuildError, ProfileError
from liger_aot_build.paths import ROOT
from liger_aot_build.plan import Plan, plan
from liger_aot_build.profile import profile_names, read_profile
from tests.liger_aot_build.small_op import TABLE, edited, hardware, write_op, write_profile

GOLDEN = ROOT / "tests" / "golden"


def small_plan(folder: Path, changes: dict[str, str] | None = None, arch: str = "gfx942") -> Plan:
    profiles = write_profile(folder / "profiles", arch, hardware(arch) + edited(TABLE, changes or {}))
    return plan(read_declaration("scale", write_op(folder / "kernels")), read_profile(arch, profiles))


@pytest.mark.parametrize("arch", profile_names())
def test_golden(arch: str) -> None:
    path = GOLDEN / f"plan_{arch}.txt"
    assert path.is_file(), "no golden file: make golden"
    now = "".join(f"{describe(p)}\n" for p in make_plans(arch)[1])
    assert now == path.read_text(), f"the plan of {arch} has changed; if that is meant: make golden"


def test_no_golden_file_without_a_profile() -> None:
    assert {p.stem.removeprefix("plan_") for p in GOLDEN.glob("plan_*.txt")} == set(profile_names())


def test_planning_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys; from liger_aot_build.__main__ import main; assert main(['plan']) == 0\n"
        "print(sorted({'triton', 'torch', 'csrc_triton'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "sm90 rmsnorm: " in done.stdout


def test_one_binary_for_any_alignment(tmp_path: Path) -> None:
    """It is compiled without a promise, and stands in the tables of aligned calls, too."""
    changes = {'form = "long", block': 'form = "long", aligned = "any", block'}
    kernel = small_plan(tmp_path, changes).kernels["scale"]
    for axes in ("bf16/bf16", "fp32/fp32"):
        (_, aligned), (_, generic) = (kernel.tables[f"{axes}/{way}"][-1] for way in ("aligned", "generic"))
        assert aligned == generic == f"scale-long-{axes.replace('/', '-')}-any-block1024-warps8"
        assert kernel.variants[aligned].hinted == () and not kernel.variants[aligned].aligned
    before = len(small_plan(tmp_path).variants)
    assert len(small_plan(tmp_path, changes).variants) == before - len(kernel.tables) // 2


def test_tables(tmp_path: Path) -> None:
    kernel = small_plan(tmp_path).kernels["scale"]
    tile, staged, split = (
        "tile-{}-rows2-block512-warps4",
        "staged-{}-block2048-stages2-warps8-programs2",
        "split-{}",
    )
    split, long = "split-{}-split4-block1024-warps4-programs4", "long-{}-block1024-warps8"

    def table(key: str, *rows: tuple[int | None, str]) -> tuple[tuple[int | None, str], ...]:
        return tuple((bound, "scale-" + form.format(key.replace("/", "-"))) for bound, form in rows)

    narrow, wide = [(512, tile), (2048, staged)], [(None, long)]
    assert kernel.tables == {
        "bf16/bf16/aligned": table("bf16/bf16/aligned", *narrow, (8192, split), *wide),
        "bf16/bf16/generic": table("bf16/bf16/generic", *narrow, *wide),
        "bf16/fp32/aligned": table("bf16/fp32/aligned", *narrow, (8192, split), *wide),
        "bf16/fp32/generic": table("bf16/fp32/generic", *narrow, *wide),
        "fp32/fp32/aligned": table("fp32/fp32/aligned", *narrow, *wide),
        "fp32/fp32/generic": table("fp32/fp32/generic", *narrow, *wide),
    }
    assert set(kernel.variants) == {name for entries in kernel.tables.values() for _, name in entries}


def test_variants(tmp_path: Path) -> None:
    variants = small_plan(tmp_path).kernels["scale"].variants
    split = variants["scale-split-bf16-fp32-aligned-split4-block1024-warps4-programs4"]
    assert split.function == "scale_split" and split.cooperative and split.aligned
    assert split.arguments == {
        "Y": "*bf16",
        "X": "*bf16",
        "W": "*fp32",
        "x_stride": "i64",
        "n": "i32",
        "by": "fp32",
    }
    assert split.hinted == ("Y", "X", "n")
    assert split.constants == {"SPLIT": 4, "BLOCK": 1024}
    assert split.options == {"num_warps": 4} and split.host == {"programs_per_multiprocessor": 4}
    assert split.where == "gfx942.toml: [kernel.scale] row 3"
    generic = variants["scale-long-fp32-fp32-generic-block1024-warps8"]
    assert not generic.aligned and not generic.hinted and not generic.cooperative


def test_a_split_of_one_waits_for_nobody(tmp_path: Path) -> None:
    made = small_plan(tmp_path, {"split = 4, block = 1024": "split = 1, block = 4096"})
    assert not any(v.cooperative for v in made.variants)


def test_a_row_may_be_for_some_dtypes(tmp_path: Path) -> None:
    row = '{ max_n = 256, form = "tile", weight = "dtype", aligned = true, block = 256, num_warps = 2 },'
    made = small_plan(tmp_path, {"rows = [": f"rows = [ {row}"}).kernels["scale"]
    assert [key for key, entries in made.tables.items() if entries[0][0] == 256] == [
        "bf16/bf16/aligned",
        "fp32/fp32/aligned",
    ]


def test_rows_for_few_rows(tmp_path: Path) -> None:
    """They stand apart, in their order, and do not count among those that must hold every size."""
    few = (
        '{ most_rows = 8, max_n = 256, form = "tile", aligned = true, block = 256, num_warps = 2 }, '
        '{ most_rows = 64, form = "long", dtype = "bf16", block = 512, num_warps = 4 },'
    )
    made = small_plan(tmp_path, {"rows = [": f"rows = [ {few}"})
    kernel = made.kernels["scale"]
    assert kernel.few["bf16/bf16/aligned"] == (
        (256, 8, "scale-tile-bf16-bf16-aligned-block256-warps2"),
        (None, 64, "scale-long-bf16-bf16-aligned-block512-warps4"),
    )
    assert set(kernel.few) == {k for k in kernel.tables if k.startswith("bf16") or k.endswith("aligned")}
    assert [bound for bound, _ in kernel.tables["bf16/bf16/aligned"]] == [512, 2048, 8192, None]
    assert {name for entries in kernel.few.values() for *_, name in entries} <= set(kernel.variants)
    assert "    n <= 256, up to 8 rows: tile-block256-warps2" in describe(made)


TILE, LONG = 'form = "tile", rows = 2', 'form = "long", block = 1024'
ABSENT_ROW = '{ form = "absent", why = "registers: use scale_by_hand" }'
MISTAKES = {
    "unknown form": (
        {TILE: 'form = "tiles", rows = 2'},
        1,
        "unknown form 'tiles'; scale has tile, staged, split, long",
    ),
    "unknown constant": ({TILE: f"{TILE}, keep = 3"}, 1, "unknown key 'keep' for form 'tile'"),
    "unknown axis": ({TILE: f'{TILE}, dtypes = "bf16"'}, 1, "unknown key 'dtypes'"),
    "a value of no axis": ({TILE: f'{TILE}, dtype = "fp8"'}, 1, "dtype: 'fp8' is not one of bf16, fp32"),
    "aligned as text": (
        {TILE: f'{TILE}, aligned = "yes"'},
        1,
        "aligned must be true, false or \"any\", found 'yes'",
    ),
    "missing constant": ({LONG: 'form = "long"'}, 4, "'block' is missing for form 'long'"),
    "a tile too narrow": ({"max_n = 512": "max_n = 513"}, 1, "max_n = 513, but form 'tile' covers 512"),
    "a split too narrow": ({"split = 4": "split = 2"}, 3, "max_n = 8192, but form 'split' covers 4096"),
    "blocks too few": (
        {"block = 1024, num_warps = 8": "block = 1024, blocks = 9, num_warps = 8"},
        4,
        "max_n = None, but",
    ),
    "a tile without bound": ({"max_n = 512, ": ""}, 1, "max_n = None, but form 'tile' covers 512"),
    "too much shared memory": (
        {"stages = 2": "stages = 6"},
        2,
        "6 stages of 2 tiles of 8192 bytes need 81920 bytes of shared memory; gfx942 has 65536 a block",
    ),
    "falling bounds": (
        {"max_n = 2048": "max_n = 256"},
        2,
        "never reached: earlier rows hold all that it would",
    ),
    "equal bounds": (
        {"max_n = 2048": "max_n = 512"},
        2,
        "never reached: earlier rows hold all that it would",
    ),
    "a row that serves no dtype": (
        {'form = "split", split': 'form = "split", dtype = "fp32", split'},
        3,
        "never reached: earlier rows hold",
    ),
    "a row for few rows behind one for more": (
        {
            "rows = [": 'rows = [ { most_rows = 9, form = "long", block = 512, num_warps = 4 },'
            ' { most_rows = 8, max_n = 64, form = "long", block = 512, num_warps = 2 },'
        },
        2,
        "never reached: earlier rows hold",
    ),
    "nothing is left to be absent": (
        {"num_warps = 8 },\n]": f"num_warps = 8 }},\n  {ABSENT_ROW}]"},
        5,
        "never reached: earlier rows hold",
    ),
    "absent without a reason": (
        {"rows = [": 'rows = [ { form = "absent" },'},
        1,
        "why must say what is absent",
    ),
    "absent with numbers": (
        {"rows = [": 'rows = [ { form = "absent", why = "w", block = 64 },'},
        1,
        "block: absent takes no numbers",
    ),
    "absent up to a bound": (
        {"rows = [": 'rows = [ { form = "absent", why = "w", max_n = 64 },'},
        1,
        "absent is what earlier rows leave",
    ),
    "absent for an unknown axis": (
        {"rows = [": 'rows = [ { form = "absent", why = "w", axis = ["a"] },'},
        1,
        "unknown key 'axis'",
    ),
    "a reason for what is there": (
        {'form = "long", block': 'form = "long", why = "w", block'},
        4,
        "why is for a row of form 'absent'",
    ),
    "a row behind the last": (
        {
            "num_warps = 8 },\n]": 'num_warps = 8 },\n  { max_n = 9000, form = "long", block = 512, num_warps = 4 },\n]'
        },
        5,
        "never reached: earlier rows hold",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, tmp_path: Path) -> None:
    changes, row, message = MISTAKES[name]
    with pytest.raises(ProfileError, match=rf"gfx942.toml: \[kernel.scale\] row {row}: {message}"):
        small_plan(tmp_path, changes)


def test_a_row_that_some_dtypes_reach_earlier(tmp_path: Path) -> None:
    """A row that is held for bf16 already is skipped there, and used for fp32."""
    row = '{ max_n = 2048, form = "tile", dtype = "bf16", block = 2048, num_warps = 8 },'
    tables = small_plan(tmp_path, {"rows = [": f"rows = [ {row}"}).kernels["scale"].tables
    assert [bound for bound, _ in tables["bf16/bf16/generic"]] == [2048, None]
    assert [bound for bound, _ in tables["fp32/fp32/generic"]] == [512, 2048, None]


def test_the_longest_rows_must_be_held(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"gfx942.toml: \[kernel.scale\]: no row holds .* past n = 8192"):
        small_plan(tmp_path, {'  { form = "long", block = 1024, num_warps = 8 },\n': ""})


def test_what_is_absent(tmp_path: Path) -> None:
    """Past a bound, for all sizes of some values, or altogether: the plan says why, and has no binary."""
    for name in ("past", "fp32", "all"):
        (tmp_path / name).mkdir()
    last = '{ form = "long", block = 1024, num_warps = 8 }'
    found = small_plan(tmp_path / "past", {last: ABSENT_ROW})
    kernel = found.kernels["scale"]
    assert {key: entries[-1][0] for key, entries in kernel.tables.items()} == {
        key: 8192 if key in ("bf16/bf16/aligned", "bf16/fp32/aligned") else 2048 for key in kernel.tables
    }
    assert dict(kernel.absent) == dict.fromkeys(kernel.tables, "registers: use scale_by_hand")
    assert "  scale bf16/bf16/generic past n = 2048: absent: registers: use scale_by_hand" in describe(found)
    of_fp32 = ABSENT_ROW.replace("{ ", '{ dtype = "fp32", ')
    kernel = small_plan(tmp_path / "fp32", {"rows = [": f"rows = [ {of_fp32},"}).kernels["scale"]
    assert {key.split("/")[0] for key in kernel.absent} == {"fp32"}
    assert {key.split("/")[0] for key in kernel.tables} == {"bf16"}
    everything = {TABLE[TABLE.index("rows") :]: f"rows = [{ABSENT_ROW}]\n"}
    kernel = small_plan(tmp_path / "all", everything).kernels["scale"]
    assert (len(kernel.tables), len(kernel.variants), len(kernel.absent)) == (0, 0, 6)


def test_stages_are_held_by_the_chip_that_has_the_memory(tmp_path: Path) -> None:
    """The same row, refused on gfx942 above, is fine where a block has 227 KiB."""
    assert small_plan(tmp_path, {"stages = 2": "stages = 6"}, arch="sm90").variants


def test_tables_of_no_kernel(tmp_path: Path) -> None:
    extra = TABLE.replace("kernel.scale", "kernel.scales")
    profiles = write_profile(tmp_path / "profiles", "sm90", hardware("sm90") + TABLE + extra)
    tree = Tree(profiles=profiles, kernels=write_op(tmp_path / "kernels"))
    with pytest.raises(BuildError, match=r"sm90.toml: \[kernel.scales\]: no op declares this kernel"):
        make_plans("sm90", tree=tree)
