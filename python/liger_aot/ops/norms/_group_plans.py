"""How GroupNorm's kernels are launched: which binary for which images, and how many programs share a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_aot.runtime.dispatch import REMEMBERED, Loaded, OpOn
from liger_aot.runtime.workspaces import StreamWords

LONGEST = (1 << 31) - 1  # takes a table's last row
HEAD = (
    2  # words ahead of those that a held launch exchanges through: the barrier's counter (common/exchange.py)
)
HANDOVER = 72 << 10  # bytes that a program reads while the parts of a unit are exchanged
ROUND = 24 << 10  # and while another PARTS of them are read
UNIT = 16 << 10  # and while it adds up what its lines found in a part
ALONE = 96 << 10  # bytes of a part: where they are more, and of one or two images, the other form is faster
PART_COST = 4096  # elements that the exchange between a unit's parts costs as much as


class Shape(NamedTuple):
    """A problem: images of channels in groups, each of ``spatial`` places."""

    images: int
    channels: int
    groups: int
    spatial: int
    channels_last: bool

    @property
    def last(self) -> bool:
        """Whether the channels-last kernels run it: images of one place are both."""
        return self.channels_last or self.spatial == 1

    def kernel(self, way: str) -> str:
        return f"groupnorm_{way}_last" if self.last else f"groupnorm_{way}"

    def n(self, way: str) -> int:
        """The size that chooses among a kernel's variants: what lies together in memory."""
        group = self.channels // self.groups
        return group if self.last else group * self.spatial if way == "forward" else self.spatial

    def aligned(self, width: int) -> bool:
        """Whether strides and sizes are, if programs take ``width`` channels."""
        return not ((self.channels | width) if self.last else self.spatial) & 15

    def width(self, block: int, groups: int, longest: int) -> int:
        """Channels a program of channels-last images takes: as many whole groups, up to ``groups`` of them in ``block``
        channels, as divide the image's; an aligned number of channels where there is one, of no more than ``longest``
        elements where that can be, and one that leaves less than an eighth of ``block`` lanes idle."""
        group = self.channels // self.groups
        most = max(1, min(self.groups, groups, block // group))
        widths = [k * group for k in range(1, most + 1) if not self.groups % k]

        def merit(width: int) -> tuple[bool, bool, int, int]:
            used = block // width * width * 8 // block
            return not width & 15, width * self.spatial <= longest, min(7, used), width

        return max(widths, key=merit)


class Plan(NamedTuple):
    """A launch: programs, how many share a group, how much of it each takes, and the sizes a kernel is told."""

    programs: int
    split: int
    length: int
    words: int  # to exchange through
    sums: int  # rows of partial sums that a backward stores
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def find(on: OpOn, way: str, dtype: torch.dtype, places: int, shape: Shape) -> tuple[Loaded, Plan]:
    """The binary and the launch for a problem, remembered."""
    key = (way, dtype, places & 15, shape)
    found: tuple[Loaded, Plan] | None = on.plans.get(key)
    if found is None:
        kernel, n = on.kernels[shape.kernel(way)], shape.n(way)
        aligned = not places & 15
        loaded = kernel((dtype, aligned), n)
        held = None
        if "slots" in loaded.numbers:
            held = held_plan(on, loaded, way, shape)
            if held is None:
                loaded = kernel((dtype, aligned), LONGEST)
        if aligned and not shape.aligned(_width(loaded, shape)):
            loaded, held = kernel((dtype, aligned := False), n), None
        while way == "backward" and shape.channels // shape.groups > _most_channels(loaded):
            loaded = kernel((dtype, aligned), loaded.block + 1)  # the next row of the table
        if held is None and _shares(on, loaded, shape):
            loaded = kernel((dtype, aligned), LONGEST)
        if len(on.plans) >= REMEMBERED:
            on.plans.clear()
        on.plans[key] = found = loaded, held or _plan(on, loaded, way, shape)
    return found


def words_of(on: OpOn, stream: int, loaded: Loaded, plan: Plan, x: Tensor) -> tuple[Tensor | None, int]:
    """What the programs of a launch exchange through, beside x, and the launch's number, of which that is marked."""
    if not plan.words:
        return None, 0
    held = "slots" in loaded.numbers
    name = "held" if held else "words"  # held images' words have no marks: others can't have them
    kept: StreamWords | None = on.plans.get(name)
    if kept is None:
        kept = on.plans.setdefault(name, StreamWords(x.device))
    return (kept.on(stream, HEAD + plan.words), 0) if held else kept.numbered(stream, plan.words)


def _shares(on: OpOn, loaded: Loaded, shape: Shape) -> bool:
    """Whether what the variant has for a program a group is for the last row of its table, where programs share one:
    the groups are too few for the GPU, or too long to be found in cache again."""
    if loaded.numbers.get("split", 1) > 1 or not loaded.numbers.get("tiles"):
        return False
    few = 2 * shape.images * shape.groups < 3 * on.multiprocessors
    return few or _width(loaded, shape) * shape.spatial > _longest(loaded)


def _plan(on: OpOn, loaded: Loaded, way: str, shape: Shape) -> Plan:
    """As many parts a group as make a part short enough to be found in cache again, and fill the GPU."""
    numbers = loaded.numbers
    group = shape.channels // shape.groups
    width = _width(loaded, shape)
    units = shape.channels // width * shape.images
    # Parts are along the places; in the forward of channels-first groups, which are one run, along that.
    extent = shape.spatial * (width if way == "forward" and not shape.last else 1)
    step = loaded.rows if shape.last else loaded.block
    split, length, resident = 1, extent, units
    if "programs_per_multiprocessor" in numbers:
        resident = numbers["programs_per_multiprocessor"] * on.multiprocessors
    if numbers.get("split", 1) > 1:
        elements, most = width * shape.spatial, min(numbers["split"], -(-extent // step), resident)
        split = split_of(units, elements, min(most, -(-elements // _longest(loaded))), most, resident)
        length = (-(-extent // split) + 15) & -16
        split = -(-extent // length)
    teams = max(1, min(resident // split, units))
    words = units * 2 * split * numbers.get("groups", 1) if split > 1 else 0
    if shape.last:
        sizes = (units, units // shape.images, shape.groups, group, width, shape.channels, shape.spatial)
        return Plan(teams * split, split, length, words, shape.images * split, sizes, sizes)
    runs = (units, shape.groups, group, shape.spatial)
    return Plan(
        teams * split, split, length, words, shape.images * split, (*runs, group * shape.spatial), runs
    )


def held_plan(on: OpOn, loaded: Loaded, way: str, shape: Shape) -> Plan | None:
    """For teams of programs that hold a part of a channels-last image each, in tiles of lines of eight channels; None
    where they can't, or another form is faster."""
    numbers, group, places = loaded.numbers, shape.channels // shape.groups, shape.spatial
    rows = numbers["lines"] * 8 // shape.channels  # places of a block
    in_two = group == 4 or group >= 7  # no line is of three groups
    # Lines of a place that a group is in, at most.
    across = group // 8 if not group & 7 else (group + 6) // 8 + 1
    if not rows or not in_two or shape.groups > numbers["groups"] or across * rows > numbers["members"]:
        return None
    step = rows * numbers["fold"]  # places of a tile
    tile = step * shape.channels * (4 if way == "backward" else 2)  # bytes
    resident = numbers["programs_per_multiprocessor"] * on.multiprocessors
    least = -(-places // (step * min(numbers["split"], resident)))
    room = numbers["slots"] - numbers["ahead"]

    def cost(tiles: int) -> tuple[int, int]:
        """Bytes that a program could have read."""
        split = -(-places // (tiles * step))
        units = -(-shape.images // (resident // split))
        slack = 0 if units == 1 else min(tiles, room - tiles)
        idle = max(0, HANDOVER - slack * tile) + (split - 1) // numbers["parts"] * ROUND
        return units * (tiles * tile + UNIT + idle), tiles

    # A part's last tiles are held while the next part's first ones come; without them none are under way.
    fitting = range(least, min(-(-places // step), room - 2) + 1)
    if not fitting:
        return None
    length = min(fitting, key=cost) * step
    split = -(-places // length)
    teams = min(resident // split, shape.images)
    if shape.images <= 2 * teams and length // step * tile > ALONE:
        return None
    sizes = (shape.images, 1, shape.groups, group, shape.channels, shape.channels, places)
    return Plan(
        teams * split, split, length, shape.images * split * numbers["groups"], teams * split, sizes, sizes
    )


def split_of(units: int, elements: int, least: int, most: int, resident: int) -> int:
    """Into how many parts, ``least`` to ``most``, to split each of so many units of so many elements for the least
    time, where ``resident`` programs run at once, as teams that take one unit after another."""

    def cost(split: int) -> tuple[int, int]:
        steps = -(-units // max(1, min(resident // split, units)))
        return steps * (-(-elements // split) + (PART_COST if split > 1 else 0)), split

    return min(range(max(1, least), max(1, most) + 1), key=cost)


def _longest(loaded: Loaded) -> int:
    """Elements that a program may take at most where others may share with it; 0: no bound."""
    return int(loaded.numbers["tiles"]) * loaded.rows * loaded.block


def _most_channels(loaded: Loaded) -> int:
    """Of a group that a program holds in registers; others have no bound."""
    return int(loaded.numbers["pieces"]) * loaded.rows if "pieces" in loaded.numbers else LONGEST


def _width(loaded: Loaded, shape: Shape) -> int:
    """Channels a program takes."""
    if "slots" in loaded.numbers:
        return shape.channels
    if shape.last:
        return shape.width(loaded.block, loaded.numbers["groups"], _longest(loaded))
    return shape.channels // shape.groups
