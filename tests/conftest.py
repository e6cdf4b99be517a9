"""Every fresh torch tensor is filled with NaN, eight CPU devices stand in for a mesh, and the kernel cache is the user's."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from frontends import Jax, Torch


@pytest.fixture(autouse=True, scope="session")
def poison():
    """What a kernel leaves unwritten is NaN."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)


@pytest.fixture(params=["torch", "jax"])
def front(request):
    """One front end after the other."""
    return {"torch": Torch, "jax": Jax}[request.param]()


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` run where there is one."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
