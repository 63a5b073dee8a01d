"""The launcher and the stand-in as fixtures: pytest_plugins = ("tests.harness.launcher_fixtures",) brings them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.stand_in import StandIn, build_launcher, build_stand_in, import_launcher


@pytest.fixture(scope="session")
def launcher_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """liger_aot._launch, built once."""
    return build_launcher(tmp_path_factory.mktemp("launcher"))


@pytest.fixture(scope="session")
def native(launcher_path: Path) -> Any:
    """The module liger_aot._launch."""
    return import_launcher(launcher_path)


@pytest.fixture(scope="session")
def _loaded_stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(build_stand_in(tmp_path_factory.mktemp("stand_in")))


@pytest.fixture
def stand_in(_loaded_stand_in: StandIn) -> Iterator[StandIn]:
    """The stand-in driver, as if just started."""
    _loaded_stand_in.reset()
    yield _loaded_stand_in
    _loaded_stand_in.reset()


@pytest.fixture(params=["cuda", "hip"])
def driver(request: pytest.FixtureRequest, native: Any, stand_in: StandIn) -> Any:
    """A Driver of each backend, opened on the stand-in."""
    return native.Driver(request.param, stand_in.path)
