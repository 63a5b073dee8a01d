"""Any project's ``@triton.jit`` kernels from a pack: recorded once, built for each architecture with no GPU, run with
nothing to compile. docs/triton-packs.md shows the way.

Importing this imports neither Triton nor torch.
"""
