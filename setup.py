"""The build, thin: what to build is liger_aot_build' to say. Metadata is in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

from liger_aot_build.device_wheel import EPOCH
from liger_aot_build.errors import BuildError
from liger_aot_build.launcher import LIBRARIES, compile_command, link_command, refusal
from liger_aot_build.wheel import add_packs, extras, launcher_sources, plain_modes

os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)


class BuildWithPacks(build_py):
    """Python files, then the packs beside them."""

    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        # Else files that the tree has lost stay in the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        # Beside the packages: Python reads it at startup, for LIGER_AOT_LIGER=1 and the like.
        shutil.copyfile(Path("python", "liger_aot.pth"), Path(self.build_lib, "liger_aot.pth"))
        shutil.copytree("arch_profiles", Path(self.build_lib, "liger_aot_build", "arch_profiles"))
        try:
            add_packs(Path(self.build_lib))
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None


class BuildLauncher(build_ext):
    """With liger_aot_build.launcher's flags in place of this Python's."""

    def build_extensions(self) -> None:
        if why := refusal():
            raise SystemExit(f"error: {why}")
        self.compiler.set_executables(compiler_so=compile_command(), linker_so=link_command())
        self.compiler.set_library_dirs([])
        self.compiler.set_runtime_library_dirs([])
        super().build_extensions()


class PlainWheel(bdist_wheel):
    """Files of one mode, whatever the source tree's are: it is part of a wheel's bytes."""

    def write_wheelfile(self, wheelfile_base: str, *arguments: str) -> None:
        super().write_wheelfile(wheelfile_base, *arguments)
        plain_modes(Path(self.bdist_dir))


setup(
    cmdclass={"build_py": BuildWithPacks, "build_ext": BuildLauncher, "bdist_wheel": PlainWheel},
    extras_require=extras(),
    ext_modules=[
        Extension(
            "liger_aot._launch",
            launcher_sources(),
            libraries=list(LIBRARIES),
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
