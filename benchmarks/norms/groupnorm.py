"""GroupNorm of images (N, C, H, W) in 32 groups, with weight and bias; "channels_last": of images that lie in memory
as (N, H, W, C)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.workload import Case

GROUPS = 32
EPS = 1e-5
# Levels of a latent diffusion model's U-Net, and of its image decoder.
SHAPES = ((32, 320, 64, 64), (32, 640, 32, 32), (64, 1280, 16, 16), (8, 1280, 32, 32), (4, 512, 128, 128))


class GroupNorm(OpEntry):
    op = "groupnorm"
    kernels = (
        ("groupnorm_forward_channels_last", "forward", "channels_last"),
        ("groupnorm_backward_channels_last", "backward", "channels_last"),
    )
    points = (*both(SHAPES), *both(SHAPES, "channels_last"))
    small = (1, 64, 8, 8)
    shared = (1, 2)
    unread = (2,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        images, channels, height, width = case.shape
        if case.variant == "channels_last":
            x = random.normal(images, height, width, channels).permute(0, 3, 1, 2)
        else:
            x = random.normal(*case.shape)
        return x, random.near(1, channels), random.near(0, channels)

    def invoke(self, op: Function, variant: str) -> Function:
        return lambda x, weight, bias: op(x, GROUPS, weight, bias, eps=EPS)

    def eager(self, variant: str) -> Function:
        return lambda x, weight, bias: torch.nn.functional.group_norm(x, GROUPS, weight, bias, EPS)

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.group_norm import LigerGroupNormFunction

        return lambda x, weight, bias: LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], GROUPS, EPS)

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        """n is what the kernel's table goes by: elements of a group, pixels, or channels of a group. The shape of the
        benchmark that has such groups, whatever ``elements`` says, else an even share of them."""
        for shape in SHAPES:
            group, pixels = shape[1] // GROUPS, shape[2] * shape[3]
            size = group if kernel.endswith("_last") else group * pixels
            if n == (pixels if kernel == "groupnorm_backward" else size):
                return shape
        if kernel.endswith("_last"):
            channels, pixels = n * GROUPS, 4096
        elif kernel == "groupnorm_backward":
            channels, pixels = 10 * GROUPS, n
        else:
            channels, pixels = 4 * GROUPS, n // 4
        return max(1, elements // (channels * pixels)), channels, pixels, 1


ENTRY = GroupNorm()
