"""The packages as fixtures, so that a test says what it needs and is skipped where that is missing."""

import pytest


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def tq():
    return pytest.importorskip("tk_torch.quant")


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def jq():
    return pytest.importorskip("tk_jax.quant")
