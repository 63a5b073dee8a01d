"""Liger-Kernel on our binaries: ``import liger_aot.liger``, before or after ``liger_kernel``, is all there is to do.

Every function of ``liger_kernel.ops`` that an op covers is ours from then on, wherever in liger_kernel it is looked up,
with Liger's arguments and results: its modules, its patches of Transformers and Megatron run without a compiler.
``print(liger_aot.liger.status())`` lists what is ours and what Triton still compiles. ``uninstall()`` takes it back.
``LIGER_AOT_LIGER=1`` in the environment does the same for programs that have no line for it.
"""

from liger_aot.liger.install import install, uninstall
from liger_aot.liger.report import Status, status

__all__ = ["Status", "install", "status", "uninstall"]

install()
