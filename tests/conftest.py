"""Every fresh torch tensor is filled with NaN, eight CPU devices stand in for a mesh, and the kernel cache is the user's."""

import os
import sys

import pytest

try:
    import torch
except ImportError:  # the JAX tests also run where there is no torch
    torch = None

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
CUDA = torch is not None and torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

from frontends import Jax, Torch


@pytest.fixture(autouse=True, scope="session")
def poison():
    """What a kernel leaves unwritten is NaN."""
    if torch is None:
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Tests of one parametrized body share its code object; each begins without compiled graphs."""
    yield
    if torch is not None and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(params=["torch", "jax"])
def front(request):
    """One front end after the other."""
    return {"torch": Torch, "jax": Jax}[request.param]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without a CUDA device, `gpu` tests are skipped; with one, `anywhere` tests are GPU tests and run there."""
    for item in items:
        if not CUDA and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if CUDA and "anywhere" in item.keywords:
            item.add_marker(pytest.mark.gpu)
