"""Time two checkouts in turns on one GPU: python tests/commits.py OLD NEW RECORDS ROUNDS OLD_COMMIT

A worker process of each checkout holds the same work in bfloat16: scan and convolution at 16384 x 4096, forward and backward of
a 1.4B model on packed rows, optimizer steps of a 130M model as CUDA graphs. A record each: medians in ms, the median of the
paired ratios new / old, and its 95 % bootstrap interval.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

REPEATS = {"scan": 20, "conv": 200, "model-1.4b": 1, "steps-130m": 5}


def packed_layout(slots):
    from packmamba import SequenceLayout

    lengths, rng = [], np.random.default_rng(0)
    while slots:
        lengths.append(min(slots, int(rng.lognormal(6, 1)) + 1))
        slots -= lengths[-1]
    return SequenceLayout.from_lengths([lengths], row_length=sum(lengths)).to("cuda")


def make(name):
    """The work of a case, as a function without arguments."""
    torch.manual_seed(0)
    if name in ("scan", "conv"):
        from packmamba import ops

        layout = packed_layout(16384)
        x, delta, z, B, C, taps = (
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for shape in (
                (1, 16384, 4096),
                (1, 16384, 4096),
                (1, 16384, 4096),
                (1, 16384, 16),
                (1, 16384, 16),
                (4096, 4),
            )
        )
        A, D, bias = (
            -torch.rand(4096, 16, device="cuda") - 0.5,
            torch.rand(4096, device="cuda"),
            torch.rand(4096, device="cuda"),
        )
        A, D, bias = (tensor.requires_grad_() for tensor in (A, D, bias))
        options = {"z": z, "delta_bias": bias, "delta_softplus": True, "layout": layout}
        if name == "scan":
            return lambda: ops.ssm_pack(x, delta, A, B, C, D, **options).backward(z.detach())
        return lambda: ops.conv1d_pack(x, taps, layout=layout, activation="silu").backward(z.detach())
    layout = packed_layout(8192)
    tokens = torch.randint(50280, layout.shape, device="cuda")
    if name == "model-1.4b":
        from packmamba import MambaLM
        from packmamba.nn.loss import linear_cross_entropy

        model = MambaLM(vocab_size=50280, d_model=2048, n_layer=48).to("cuda", torch.bfloat16)

        def run():
            hidden = model(tokens, layout=layout, return_hidden=True)
            linear_cross_entropy(hidden, model.lm_head.weight, tokens, tokens >= 0)[0].backward()

        return run
    try:
        from packmamba.data.batch import PackedBatch, StepBatch
        from packmamba.training import PackedLitModule

        sizes = {"vocab_size": 50280, "d_model": 768, "n_layer": 24}
        module = PackedLitModule(sizes, cuda_graphs=True, schedule_steps=1000)
    except ImportError:  # 2e9bfb9
        from packmamba.config import load_config
        from packmamba.data.batching import PackedBatch, StepBatch
        from packmamba.training.module import MambaLitModule

        keys = ["model.d_model=768", "model.n_layer=24", "trainer.cuda_graphs=true", "trainer.max_steps=1000"]
        module = MambaLitModule(load_config(None, keys), 50280)
    optimizer = module.to("cuda").configure_optimizers()
    batch = PackedBatch(tokens, tokens, torch.ones_like(tokens).bool(), layout)
    step, numbers = StepBatch([batch], layout.num_tokens, layout.num_tokens, layout.num_slots), iter(range(1000))

    def train():
        with torch.autocast("cuda", torch.bfloat16):
            module.take_step(step, optimizer, next(numbers))

    return train


def work():
    """Answer each line of stdin, the name of a case, with milliseconds."""
    cases = {}
    for name in map(str.strip, sys.stdin):
        if name not in cases:
            cases[name] = make(name)
        for _ in range(3):
            cases[name]()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS[name]):
            cases[name]()
        end.record()
        torch.cuda.synchronize()
        print(begin.elapsed_time(end) / REPEATS[name], flush=True)


def main(old, new, records, rounds, old_commit):
    from packmamba.records import append_record, make_record

    for case in REPEATS:
        begun, pipes = time.perf_counter(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        path = os.environ.get("PYTHONPATH", "")
        command = [sys.executable, str(Path(__file__).resolve()), "worker"]
        workers = [
            subprocess.Popen(command, cwd=tree, env=os.environ | {"PYTHONPATH": f"{tree}:{path}"}, **pipes)
            for tree in (old, new)
        ]
        times = [[], []]
        for turn in range(int(rounds) + 1):  # the first warms up
            for which in (0, 1) if turn % 2 else (1, 0):
                workers[which].stdin.write(f"{case}\n")
                workers[which].stdin.flush()
                times[which].append(float(workers[which].stdout.readline()))
        for worker in workers:
            worker.communicate()
        before, after = np.array(times)[:, 1:]
        draws = np.random.default_rng(0).choice(after / before, (10000, int(rounds)))
        low, high = np.quantile(np.median(draws, 1), (0.025, 0.975))
        metrics = {"old_ms": np.median(before), "new_ms": np.median(after), "ratio": np.median(after / before)}
        metrics = {name: float(value) for name, value in (metrics | {"ratio_low": low, "ratio_high": high}).items()}
        print(case, metrics, flush=True)
        config = {"old": old_commit, "rounds": int(rounds)}
        seconds = time.perf_counter() - begun
        append_record(records, make_record("commits", "speedup", case, config, 0, "random tokens", metrics, seconds))


if __name__ == "__main__":
    work() if sys.argv[1] == "worker" else main(*sys.argv[1:])
