"""Checkpoints that are written while training goes on: the step waits until its state is copied to host memory, no longer."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from packmamba.training.callbacks import keep_newest
from packmamba.training.checkpoint_file import CheckpointFiles, write_checkpoint


class CheckpointsBehind(CheckpointFiles):
    """Copies what is to be saved and writes it in a thread, one at a time: a checkpoint that comes before the one before it is
    written waits for it. The copies' memory, as much as a checkpoint takes, is kept for the next.

    What goes wrong in the thread is raised by the next checkpoint, or by ``teardown``, which waits for the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._kept: dict[tuple, torch.UntypedStorage] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.teardown()
        copied = self.copy(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(Path(path), copied), name="checkpoint")
        self._thread.start()

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def teardown(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _write(self, path: Path, checkpoint: dict[str, Any]) -> None:
        try:
            write_checkpoint(path, checkpoint)
            keep_newest(path.parent, 2)
        except Exception as error:
            self._failed = error

    def copy(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What it holds, in host memory, apart from what training goes on with. Tensors that share memory share it in the copy
        too, so that it is written once."""
        storages: dict[tuple, torch.UntypedStorage] = {}
        copies: dict[int, Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            source = tensor.untyped_storage()
            place = (source.device, source.data_ptr(), source.nbytes())
            if place not in storages:
                kept = self._kept.get(place)
                storages[place] = torch.UntypedStorage(source.nbytes()) if kept is None else kept
                storages[place].copy_(source, non_blocking=False)
            empty = torch.empty(0, dtype=tensor.dtype)
            copies[id(tensor)] = empty.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride())
            return tensor

        apply_to_collection(checkpoint, Tensor, take)
        self._kept = storages
        return copy.deepcopy(checkpoint, dict(copies))  # which takes what the mapping has for what is there
