"""What the benchmarks of attention, decoding, fused linear losses and whole models share: usual options, and a
run's file in results/GPU/steps."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.environment import RESULTS, folder_name, observe
from benchmarks.plot import plot
from benchmarks.providers import OURS


class PointResult(Protocol):
    """What is kept of a provider at a point."""

    @property
    def provider(self) -> str: ...

    @property
    def failed(self) -> str | None:
        """Why there is no time."""
        ...


AnyPoint = TypeVar("AnyPoint")
AnyResult = TypeVar("AnyResult", bound=PointResult)


class Command:
    """``python -m MODULE``: its options and, once they are read, where it runs and what it writes.

    Args:
        providers: those that may be asked for, with what stands between several.
        on_cpu: whether it can be tried without a GPU.
    """

    def __init__(
        self,
        module: str,
        about: str | None,
        providers: Iterable[str] = (),
        between: str = ",",
        on_cpu: bool = False,
    ) -> None:
        self._module, self._between, self._providers = module, between, list(providers)
        self._libraries: list[str] = []
        self.parser = argparse.ArgumentParser(f"python -m {module}", description=about)
        add = self.parser.add_argument
        add("--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)")
        add("--commit", help="the commit measured, where the tree has no history")
        if self._providers:
            named = between.join(self._providers)
            add("--providers", default=named, help=f"{between!r} between (default: %(default)s)")
        if on_cpu:
            add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")

    def library(self, provider: str, file: str) -> None:
        """An option named as a provider, for the shared object of torch operators that the provider calls."""
        self.parser.add_argument(f"--{provider}", type=Path, help=f"{file}; without it there is no such peer")
        self._libraries.append(provider)

    def several(self, name: str, default: Sequence[Any]) -> None:
        """An option of values of one type, with commas between."""
        kind, text = type(default[0]), ",".join(map(str, default))
        self.parser.add_argument(
            f"--{name}",
            type=lambda given: [kind(value) for value in given.split(",")],
            default=list(default),
            help=f"commas between (default: {text})",
        )

    def read(self, arguments: Sequence[str]) -> Any:
        """The options; ends the process where they are wrong or there is no GPU. Of ``providers`` those are left whose
        library, if they have one, is given."""
        self._arguments = arguments
        options = self.parser.parse_args(arguments)
        if self._providers:
            options.providers = options.providers.split(self._between)
            if strangers := [name for name in options.providers if name not in self._providers]:
                self.parser.error(
                    f"no provider {', '.join(strangers)}: there are {', '.join(self._providers)}"
                )
        self.device = (
            torch.device("cpu") if getattr(options, "device", "") == "cpu" else torch.device("cuda", 0)
        )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            self.parser.error("a GPU is needed, and torch sees none here")
        for name in self._libraries:
            if path := getattr(options, name):
                torch.ops.load_library(str(path))
            elif name in options.providers:
                options.providers.remove(name)
        self._options = options
        return options

    def file(self, name: str, absent: Mapping[str, str] | None = None) -> File:
        """The run's file."""
        command = shlex.join(["python", "-m", self._module, *self._arguments])
        seen = observe(self.device, command=command, commit=self._options.commit, absent=absent or {})
        folder = self._options.out or RESULTS / folder_name(seen.gpu) / "steps"
        return File(folder / f"{name}.json", {"environment": dataclasses.asdict(seen)})

    def measure(
        self,
        name: str,
        points: Iterable[AnyPoint],
        at: Callable[[AnyPoint], Sequence[AnyResult]],
        text: Callable[[AnyPoint, Sequence[AnyResult]], str],
        **facts: Any,
    ) -> int:
        """Measure points one by one; print each point's results as ``text``, and keep those that there are in the file
        of this ``name``, with the ``facts`` that all have in common. 1 where one of ours failed."""
        file, results = self.file(name), list[AnyResult]()
        for point in points:
            found = at(point)
            print(text(point, found), flush=True)
            results += found
            file.keep(**facts, results=results)
            torch.cuda.empty_cache()
        return int(any(r.failed and r.provider == OURS for r in results))


def measured_again(before: Mapping[str, Any], found: Mapping[str, Any], part: str) -> dict[str, Any]:
    """A file's content after some of its points, those of some values of the points' field ``part``, were measured
    again: results of the other values stay, and ``again`` has the environment of each value that was."""
    parts = sorted({r["point"][part] for r in found["results"]})
    kept = [r for r in before["results"] if r["point"][part] not in parts]
    again = {**before.get("again", {}), **dict.fromkeys(parts, found["environment"])}
    return {**before, "again": again, "results": kept + found["results"]}


class File:
    """Written whole after each point: a run that is cut short keeps what it had."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path, self._head = path, head

    def keep(self, **content: Any) -> None:
        """Dataclasses in lists become objects."""
        found = {key: _plain(value) for key, value in content.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps({**self._head, **found}, indent=1) + "\n")
        partial.replace(self.path)

    def finish(self, text: str) -> None:
        """Print what was found and draw it."""
        print(f"\n{text}\n\n{self.path}", flush=True)
        try:
            plot(self.path)
        except (ImportError, ValueError) as error:
            print(f"not drawn: {error}; `python -m benchmarks plot {self.path}` draws it where matplotlib is")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [dataclasses.asdict(one) if dataclasses.is_dataclass(one) else one for one in value]  # type: ignore[arg-type]
    return value
