"""How GroupNorm's kernels are launched: which binary for which images, and how many CTAs share a unit of work."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.norms._vectors import ANY_LENGTH
from liger_aot.runtime.dispatch import Loaded, OpOn
from liger_aot.runtime.remembered import remember

BARRIER_WORDS = 2  # ahead of those that a pipeline exchanges through: the grid barrier's counter


class Shape(NamedTuple):
    """A problem: images of channels in groups, each of ``spatial`` positions."""

    images: int
    channels: int
    groups: int
    spatial: int
    channels_last: bool

    @property
    def by_columns(self) -> bool:
        """Whether the channels-last kernels run it: images of one position are both."""
        return self.channels_last or self.spatial == 1

    @property
    def group(self) -> int:
        """Channels of a group."""
        return self.channels // self.groups

    def kernel(self, direction: str) -> str:
        return f"groupnorm_{direction}_channels_last" if self.by_columns else f"groupnorm_{direction}"

    def n(self, direction: str) -> int:
        """The size that chooses among a kernel's variants: what lies together in memory."""
        if self.by_columns:
            return self.group
        return self.group * self.spatial if direction == "forward" else self.spatial

    def aligned(self, width: int) -> bool:
        """Whether strides and sizes are, if CTAs take ``width`` channels."""
        return not ((self.channels | width) if self.by_columns else self.spatial) & 15

    def width(self, block: int, groups: int, max_elements: int) -> int:
        """Channels a CTA takes of channels-last images: as many whole groups, up to ``groups`` of them in ``block``
        channels, as divide the image's; an aligned number of channels where there is one, of no more than
        ``max_elements`` elements where that can be, and one that leaves less than an eighth of ``block`` lanes idle."""
        most = max(1, min(self.groups, groups, block // self.group))
        widths = [k * self.group for k in range(1, most + 1) if not self.groups % k]

        def merit(width: int) -> tuple[bool, bool, int, int]:
            used = block // width * width * 8 // block
            return not width & 15, width * self.spatial <= max_elements, min(7, used), width

        return max(widths, key=merit)


class Plan(NamedTuple):
    """A launch."""

    programs: int
    splits: int  # CTAs that share a unit
    length: int  # of a part
    words: int  # of the workspace that they exchange through
    sums: int  # rows of partial sums that a backward stores
    forward: tuple[int, ...]  # the sizes that the kernel takes
    backward: tuple[int, ...]


def find(on: OpOn, direction: str, dtype: torch.dtype, addresses: int, shape: Shape) -> tuple[Loaded, Plan]:
    """The binary and the launch for a problem, remembered. ``addresses`` are those of all tensors, combined by or."""
    key = (direction, dtype, addresses & 15, shape)
    found: tuple[Loaded, Plan] | None = on.plans.get(key)
    if found is None:
        kernel, n = on.kernels[shape.kernel(direction)], shape.n(direction)
        aligned = not addresses & 15
        loaded = kernel((dtype, aligned), n)
        plan = None
        if _by_images(loaded, shape):
            plan = pipeline_plan(on, loaded, direction, shape)
            if plan is None:
                loaded = kernel((dtype, aligned), ANY_LENGTH)
        if aligned and not shape.aligned(_width(loaded, shape)):
            loaded, plan = kernel((dtype, aligned := False), n), None
        while direction == "backward" and shape.group > _max_channels(loaded, shape):
            loaded = kernel((dtype, aligned), loaded.block + 1)  # the next row of the table
        if plan is None and _better_split(on, loaded, shape):
            loaded = kernel((dtype, aligned), ANY_LENGTH)
        found = remember(on.plans, key, (loaded, plan or _plan(on, loaded, direction, shape)))
    return found


def workspace(on: OpOn, stream: int, loaded: Loaded, plan: Plan, x: Tensor) -> tuple[Tensor | None, int]:
    """What the CTAs of a launch exchange through, beside x, and the number that the launch tags its words with."""
    if not plan.words:
        return None, 0
    tagged = loaded.variant.form != "pipeline"  # whose words are zeroed instead
    words = on.workspace("tagged" if tagged else "untagged", x.device)
    return (
        words.with_epoch(stream, plan.words) if tagged else (words.on(stream, BARRIER_WORDS + plan.words), 0)
    )


def _by_images(loaded: Loaded, shape: Shape) -> bool:
    """Whether units are whole images: the channels-last pipeline."""
    return shape.by_columns and loaded.variant.form == "pipeline"


def _better_split(on: OpOn, loaded: Loaded, shape: Shape) -> bool:
    """Whether a variant without a split leaves the problem to the last row of its table, which has one: the groups are
    too few for the GPU, or too long to be found in cache again."""
    max_elements = _max_elements(loaded)
    if loaded.numbers.get("max_splits", 1) > 1 or not max_elements:
        return False
    few = 2 * shape.images * shape.groups < 3 * on.multiprocessors
    return few or _width(loaded, shape) * shape.spatial > max_elements


def _plan(on: OpOn, loaded: Loaded, direction: str, shape: Shape) -> Plan:
    """As many parts a unit as make a part short enough to be found in cache again, and fill the GPU."""
    numbers = loaded.numbers
    width = _width(loaded, shape)
    units = shape.channels // width * shape.images
    # Parts are along the positions; in the forward of channels-first groups, which are one run, along that.
    extent = shape.spatial * (width if direction == "forward" and not shape.by_columns else 1)
    step = loaded.rows if shape.by_columns else loaded.block
    splits, length, resident = 1, extent, units
    if "programs_per_multiprocessor" in numbers:
        resident = numbers["programs_per_multiprocessor"] * on.multiprocessors
    if numbers.get("max_splits", 1) > 1:
        elements, most = width * shape.spatial, min(numbers["max_splits"], -(-extent // step), resident)
        least = min(most, -(-elements // _max_elements(loaded)))
        splits = splits_of(units, elements, least, most, resident, numbers["exchange_elements"])
        length = (-(-extent // splits) + 15) & -16
        splits = -(-extent // length)
    at_once = max(1, min(resident // splits, units))
    words = units * 2 * splits * numbers.get("groups", 1) if splits > 1 else 0
    if shape.by_columns:
        each = units // shape.images
        sizes = (units, each, shape.groups, shape.group, width, shape.channels, shape.spatial)
        return Plan(at_once * splits, splits, length, words, shape.images * splits, sizes, sizes)
    runs = (units, shape.groups, shape.group, shape.spatial)
    size = shape.group * shape.spatial
    return Plan(at_once * splits, splits, length, words, shape.images * splits, (*runs, size), runs)


def pipeline_plan(on: OpOn, loaded: Loaded, direction: str, shape: Shape) -> Plan | None:
    """For CTAs that share channels-last images, each part in shared memory; None where that can't be, or another form
    is faster."""
    numbers, group, spatial = loaded.numbers, shape.group, shape.spatial
    positions = numbers["lines"] * 8 // shape.channels  # of a block
    in_two = group == 4 or group >= 7  # no line is of three groups
    # Lines of a position that a group is in, at most.
    across = group // 8 if not group & 7 else (group + 6) // 8 + 1
    fits = shape.groups <= numbers["groups"] and across * positions <= numbers["lines_per_group"]
    if not positions or not in_two or not fits:
        return None
    step = positions * numbers["blocks"]  # positions of a tile
    tile_kb = step * shape.channels * (4 if direction == "backward" else 2) / 1024
    resident = numbers.get("programs_per_multiprocessor", 1) * on.multiprocessors
    least = -(-spatial // (step * min(numbers["max_splits"], resident)))
    room = numbers["stages"] - numbers["prefetch"]

    def cost(tiles: int) -> tuple[float, int]:
        """What a CTA could read in the time, in KB."""
        splits = -(-spatial // (tiles * step))
        images = -(-shape.images // (resident // splits))  # one after another
        overlap = 0 if images == 1 else min(tiles, room - tiles)
        exchange = max(0, numbers["exchange_kb"] - overlap * tile_kb)
        exchange += (splits - 1) // numbers["splits_per_read"] * numbers["read_kb"]
        return images * (tiles * tile_kb + numbers["reduce_kb"] + exchange), tiles

    # A part's last tiles stay while the next part's first ones come; without room for these none are in flight.
    fitting = range(least, min(-(-spatial // step), room - 2) + 1)
    if not fitting:
        return None
    tiles = min(fitting, key=cost)
    splits = -(-spatial // (tiles * step))
    at_once = min(resident // splits, shape.images)
    if shape.images <= 2 * at_once and tiles * tile_kb > numbers["kb_for_one_cta"]:
        return None
    sizes = (shape.images, 1, shape.groups, group, shape.channels, shape.channels, spatial)
    programs = at_once * splits
    words = shape.images * splits * numbers["groups"]
    return Plan(programs, splits, tiles * step, words, programs, sizes, sizes)


def splits_of(units: int, elements: int, least: int, most: int, resident: int, exchange_elements: int) -> int:
    """Into how many parts, ``least`` to ``most``, to split each of so many units of so many elements for the least
    time, where ``resident`` CTAs run at once and an exchange takes as long as reading ``exchange_elements``."""

    def cost(splits: int) -> tuple[int, int]:
        steps = -(-units // max(1, min(resident // splits, units)))
        return steps * (-(-elements // splits) + (exchange_elements if splits > 1 else 0)), splits

    return min(range(max(1, least), max(1, most) + 1), key=cost)


def _max_elements(loaded: Loaded) -> int:
    """Elements of a unit that one CTA takes at most where others can share it; 0: no bound."""
    return int(loaded.numbers.get("max_elements", 0))


def _max_channels(loaded: Loaded, shape: Shape) -> int:
    """Of a group that a CTA holds in registers; others have no bound."""
    in_registers = loaded.variant.form == "pipeline" and not shape.by_columns
    return int(loaded.numbers["blocks"]) * loaded.rows if in_registers else ANY_LENGTH


def _width(loaded: Loaded, shape: Shape) -> int:
    """Channels a CTA takes."""
    if _by_images(loaded, shape):
        return shape.channels
    if shape.by_columns:
        return shape.width(loaded.block, loaded.numbers["groups"], _max_elements(loaded))
    return shape.group
