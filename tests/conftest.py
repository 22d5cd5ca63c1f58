"""Fixtures with real models. Each file is made once a session; a loaded target is shared by all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tinymodels
from hypothesis import HealthCheck, settings

from duodecoding import machine, models
from duodecoding.backends import load_target
from duodecoding.backends.base import Target
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.types import EngineConfig

# One thread: two that wait for each other on a busy machine are many times slower, and no result depends on their number.
SMALL = EngineConfig(ctx_size=1024, threads=1)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=3000)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if machine.compiled():
        for item in items:
            if item.get_closest_marker("sources"):
                item.add_marker(pytest.mark.skip(reason="the modules are compiled"))


@pytest.fixture(scope="session")
def model_path() -> Path:
    return models.resolve("smollm2-135m").path


@pytest.fixture(scope="session")
def poor_draft(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model cut to its first 6 layers."""
    return tinymodels.cut_layers(model_path, tmp_path_factory.mktemp("models") / "poor.gguf", 6)


@pytest.fixture(scope="session")
def random_draft(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights with the built-in model's vocabulary."""
    return tinymodels.random_weights(model_path, tmp_path_factory.mktemp("models") / "random.gguf", 2)


@pytest.fixture(scope="session")
def real_target(model_path: Path) -> Iterator[Target]:
    """On whatever engine is chosen here: our own, but where it cannot be built or is not fast."""
    target = load_target(model_path, SMALL)
    yield target
    target.close()


@pytest.fixture(scope="session")
def llama_target(model_path: Path) -> Iterator[LlamaTarget]:
    target = load_target(model_path, replace(SMALL, backend="llamacpp"))
    assert isinstance(target, LlamaTarget)
    yield target
    target.close()
