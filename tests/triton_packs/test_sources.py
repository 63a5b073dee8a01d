"""Whether a function is the pack's: what the comparison of texts and names says, against Triton's own hash."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: make venv installs it")

import triton.language as tl
from triton.runtime.jit import JITCallable, JITFunction

from liger_aot.triton import sources
from liger_aot.triton.closures import Unclear
from liger_aot.triton.sources import Changed, Same, check_kept
from liger_aot_build.triton_packs.sources import flat, tree
from tests.triton_packs import source_cases as cases
from tests.triton_packs import source_settings as settings

UNCLEAR = {"reads_an_object", "recursive"}
FUNCTIONS = sorted(
    name
    for name, fn in vars(cases).items()
    if isinstance(fn, JITCallable) and fn.__module__ == cases.__name__
)


def forget() -> None:
    """Triton's hashes, as in a new process."""
    for module in (cases, settings):
        for fn in vars(module).values():
            if isinstance(fn, JITCallable):
                fn.hash, fn.used_global_vals = None, {}
    for fn in (tl.cdiv, cases.cdiv):
        fn.hash, fn.used_global_vals = None, {}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def packed(fn: Any, key: str | None = None) -> Any:
    """What a pack has of the function, but for its binaries."""
    key = key or fn.cache_key
    try:
        table, places = flat([tree(fn)])
    except Unclear:
        table, places = [], [None]
    forget()
    return SimpleNamespace(sources=table, source_of={key: places[0]}, cache_keys=(key,))


def hashed(fn: Any) -> str:
    """Triton's hash, anew: its callees first, as the order counts in some versions."""
    forget()
    key: str = fn.cache_key
    forget()
    return key


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_unchanged_function_is_told_without_its_hash(name: str) -> None:
    fn = getattr(cases, name)
    pack = packed(fn)
    assert (pack.source_of[pack.cache_keys[0]] is None) == (name in UNCLEAR)
    told = sources.told(fn, pack)
    assert isinstance(told, Same) and told.cache_key == pack.cache_keys[0]
    if name not in UNCLEAR:
        assert fn.hash is None and not fn.used_global_vals, "something was left in Triton's function"
    told_by_hash = hashed(fn)
    assert told_by_hash == told.cache_key


def _globals(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(cases, name, value)


def _text(fn: Any, before: str, now: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        assert before in fn.src
        patch.setattr(fn, "_src", fn.src.replace(before, now))

    return change


def _line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cases.innermost, "starting_line_number", 1)


def _cell(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        fn = cases.made_by_a_factory.fn
        at = fn.__code__.co_freevars.index(name)
        patch.setattr(fn.__closure__[at], "cell_contents", value)

    return change


# (function, change, what is said): each is another to Triton's hash, too.
CHANGES = {
    "its text": ("plain", _text(cases.plain, "at < n", "at <= n"), "its own source"),
    "a space of it": ("plain", _text(cases.plain, "at < n", "at  < n"), "its own source"),
    "a comment of it": ("plain", _text(cases.plain, "mask=at < n)", "mask=at < n)  # all"), "its own source"),
    "a callee's text": ("calls", _text(cases.helper, "+ 1", "+ 2"), "the source of helper, which it calls"),
    "a callee's callee": ("calls", _text(cases.innermost, "*", "+"), "the source of innermost"),
    "a callee's line": ("calls", _line, "innermost, which it calls is at line 1, was at line"),
    "another callee": ("calls", _globals("helper", cases.other), "the source of other"),
    "a callee's callee that is another": ("calls", _globals("innermost", cases.apart), "how apart is decorated"),
    "no callee": ("calls", _globals("helper", tl.constexpr(3)), "it reads helper, which was a function"),
    "a callee's global": ("calls", _globals("BLOCK", tl.constexpr(32)), "innermost, which it calls, reads BLOCK"),
    "noinline": ("calls_apart", lambda patch: patch.setattr(cases.apart, "noinline", False), "how apart"),
    "a number": ("reads_constants", _globals("NUMBER", tl.constexpr(0.25)), "NUMBER, which is 0.25, was 0.5"),
    "a zero's sign": ("reads_constants", _globals("ZERO", tl.constexpr(-0.0)), "ZERO, which is -0.0, was 0.0"),
    "a flag's type": ("reads_constants", _globals("FLAG", tl.constexpr(True)), "FLAG, which is True, was 1"),
    "a float for an integer": ("reads_constants", _globals("FLAG", tl.constexpr(1.0)), "FLAG, which is 1.0"),
    "a tuple": ("reads_constants", _globals("SHAPE", tl.constexpr((8, 8))), "SHAPE, which is (8, 8)"),
    "a constant that is none": ("reads_constants", _globals("FLAG", None), "FLAG, which is none, was 1"),
    "a module's function": (
        "reads_a_module", lambda patch: patch.setattr(settings, "scaled", settings.tripled), "the source of tripled",
    ),
    "a module's function's global": (
        "reads_a_module", lambda patch: patch.setattr(settings, "SIZE", tl.constexpr(1)), "SIZE, which is 1",
    ),
    "a closure's function": ("made_by_a_factory", _cell("function", cases.other), "the source of other"),
    "a closure's constant": ("made_by_a_factory", _cell("size", tl.constexpr(4)), "size, which is 4, was 3"),
    "Gluon's helper": ("of_gluon", _globals("FLAG", tl.constexpr(2)), "helper_of_gluon, which it calls, reads FLAG"),
    "what runs while compiling": ("while_compiling", _text(cases.power, "2 **", "3 **"), "the source of power"),
    "a function of Triton's": ("of_triton", _text(cases.cdiv, "x", "x  "), "the source of cdiv"),
    "an object": (
        "reads_an_object",
        _text(cases.reads_an_object, "n + ", "n - "),
        "its own source, that of a function that it calls, or a global that it reads (hash",
    ),
    "one that had no value": ("reads_nothing", _globals("NOTHING", tl.constexpr(1)), "NOTHING, which is 1, was none"),
}  # fmt: skip

# Triton's hash is the same: what it does not look at. Some of these make another binary all the same.
STRICTER = {
    "a dtype": ("reads_a_dtype", _globals("DTYPE", tl.bfloat16), "DTYPE, which is bf16, was fp16"),
    "a module's constant": (
        "reads_a_module", lambda patch: patch.setattr(settings, "SIZE", tl.constexpr(1)), "SIZE, which is 1",
    ),
    "a class' constant": (
        "reads_a_class", lambda patch: patch.setattr(cases.Sizes, "ROWS", tl.constexpr(1)), "Sizes.ROWS, which is 1",
    ),
    "another class": ("reads_a_class", _globals("Mode", cases.Sizes), "it reads Mode, which is type"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_triton_sees_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, said = CHANGES[what]
    fn = getattr(cases, name)
    pack, before = packed(fn), hashed(fn)
    with monkeypatch.context() as patch:
        change(patch)
        told = sources.told(fn, pack)
        assert isinstance(told, Changed) and said in told.why
        assert hashed(fn) != before
    forget()
    assert isinstance(sources.told(fn, pack), Same)


@pytest.mark.parametrize("what", STRICTER)
def test_a_change_that_triton_does_not_see(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, said = STRICTER[what]
    fn = getattr(cases, name)
    pack = packed(fn)
    change(monkeypatch)
    told = sources.told(fn, pack)
    assert isinstance(told, Changed) and said in told.why


# What changes here is nothing that a kernel reads: both say that the function is the same.
UNRELATED = {
    "what locals hide": ("hides_a_global", _globals("BLOCK", object())),
    "the default of an argument": ("has_a_default", _globals("DEFAULT", 64)),
    "a callee that is the same again": ("calls", _globals("helper", JITFunction(cases.helper.fn))),
    "a constant that is equal": ("reads_constants", _globals("NUMBER", tl.constexpr(0.5))),
    "tl's own": ("plain", lambda patch: patch.setattr(tl, "arange", tl.full)),
}


@pytest.mark.parametrize("what", UNRELATED)
def test_what_is_no_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = UNRELATED[what]
    fn = getattr(cases, name)
    pack, before = packed(fn), hashed(fn)
    change(monkeypatch)
    assert isinstance(sources.told(fn, pack), Same)
    assert hashed(fn) == before


def test_a_hash_that_is_old_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton hashes a function once; what it calls may be replaced after that."""
    pack = packed(cases.calls)
    _ = cases.calls.cache_key
    monkeypatch.setattr(cases, "helper", cases.other)
    assert cases.calls.cache_key == pack.cache_keys[0]
    assert isinstance(sources.told(cases.calls, pack), Changed)


def test_globals_are_compared_at_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    told = sources.told(cases.calls, packed(cases.calls))
    assert isinstance(told, Same)
    assert [(name, value.value) for name, _, value in told.kept] == [("BLOCK", 64)]
    check_kept(told.kept)
    monkeypatch.setattr(cases, "BLOCK", tl.constexpr(65))
    with pytest.raises(RuntimeError, match="Global variable BLOCK has changed since we compiled this kernel"):
        check_kept(told.kept)
    monkeypatch.delattr(cases, "BLOCK")
    with pytest.raises(RuntimeError, match="Global variable BLOCK has changed"):
        check_kept(told.kept)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - UNCLEAR))
def test_globals_are_those_that_triton_keeps(name: str) -> None:
    fn = getattr(cases, name)
    told = sources.told(fn, packed(fn))
    assert isinstance(told, Same)
    theirs: set[str] = set()
    for callee in (*vars(cases).values(), *vars(settings).values()):  # some versions forget those of callees
        if isinstance(callee, JITCallable):
            _ = callee.cache_key
    fn.hash = None
    _ = fn.cache_key
    theirs = {name for (name, _), (_, where) in fn.used_global_vals.items() if "__name__" in where}
    assert {name for name, _, _ in told.kept} == theirs


def test_a_function_that_is_defined_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cell of a notebook run again, and a module that is loaded again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "loaded_again.py"
    text = (
        "import triton\nimport triton.language as tl\nSIZE = tl.constexpr(4)\n"
        "@triton.jit\ndef helper(x):\n    return x + SIZE\n"
        "@triton.jit\ndef kernel(X):\n    tl.store(X, helper(1))\n"
    )

    def load() -> ModuleType:
        sys.modules.pop("loaded_again", None)
        linecache.checkcache()
        importlib.invalidate_caches()
        return importlib.import_module("loaded_again")

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path.write_text(text)
    first = load()
    pack = packed(first.kernel)
    again = load()
    assert again.kernel is not first.kernel
    assert isinstance(sources.told(again.kernel, pack), Same) and again.kernel.cache_key == pack.cache_keys[0]
    path.write_text(text.replace("x + SIZE", "x - SIZE"))
    edited = load()
    told = sources.told(edited.kernel, pack)
    assert (
        isinstance(told, Changed) and "helper" in told.why and edited.kernel.cache_key != pack.cache_keys[0]
    )
    first.helper = edited.helper  # a cell that defines the helper alone
    first.kernel.hash = None
    told = sources.told(first.kernel, pack)
    assert isinstance(told, Changed) and first.kernel.cache_key != pack.cache_keys[0]


def test_a_name_that_is_global_and_of_a_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of Triton differ in which they take: nothing is said at the build, and nothing is believed later."""
    pack = packed(cases.made_by_a_factory)
    monkeypatch.setattr(cases, "size", tl.constexpr(3), raising=False)
    with pytest.raises(Unclear, match="size is a global and a variable"):
        tree(cases.made_by_a_factory)
    assert isinstance(sources.told(cases.made_by_a_factory, pack), Changed)


def test_several_functions_of_one_name() -> None:
    first, second = cases.factory(3, cases.helper), cases.factory(4, cases.other)
    keys = [fn.cache_key for fn in (first, second)]
    table, places = flat([tree(first), tree(second)])
    pack = SimpleNamespace(
        sources=table, source_of=dict(zip(keys, places, strict=True)), cache_keys=tuple(keys)
    )
    for fn, key in zip((first, second), keys, strict=True):
        told = sources.told(fn, pack)
        assert isinstance(told, Same) and told.cache_key == key
    told = sources.told(cases.factory(5, cases.other), pack)
    assert isinstance(told, Changed)
    assert len(table) == 5  # innermost stands there once


def _subclass(fn: Any) -> Any:
    return type("Mine", (JITFunction,), {})(fn.fn)


@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(a=1), [1], {"a": 1}, {1}, type("Int", (int,), {})(3), type("Text", (str,), {})("a"),
        tl.pointer_type(tl.int8), tl.constexpr([1]), tl.constexpr(cases.helper), tl.constexpr(tl.constexpr), 1 + 2j,
        b"a", len, lambda: 1, _subclass(cases.helper),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_have_no_plain_form(value: Any) -> None:
    with pytest.raises(Unclear):
        sources.meaning(value)


def test_values_are_told_apart() -> None:
    alike = [0, 0.0, -0.0, False, "0", None, (0,), (0.0,), ("0",), tl.int1, tl.int8, tl.uint8, cases.Mode.FIRST,
             cases.Mode.SECOND, 1, True, 1.0, "", (), tl.int32, "int32", float("nan"), float("inf"), 2**70]  # fmt: skip
    said = [sources.meaning(value) for value in alike]
    said += [sources.meaning(tl.constexpr(value)) for value in alike]
    assert len(set(said)) == len(said)


def test_an_attribute_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes what it finds there for a local name."""
    monkeypatch.setattr(cases.plain, "_src", "def plain(X):\n    settings.SIZE = 3\n")
    with pytest.raises(Unclear, match="is assigned to"):
        tree(cases.plain)


def test_what_is_read_from_a_pack_has_no_cycle(tmp_path: Any) -> None:
    from liger_aot.errors import PackDamaged
    from liger_aot.triton.packs import Function

    function = object.__new__(Function)
    function.path, function.cache_keys = tmp_path, ("k",)
    good: dict[str, Any] = {"text": "t", "line": 1, "kind": "k", "noinline": "None", "names": {"a": "none"}}
    assert function._checked_sources([good]) == (good,)
    for bad in (
        {"names": {"a": 0}}, {"names": {"a": -1}}, {"names": {"a": 3}}, {"names": {"a": True}}, {"names": []},
        {"names": {"a.b": "none"}}, {"line": -1}, {"text": None}, {"kind": 3}, {"noinline": False},
    ):  # fmt: skip
        with pytest.raises(PackDamaged):
            function._checked_sources([{**good, **bad}])
    function.sources = (good,)
    assert function._checked_places([0]) == {"k": 0} and function._checked_places([None]) == {"k": None}
    for places in ([1], [True], [-1], [], [0, 0], {}, ["0"]):
        with pytest.raises(PackDamaged):
            function._checked_places(places)


@pytest.mark.slow  # imports the whole of them
@pytest.mark.parametrize("package", ["liger_kernel.ops", "fla.ops"])
def test_functions_of_other_projects(package: str) -> None:
    """All that import here: each is told as unchanged, and a change of any text that it reaches is seen."""
    import pkgutil

    root = pytest.importorskip(package, reason=f"{package} is not installed")
    for info in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
        with suppress(Exception):  # what asks for a backend that is not there
            importlib.import_module(info.name)
    found = {
        id(fn): fn
        for name, module in list(sys.modules.items())
        if name.startswith(package)
        for fn in map(_unwrapped, vars(module).values())
        if isinstance(fn, JITFunction)
    }
    clear = 0
    for fn in found.values():
        try:
            key, one = fn.cache_key, tree(fn)
        except Exception:  # Triton itself can't hash it, or it is unclear
            continue
        clear += 1
        table, places = flat([one])
        pack = SimpleNamespace(sources=table, source_of={key: places[0]}, cache_keys=(key,))
        assert isinstance(sources.told(fn, pack), Same), fn
        for i, source in enumerate(table):
            changed = [*table[:i], {**source, "text": "0" * 64}, *table[i + 1 :]]
            pack.sources = changed
            assert isinstance(sources.told(fn, pack), Changed), (fn, source)
    assert clear > 0.9 * len(found) > 0


def _unwrapped(fn: Any) -> Any:
    while not isinstance(fn, JITFunction) and hasattr(fn, "fn"):
        fn = fn.fn
    return fn
