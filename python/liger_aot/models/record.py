"""What was set where, and how to take it back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from liger_aot.errors import LeftAlone

_NOTHING = object()


class Change:
    """One attribute of a module, a class or a Python module: set by ``make``, taken back by ``undo``."""

    __slots__ = ("name", "new", "old", "owner")

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self.owner, self.name, self.new, self.old = owner, name, new, _NOTHING

    def make(self) -> None:
        self.old = vars(self.owner).get(self.name, _NOTHING)
        setattr(self.owner, self.name, self.new)

    def undo(self) -> bool:
        """False where somebody else has set it since: theirs stays."""
        if vars(self.owner).get(self.name) is not self.new:
            return False
        if self.old is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.old)
        return True


class Record:
    """Changes that are made together, all or none."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self.changes = tuple(changes)

    def make(self) -> None:
        made: list[Change] = []
        try:
            for change in self.changes:
                change.make()
                made.append(change)
        except BaseException:
            for change in reversed(made):
                change.undo()
            raise

    def undo(self) -> None:
        theirs = [c for c in reversed(self.changes) if not c.undo()]
        if theirs:
            warnings.warn(
                f"liger_aot.restore: {', '.join(sorted({c.name for c in theirs}))} of {len(theirs)} modules or classes "
                "was replaced by others since: left alone",
                LeftAlone,
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model comes back as its classes make it: unchanged."""
        return Record, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """A copied model is changed as its original is, and can be restored by itself."""
        copy = Record()
        memo[id(self)] = copy
        changes = []
        for change in self.changes:
            other = Change(deepcopy(change.owner, memo), change.name, deepcopy(change.new, memo))
            other.old = change.old if change.old is _NOTHING else deepcopy(change.old, memo)
            changes.append(other)
        copy.changes = tuple(changes)
        return copy
