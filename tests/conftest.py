import gc
import os

# Tests are the same on every machine, and so is what they start.
os.environ.update({} if os.environ.get("PACKMAMBA_TEST_GPU") else {"CUDA_VISIBLE_DEVICES": ""})
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Else asking for a GPU starts CUDA, and no fork may use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a pool of processes that import PyTorch

import pytest


def on_gpu():
    return bool(os.environ.get("PACKMAMBA_TEST_GPU"))


def pytest_configure(config):
    gc.disable()  # until all is imported, which makes no garbage and takes a fifth longer else
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if hands_out and not on_gpu():
        return  # the processes that run tests start the sooner
    import torch
    from hypothesis import settings

    if on_gpu() and not torch.cuda.is_available():
        raise pytest.UsageError("make test-gpu needs a GPU that PyTorch can use; make test runs what needs none")
    torch.set_num_threads(1)
    settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
    settings.load_profile("default")


def pytest_collection_modifyitems(config, items):
    """The tests marked ``gpu`` where PACKMAMBA_TEST_GPU is set, all others where it is not."""
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kept[on_gpu() is (item.get_closest_marker("gpu") is not None)].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """What was imported stays: a collection that looks through it takes half a second, and benches ask for many."""
    gc.freeze()
    gc.enable()
    if session.items:
        from processes import start_server

        start_server()


@pytest.fixture
def fresh_compiler():
    """A compiler that has compiled nothing yet."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._functorch.config.patch(donated_buffer=False):  # ``gradients`` keeps graphs.
        yield
