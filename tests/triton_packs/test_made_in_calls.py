"""Kernels that functions make when they are called: recorded, built again without a call, and run from a pack."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITCallable, JITFunction

import liger_aot.triton
from liger_aot.errors import KernelNotInPack, RecordingDamaged
from liger_aot.triton import anew, closures
from liger_aot.triton import recording as recordings
from liger_aot.triton.packs import NAMESPACE, OVERRIDE
from liger_aot.triton.recording import Function, Made
from liger_aot_build.triton_packs import find
from liger_aot_build.triton_packs.find import Finder, NotFound
from tests.harness.stand_in import StandIn
from tests.harness.triton_stand_in import wanted, write_pack
from tests.triton_packs.conftest import Packed, pack, record
from tests.triton_packs.project import made_in_calls

pytest_plugins = (
    "tests.harness.launcher_fixtures",
    "tests.harness.triton_fixtures",
    "tests.harness.triton_emulator",
)

MODULE = "tests.triton_packs.project.made_in_calls"
SCALED, CAST = "Scale._made.<locals>.scaled", "rounded.<locals>.cast"
ROW, RAISED, TIMES = (f"reduced.<locals>.{name}" for name in ("row", "raised", "times"))
OBJECT = "with_an_object.<locals>.multiplied"


@pytest.fixture
def recorded(made_in_calls_recording: Path) -> Path:
    return made_in_calls_recording


@pytest.fixture
def for_nvidia(made_in_calls_sm90: Packed) -> Packed:
    return made_in_calls_sm90


@pytest.fixture(scope="module")
def for_amd(made_in_calls_recording: Path) -> Packed:
    return pack(made_in_calls_recording, "gfx942", code=1)


def functions(recorded: Path, qualname: str) -> list[Function]:
    (part,) = recordings.read(recorded)
    return [function for function in part.functions.values() if function.qualname == qualname]


# -- recorded and built -----------------------------------------------------------------------------------------------
def test_what_is_recorded(recorded: Path) -> None:
    (part,) = recordings.read(recorded)
    counted = Counter(noted.variant.qualname for noted in part.variants)
    assert counted == {SCALED: 2, CAST: 2, ROW: 3, OBJECT: 1}
    scaled, cast = functions(recorded, SCALED), functions(recorded, CAST)
    assert all(isinstance(one.made, Made) for one in (*scaled, *cast))
    values = [dict(one.made.variables) for one in scaled]  # type: ignore[union-attr]
    assert all(found["language"] == {"module": "triton.language"} for found in values)
    assert {found["BY"]["constexpr"]["float"] for found in values} == {(2.0).hex(), (0.5).hex()}
    assert scaled[0].made.annotations == (("SIZE", "language.constexpr"),)  # type: ignore[union-attr]
    assert {str(one.made.variables) for one in cast} == {  # type: ignore[union-attr]
        str((("to", {"dtype": name}),)) for name in ("fp16", "bf16")
    }
    (unwritable,) = functions(recorded, OBJECT)
    assert unwritable.made == "its variable options is a types.SimpleNamespace, namespace(by=constexpr[3])"


def test_functions_among_variables_are_recorded(recorded: Path) -> None:
    """With what makes them again: their own variables, the value of a default, their class."""
    (part,) = recordings.read(recorded)
    for row in functions(recorded, ROW):
        assert isinstance(row.made, Made)
        found = dict(row.made.variables)
        for name, qualname in (("raised", RAISED), ("times", TIMES)):
            module, there, key = found[name]["function"]
            assert (module, there) == (MODULE, qualname) and (module, there, key) in part.functions
        assert found["operator"]["builtin"][1] in ("maximum", "minimum")
    (raised, _), (times, _) = functions(recorded, RAISED), functions(recorded, TIMES)
    assert isinstance(raised.made, Made) and isinstance(times.made, Made)
    assert raised.made.defaults == (("times_more", 1),)
    assert times.made.kind == "triton.runtime.jit.ConstexprFunction"
    assert {one.made.variables for one in functions(recorded, TIMES)} == {  # type: ignore[union-attr]
        (("power", 2),), (("power", 3),),
    }  # fmt: skip


def test_what_is_built(for_nvidia: Packed, for_amd: Packed, recorded: Path) -> None:
    """All but what can't be written down, which is named; on the recorded architecture by the recorded names."""
    (part,) = recordings.read(recorded)
    for packed in (for_nvidia, for_amd):
        assert {*packed.manifest["functions"]} == {f"{MODULE}:{name}" for name in (SCALED, CAST, ROW)}
        (left,) = packed.manifest["left_out"]
        assert left["function"] == f"{MODULE}:{OBJECT}"
        assert "is made when another function is called" in left["why"]
        assert "its variable options is a types.SimpleNamespace" in left["why"]
        for name, count in ((SCALED, 2), (CAST, 2), (ROW, 3)):
            function = packed.function(name)
            assert len(function["cache_keys"]) == len(function["variants"]) == count
            assert None not in function["source_of"] and len(set(function["source_of"])) == count
    held = {name for f in (SCALED, CAST, ROW) for name in for_nvidia.function(f)["variants"]}
    assert held == {n.variant.name for n in part.variants if n.variant.qualname != OBJECT}


def test_triton_hashes_two_dtypes_alike(recorded: Path) -> None:
    """Which is why its hash is not all of a key."""
    made = [wanted_cast(to) for to in (tl.float16, tl.bfloat16)]
    assert made[0].cache_key == made[1].cache_key and made[0].fn is not made[1].fn
    keys = [closures.key(fn) for fn in made]
    assert keys[0] != keys[1]
    assert closures.key(wanted_cast(tl.float16)) == keys[0]


def wanted_cast(to: Any) -> Any:
    @triton.jit
    def cast(X):  # type: ignore[no-untyped-def]
        tl.store(X, tl.load(X).to(to))

    return cast


def test_no_function_is_called_for_it(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor need the function around it be found by its name."""
    for name in ("Scale", "rounded", "reduced"):
        monkeypatch.delattr(made_in_calls, name)
    monkeypatch.setattr(find, "_again", find.defaultdict(list))
    monkeypatch.setattr(JITCallable, "__init__", JITCallable.__init__)
    find.note_functions()
    (part,) = recordings.read(recorded)
    every = list(part.functions.values())
    for function in every:
        if isinstance(function.made, Made):
            fn, same = Finder(functions=every).find(*function.key)
            assert same and fn.fn.__qualname__ == function.qualname


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "os.system"}, "no class of Triton's functions"),
        ({"variables": [["language", {"module": "os"}], ["BY", 1]]}, "none of the packages that may be imported"),
        ({"variables": [["language", {"builtin": ["os", "system"]}], ["BY", 1]]}, "os has no system"),
        ({"variables": [["BY", 1]]}, "no function Scale._made.<locals>.scaled has the variables BY"),
        ({"variables": [["BY", 1], ["language", {"x": 1}]]}, "is no value"),
    ],
    ids=str,
)  # fmt: skip
def test_a_recording_that_says_something_else(recorded: Path, change: dict[str, Any], said: str) -> None:
    """It comes from strangers: nothing outside the named packages is imported, and nothing is made of it."""
    (first, _) = functions(recorded, SCALED)
    assert isinstance(first.made, Made)
    text = json.loads(json.dumps(change))
    other = first._replace(cache_key="0" * 64, made=first.made._replace(**text))
    finder = Finder(["tests"], functions=[other])
    with pytest.raises((NotFound, TypeError), match=said):
        finder.find(*other.key)


@pytest.mark.parametrize(
    "made",
    [
        3, [], {"kind": "x"}, {"variables": {}}, {"variables": [["a b", 1]]}, {"annotations": [["n", 1]]},
        {"noinline": "yes"}, {"kind": 1}, {"defaults": [["a"]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_can_not_be(recorded: Path, made: Any) -> None:
    for path in (recorded / "cuda-90" / "functions").glob("*.json"):
        body = json.loads(path.read_text())
        if body["qualname"] == CAST:
            break
    whole = body["made"] | made if isinstance(made, dict) and "kind" not in made else made
    fields = recordings._Fields(path, body | {"made": whole})
    with pytest.raises(RecordingDamaged):
        recordings._function(fields)


def test_a_value_that_changed_in_the_source_is_refused(recorded: Path) -> None:
    """The key proves what was made again."""
    (first, _) = functions(recorded, SCALED)
    assert isinstance(first.made, Made)
    values = tuple((n, 3 if n == "BY" else v) for n, v in first.made.variables)
    other = first._replace(made=first.made._replace(variables=values))
    _, same = Finder(functions=[other]).find(*other.key)
    assert not same


SHARED = """
import triton
import triton.language as tl
import torch

SCALE = tl.constexpr(3)

@triton.jit
def helper(x):
    return x * SCALE

{kernels}
def factory(power, away):
    POWER, AWAY = tl.constexpr(power), tl.constexpr(away)

    @triton.jit
    def raised(X):
        tl.store(X, helper(tl.load(X)) * POWER + AWAY)

    return raised

made_by_import = factory(2, torch.cuda.get_device_capability()[0])
"""
KERNEL = """
@triton.jit
def kernel_{i}(X):
    tl.store(X, helper(tl.load(X)) + {i})

"""
PROGRAM = """
import torch
import shared_kernels as k
x = torch.ones(64, device="cuda")
for i in range(5):
    getattr(k, f"kernel_{i}")[(1,)](x)
k.made_by_import[(1,)](x)
for power in (4, 5):
    k.factory(power, 7)[(1,)](x)
"""


@pytest.mark.parametrize("arch", [pytest.param("sm90", marks=pytest.mark.slow), "sm80"])
def test_a_helper_that_many_call_and_a_factory_that_import_and_program_call(
    tmp_path: Path, arch: str
) -> None:
    """Triton 3.6's hash of a kernel depends on which of its callees were hashed before. What the import makes is what
    it makes for each GPU; what the program makes is what was recorded."""
    kernels = "".join(KERNEL.format(i=i) for i in range(5))
    (tmp_path / "shared_kernels.py").write_text(SHARED.format(kernels=kernels))
    (tmp_path / "program.py").write_text(PROGRAM)
    built = pack(record(tmp_path, "program.py"), arch)
    assert not built.manifest["left_out"] and len(built.manifest["functions"]) == 6
    raised = built.function("factory.<locals>.raised")
    said = {
        tuple(source["names"][name] for name in ("POWER", "AWAY"))
        for source in raised["sources"]
        if "AWAY" in source["names"]
    }
    constants = {(2, int(arch[2])), (4, 7), (5, 7)}
    assert said == {tuple(f'={{"constexpr":{value}}}' for value in pair) for pair in constants}


# -- run: the AMD binaries, executed on the emulator ------------------------------------------------------------------
@pytest.fixture
def amd(
    triton_emulator: Any, for_amd: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with ZipFile(for_amd.wheel) as files:
        files.extractall(tmp_path)
    monkeypatch.setenv(OVERRIDE, str(tmp_path / NAMESPACE))
    anew._known.clear()
    yield triton_emulator
    anew._known.clear()


def test_results(amd: Any) -> None:
    """Twice: the second time no function object is the first's, and no binary is looked up or loaded."""
    liger_aot.triton.use("small")
    for _ in range(2):
        made = made_in_calls.launch_all(1000, device="cpu", objects=False)
        x = torch.randn(1024, generator=torch.Generator().manual_seed(0))[:1000]
        assert len(made) == 7
        for name, values in made.items():
            # one rounding where product and sum are fused, two where not
            torch.testing.assert_close(
                values[:1000], made_in_calls.expected(name, x), rtol=2.0**-22, atol=2.0**-22, msg=name
            )
            assert not values[1000:].any(), name
        status = liger_aot.triton.status()
        assert status.loaded == 7 and not status.missed
    assert Counter(amd.executed) == {"scaled": 4, "cast": 4, "row": 6}


def test_other_values_are_misses(amd: Any) -> None:
    liger_aot.triton.use("small")
    x, out = torch.randn(1000), torch.zeros(1024)
    with pytest.raises(KernelNotInPack, match=r"it reads BY, which is 3.0, was (2.0|0.5)"):
        made_in_calls.Scale(3.0)(x, out, 1000)
    with pytest.raises(KernelNotInPack, match=r"it reads to, which is fp32, was (fp16|bf16)"):
        made_in_calls.rounded(x, out, 1000, tl.float32)
    with pytest.raises(KernelNotInPack, match=r"it has changed since pack small for gfx942 was built"):
        made_in_calls.reduced(x, out, 1000, 4, tl.maximum)
    with pytest.raises(KernelNotInPack, match=r"reads operator, which is function, was builtin"):
        made_in_calls.reduced(x, out, 1000, 3, tl.min)
    with pytest.raises(KernelNotInPack, match=r"leaves it out: is made when another function is called"):
        made_in_calls.with_an_object(x, out, 1000, 3)
    assert not amd.executed and not out.any()


def test_what_is_missing_is_compiled(amd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside kernels of the pack, by functions that are made anew each time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    liger_aot.triton.use("small", missing="compile")
    x = torch.randn(1000)
    for by in (2.0, 3.0, 2.0, 3.0):
        out = torch.zeros(1024)
        made_in_calls.Scale(by)(x, out, 1000)
        torch.testing.assert_close(out[:1000], x * by + 1, rtol=2.0**-22, atol=2.0**-22)
    status = liger_aot.triton.status()
    assert status.loaded == 1 and len(status.missed) == 1
    old = made_in_calls.Scale(3.0)
    old(x, out, 1000)
    monkeypatch.setattr(made_in_calls, "OFFSET", tl.constexpr(5.0))
    with pytest.raises(RuntimeError, match="OFFSET has changed"):
        old(x, out, 1000)
    made_in_calls.Scale(3.0)(x, out, 1000)  # Triton compiles what is made now
    torch.testing.assert_close(out[:1000], x * 3 + 5, rtol=2.0**-22, atol=2.0**-22)


# -- run: what a launch looks up, on the stand-in driver --------------------------------------------------------------
OUTSIDE = tl.constexpr(1)


def over(value: Any, **decoration: Any) -> Any:
    number = tl.constexpr(value)

    @triton.jit(**decoration)
    def kernel(X, n, BLOCK: tl.constexpr = 4):  # type: ignore[no-untyped-def]
        tl.store(X + n, number + OUTSIDE + BLOCK)

    return kernel


def over_a_function(value: Any) -> Any:
    number = tl.constexpr(value)

    @triton.jit
    def inner(x):  # type: ignore[no-untyped-def]
        return x + number

    @triton.jit
    def kernel(X, n):  # type: ignore[no-untyped-def]
        tl.store(X, inner(n))

    return kernel


@pytest.fixture
def packed(tmp_path: Path, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(*launches: Callable[[], Any], missing: str = "error") -> None:
        anew._known.clear()
        liger_aot.triton.use(missing="compile")
        write_pack(tmp_path, [(wanted(launch), {}) for launch in launches])
        monkeypatch.setenv(OVERRIDE, str(tmp_path))
        anew._known.clear()
        liger_aot.triton.use(missing=missing)

    yield install
    anew._known.clear()


def loads(gpu: StandIn) -> int:
    return len(gpu.calls("cuLibraryLoadData"))


def test_functions_that_are_alike_share_a_binary(packed: Any, triton_gpu: StandIn) -> None:
    """And two of other values do not; nothing grows with the number of functions, which are freed."""
    x = torch.zeros(64)
    packed(lambda: over(1)[(1,)](x, 3), lambda: over(2)[(1,)](x, 3))
    freed = []
    for i in range(50):
        fn = over(1 + i % 2)
        fn[(1,)](x, 3)
        freed.append(weakref.ref(fn))
    del fn
    gc.collect()
    assert [record.name for record in triton_gpu.launches()] == ["k0", "k1"] * 25
    assert loads(triton_gpu) == 2 and liger_aot.triton.status().loaded == 2
    alive = sum(one() is not None for one in freed)
    assert len(anew._known) == 2 and alive <= 3  # Triton 3.7 on keeps the last one of a name


def test_a_launch_is_not_looked_up_again(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a function that was never launched itself: not in the pack, and not by Triton."""
    x = torch.zeros(64)
    packed(lambda: over(1)[(1,)](x, 3))
    over(1)[(1,)](x, 3)
    over(1)[(1,)](x, 3)
    from triton.runtime import jit

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("Triton was asked")

    for name in ("compute_cache_key", "create_function_from_signature"):
        monkeypatch.setattr(jit, name, refuse)
    over(1)[(1,)](x, 3)
    assert triton_gpu.launch_count == 3


def test_a_nested_function_is_told_by_its_own_variables(packed: Any, triton_gpu: StandIn) -> None:
    x = torch.zeros(64)
    packed(lambda: over_a_function(1)[(1,)](x, 3), lambda: over_a_function(2)[(1,)](x, 3))
    for value in (1, 2, 1, 2):
        over_a_function(value)[(1,)](x, 3)
    assert [record.name for record in triton_gpu.launches()] == ["k0", "k1"] * 2
    assert loads(triton_gpu) == 2
    with pytest.raises(KernelNotInPack, match="inner, which it calls, reads number, which is 3"):
        over_a_function(3)[(1,)](x, 3)


@pytest.mark.parametrize("make", [over, over_a_function], ids=lambda make: make.__name__)
def test_a_variable_that_changes_in_a_function(packed: Any, triton_gpu: StandIn, make: Any) -> None:
    """The function is another from then on, and comes back."""
    x = torch.zeros(64)
    packed(lambda: make(1)[(1,)](x, 3), lambda: make(2)[(1,)](x, 3))
    fn, other = make(1), make(1)
    inner = closures.closure(fn).get("inner", fn)
    (cell,) = [cell for name, cell in closures.cells(inner.fn) if name == "number"]
    for _ in range(3):
        for value in (1, 2):
            cell.cell_contents = tl.constexpr(value)
            fn[(1,)](x, 3)
            other[(1,)](x, 3)
    assert [record.name for record in triton_gpu.launches()] == ["k0", "k0", "k1", "k0"] * 3
    assert loads(triton_gpu) == 2
    cell.cell_contents = tl.constexpr(3)
    with pytest.raises(KernelNotInPack, match="number, which is 3"):
        fn[(1,)](x, 3)
    other[(1,)](x, 3)
    assert triton_gpu.launch_count == 13


def test_a_global_that_changes_between_calls(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(64)
    packed(lambda: over(1)[(1,)](x, 3))
    old = over(1)
    old[(1,)](x, 3)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "OUTSIDE", tl.constexpr(2))
        with pytest.raises(RuntimeError, match="OUTSIDE has changed"):
            old[(1,)](x, 3)
        with pytest.raises(KernelNotInPack, match="OUTSIDE, which is 2, was 1"):
            over(1)[(1,)](x, 3)
    over(1)[(1,)](x, 3)
    old[(1,)](x, 3)
    assert triton_gpu.launch_count == 3


def test_what_is_decorated_otherwise_is_not_alike(packed: Any, triton_gpu: StandIn) -> None:
    """Each has its own caches, and hooks of one are not the other's."""
    x = torch.zeros(64)
    packed(
        lambda: over(1)[(1,)](x, 3),
        lambda: over(1)[(1,)](x, 16),
        lambda: over(1, do_not_specialize=["n"])[(1,)](x, 16),
    )
    plain, less = over(1), over(1, do_not_specialize=["n"])
    for fn in (plain, less):
        fn[(1,)](x, 16)
    assert plain.device_caches is not less.device_caches
    assert [record.name for record in triton_gpu.launches()] == ["k1", "k0"]
    seen: list[int] = []
    hooked = over(1)
    hooked.add_pre_run_hook(lambda *arguments, **named: seen.append(1))
    hooked[(1,)](x, 16)
    over(1)[(1,)](x, 16)
    assert seen == [1] and hooked.device_caches is plain.device_caches


def test_what_can_not_be_compared_is_not_shared(triton_gpu: StandIn) -> None:
    liger_aot.triton.use(missing="compile")
    for value in (object(), [1], {"a": 1}, lambda: 1, type("Mine", (int,), {})(1)):
        with pytest.raises(closures.Unclear):
            anew._key(over(value), closures.DEEPEST)
    one, other = (anew._key(over(0.0 * sign), closures.DEEPEST) for sign in (1, -1))
    assert one != other
    keys = [anew._key(over(value), closures.DEEPEST) for value in (1, True, 1.0, "1", None, (1,), tl.int1)]
    assert len(set(keys)) == len(keys)


def test_functions_of_a_module_are_left_alone(packed: Any, triton_gpu: StandIn) -> None:
    x = torch.zeros(64)
    packed(lambda: of_the_module[(1,)](x))
    of_the_module.device_caches.clear()
    of_the_module[(1,)](x)
    assert of_the_module.__dict__[anew.SEEN] is None and not anew._known
    assert isinstance(of_the_module, JITFunction)


@triton.jit
def of_the_module(X):  # type: ignore[no-untyped-def]
    tl.store(X, 1)
