import fcntl
import gc
import os
import signal

import pytest

# Set before torch is imported, here and in processes that tests start.
ON_GPU = bool(os.environ.get("PACKMAMBA_TEST_GPU"))
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# torch.cuda.is_available() does not initialise CUDA
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    if ON_GPU and not torch.cuda.is_available():
        raise pytest.UsageError("PACKMAMBA_TEST_GPU: expected a GPU that PyTorch can use, got none; run make test")


def pytest_collection_modifyitems(config, items):
    """Select the tests marked ``gpu`` if PACKMAMBA_TEST_GPU is set, else all others."""
    # Said, so that a choice which leaves nothing fails: pytest -m gpu without the variable.
    others = [item for item in items if bool(item.get_closest_marker("gpu")) is not ON_GPU]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch):
    """Leave later tests neither a process group of this process nor its environment variables,
    whose port is in use.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=ON_GPU)
def gpu_memory(request, tmp_path_factory):
    """Give memory back after each test; one that is marked large has the GPU to itself among the
    processes that test.
    """
    with open(tmp_path_factory.getbasetemp().parent / "gpu.lock", "w") as lock:
        large = request.node.get_closest_marker("large")
        fcntl.flock(lock, fcntl.LOCK_EX if large else fcntl.LOCK_SH)
        if large and torch.cuda.mem_get_info()[0] < 60 * 2**30:
            pytest.skip("needs 60 GiB of free GPU memory")
        yield
        if torch.cuda.memory_reserved() > 2**30:
            gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def undrawn(monkeypatch):
    """Leave figures' files empty: drawing takes most of a report's time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(b""))


@pytest.fixture
def fresh_compiler():
    """Reset torch.compile's caches and counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._functorch.config.patch(donated_buffer=False):  # tests differentiate a graph twice
        yield
