"""Test when a layout's schedule is made and when it is reused, with a device that only counts."""

import copy
import pickle
import types

import pytest
import torch

from operators import random_case
from packmamba import MambaLM, SequenceLayout
from packmamba.ops import cuda, custom_op

LAYOUT = SequenceLayout.from_lengths([[3, 5], [2, 4]], row_length=8)


class Device:
    """Stands for a GPU: its kernels are the CPU's, after their schedule has been noted."""

    def __init__(self):
        self.made, self.launched, self.stream, self.capturing = [], [], 7, False

    def kernel(self, kind, name):
        assert kind == "cuda"
        if hasattr(self, name):
            return lambda arguments: getattr(self, name)(**arguments)
        return lambda arguments: self.launch(name, **arguments)

    def schedule_size(self, documents, rows, row_length, cut_above, cut_length, window):
        assert (rows, row_length) == LAYOUT.shape
        return 10

    def schedule(self, starts, ends, offsets, rows, row_length, cut_above, cut_length, window, memory, stream):
        assert stream == self.stream
        self.made.append(memory.fill_(len(self.made)))

    def launch(self, name, *, schedule, cut_above, cut_length, window, stream, **arguments):
        if name == "ssm_backward":
            assert arguments.pop("y") is None
        assert window == cuda.MIN_WINDOW and stream == self.stream
        self.launched.append((name, int(schedule[0])))
        real[name](arguments)


real = dict(custom_op.KERNELS["cpu"])


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(cuda, "kernel", device.kernel)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: device.stream, raising=False)
    # not torch's own, which the compiler asks too
    monkeypatch.setattr(cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: device.capturing, raising=False)
    properties = types.SimpleNamespace(multi_processor_count=4, shared_memory_per_block_optin=1 << 20)
    # the compiler asks for a GPU's, where there is one, and keeps them
    real = torch.cuda.get_device_properties
    of_device = lambda of=None: properties if str(of) == "cpu" else real(of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", of_device)
    monkeypatch.setitem(custom_op.KERNELS, "cpu", custom_op.KERNELS["cuda"])
    return device


def run(layout, dtype=torch.bfloat16):
    for operator in ("conv1d_pack", "ssm_pack"):
        case = random_case(operator, layout, dtype, channels=16, d_state=16)
        case.layout = layout
        case.run("cpu")


def schedule_bytes(layout):
    schedules = cuda.schedules_of(layout.starts).values()
    made = {schedule for schedule in schedules if isinstance(schedule, cuda.KernelSchedule)}
    return sum(schedule.memory.nbytes for schedule in made)


def test_a_layout_s_schedule_is_made_once(device):
    # LAYOUT may have met other tests
    mine = SequenceLayout.from_lengths([[3, 5], [2, 4]], row_length=8)
    for layout in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), mine.to("cpu")):
        device.made.clear(), device.launched.clear()
        for _ in range(2):
            run(layout)
        assert len(device.made) == 1, "documents are short: no plan cuts them"
        names = ["conv1d_forward", "conv1d_backward", "ssm_forward", "ssm_backward"]
        assert device.launched == [(name, 0) for name in names * 2]
        assert schedule_bytes(layout) == 40


def test_models_share_it_compiled_or_not(device):
    for compiled in (False, True):
        torch._dynamo.reset()
        device.made.clear(), device.launched.clear()
        model = MambaLM(vocab_size=9, d_model=8, n_layer=3, d_state=16)
        if compiled:
            model.compile_blocks(backend="aot_eager")
        for layout in (copy.deepcopy(LAYOUT), copy.deepcopy(LAYOUT)):
            model(torch.randint(9, layout.shape), layout=layout).sum().backward()
        assert len(device.made) == 2 and len(device.launched) == 2 * 3 * 4


def test_it_is_made_again_after_a_write(device):
    layout = copy.deepcopy(LAYOUT)
    run(layout)
    for count, tensor in enumerate((layout.starts, layout.ends), 2):
        tensor.copy_(tensor.clone())
        run(layout)
        assert len(device.made) == count
    assert schedule_bytes(layout) == 40, "the old one is gone"


def test_each_stream_has_its_own(device):
    layout = copy.deepcopy(LAYOUT)
    run(layout)
    device.stream = 8
    run(layout)
    run(layout)
    assert len(device.made) == 2


def test_a_graph_under_capture_makes_its_own(device):
    layout = copy.deepcopy(LAYOUT)
    run(layout)
    device.capturing = True
    run(layout)
    assert len(device.made) == 1 + 4, "at every call, since anything may be written between them"
    for count in (6, 7):
        with cuda.one_capture():
            run(layout)
            run(layout)
        assert len(device.made) == count, "at the first call of each capture"
    device.capturing = False
    run(layout)
    assert len(device.made) == 8
