"""What the compiler is compiling for, where its own lowering has to be worked around on one chip."""

import triton.language as tl
from triton.language.core import TRITON_BUILTIN


def target(_semantic=None):
    """The chip, as "sm89" or "gfx950"; None on the interpreter. The compiler passes itself as ``_semantic``."""
    return tl.constexpr(None if _semantic is None else getattr(_semantic.builder.options, "arch", None))


setattr(target, TRITON_BUILTIN, True)
