"""Liger-Kernel on precompiled binaries: ``import liger_aot.liger``, before or after ``liger_kernel``.

The import replaces every function of ``liger_kernel.ops`` that has an op here, wherever liger_kernel looks it up.
Names, arguments and results stay Liger's: its modules and its patches of Transformers and Megatron need no compiler.
``print(liger_aot.liger.status())`` lists what was replaced and what Triton still compiles. ``uninstall()`` undoes it.
``LIGER_AOT_LIGER=1`` in the environment does the same for programs without that import.
"""

from liger_aot.liger.install import install, uninstall
from liger_aot.liger.report import Status, status

__all__ = ["Status", "install", "status", "uninstall"]

install()
