"""A process that tokenises, watched from outside: its time, and the memory that it and its children hold."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packmamba.config import DataConfig

SAMPLE_SECONDS = 0.05
CODE = """
import json, pickle, sys
import experiments.tokenization.generated
from packmamba.data.corpus import load_corpora
corpora = load_corpora(pickle.load(sys.stdin.buffer), progress=False)
both = corpora.train, corpora.validation
print(json.dumps({
    "corpus_hash": corpora.corpus_hash, "documents": sum(map(len, both)), "tokens": sum(one.num_tokens for one in both)
}))
"""


class Watched:
    """Runs processes and notes the most memory that one and its children hold together."""

    def __init__(self) -> None:
        self.memory = self.processes = 0

    def run(self, data: DataConfig, until: Callable[[], bool] | None = None) -> tuple[float, dict[str, Any]]:
        """Seconds and what it says; with `until`, it is killed as soon as that is true, as by the system."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pickle.dumps(data))
        process.stdin.close()
        while process.poll() is None:
            self._sample(process.pid)
            if until is not None and until():
                process.send_signal(signal.SIGKILL)
            time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - begun
        with process.stdout:
            said = process.stdout.read()
        if until is not None and process.returncode == -signal.SIGKILL:
            return seconds, {}
        if process.returncode:
            raise RuntimeError(f"tokenising ended with status {process.returncode}")
        return seconds, json.loads(said)

    def _sample(self, root: int) -> None:
        held = [resident(number) for number in family(root)]
        self.memory = max(self.memory, sum(held))
        self.processes = max(self.processes, len(held))


def family(root: int) -> Iterator[int]:
    """A process and its children."""
    yield root
    try:
        for thread in Path(f"/proc/{root}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))
    except OSError:
        return


def resident(number: int) -> int:
    """Bytes of a process in memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{number}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0
