"""What a rewrite must not change, to the bit: python tests/golden.py record|compare FILE, on one machine.

Hashes of the operators' and a model's results and gradients, of every strategy's plans, of the tables made from committed
records; the first twenty losses of every scheme; graphs and graph breaks of compiled blocks. Uses only what is public.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take minutes on a busy machine
sys.path.insert(0, str(ROOT))

from packmamba import MambaLM, SequenceLayout, ops  # noqa: E402
from packmamba.data.packing import STRATEGIES, plan_rows  # noqa: E402

LAYOUTS = {
    "rows": ([[3, 5, 6], [9], [], [1, 1, 14]], 16, [[0, 0, 0], [7], [], [0, 0, 0]]),
    "long": ([[130, 1, 127], [257]], 260, None),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ARMS = {
    "single": "data.strategy: single",
    "padded": "data.strategy: padded",
    "greedy": "data.strategy: greedy",
    "leak": "data.strategy: greedy, trainer.boundary: leak",
    "leak-conv": "data.strategy: greedy, trainer.boundary: leak_conv",
    "leak-scan": "data.strategy: greedy, trainer.boundary: leak_scan",
    "carry": "data.strategy: split, data.streams: 2, trainer.boundary: carry",
    "stream": "data.strategy: best_fit, data.mode: stream",
    "learned": "data.strategy: first_fit, model.learned_initial_state: true",
    "recompute": "data.strategy: histogram, model.recompute: inner",
    "reference": "data.strategy: in_order, ops.backend: reference",
}


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        found.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def operators() -> dict[str, str]:
    results = {}
    for name, (lengths, row_length, offsets) in LAYOUTS.items():
        layout = SequenceLayout.from_lengths(lengths, row_length=row_length, offsets=offsets)
        (rows, slots), documents = layout.shape, layout.num_documents
        for dtype in DTYPES:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            made = torch.Generator().manual_seed(0)

            def draw(*shape: int, dtype: torch.dtype = dtype, made: torch.Generator = made) -> torch.Tensor:
                return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_()

            x, delta, z = (draw(rows, slots, 24) for _ in range(3))
            b, c = draw(rows, slots, 16), draw(rows, slots, 16)
            a = (-draw(24, 16, dtype=wide).detach().exp()).requires_grad_()
            skip, bias = draw(24, dtype=wide), draw(24, dtype=wide)
            state, conv_state = draw(documents, 24, 16, dtype=wide), draw(documents, 24, 3)
            weight, conv_bias = draw(24, 4), draw(24)
            for backend in ("cpu", "reference"):
                conv = (x, weight, conv_bias, conv_state)
                y, last = ops.conv1d_pack(
                    x, weight, conv_bias, layout=layout, activation="silu", initial_state=conv_state,
                    return_final_state=True, backend=backend,
                )  # fmt: skip
                gradients = torch.autograd.grad(y.square().sum() + last.square().sum(), conv)
                results[f"conv {name} {dtype} {backend}"] = digest(y, last, *gradients)
                scan = (x, delta, a, b, c, skip, z, bias, state)
                y, last = ops.ssm_pack(
                    x, delta, a, b, c, skip, z=z, delta_bias=bias, delta_softplus=True, layout=layout,
                    initial_state=state, return_final_state=True, backend=backend,
                )  # fmt: skip
                gradients = torch.autograd.grad(y.square().sum() + last.square().sum(), scan)
                results[f"scan {name} {dtype} {backend}"] = digest(y, last, *gradients)
                results[f"plain {name} {dtype} {backend}"] = digest(
                    ops.conv1d_pack(x, weight, backend=backend), ops.ssm_pack(x, delta.abs(), a, b, c, backend=backend)
                )
    return results


def model() -> dict[str, str]:
    results = {}
    layout = SequenceLayout.from_lengths([[30, 5], [64]], row_length=64)
    for recompute in ("none", "inner", "block"):
        torch.manual_seed(0)
        lm = MambaLM(vocab_size=97, d_model=32, n_layer=2, recompute=recompute)
        tokens = torch.randint(97, (2, 64))
        for leaks in (False, True):
            options = {"conv_layout": layout.flow(), "ssm_layout": layout.flow()} if leaks else {}
            logits, states = lm(tokens, layout=layout, return_states=True, **options)
            gradients = torch.autograd.grad(logits.logsumexp(-1).sum(), list(lm.parameters()))
            results[f"{recompute} leaks={leaks}"] = digest(logits, *(s for pair in states for s in pair), *gradients)
    return results


def graphs() -> dict[str, str]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    lm = MambaLM(vocab_size=97, d_model=32, n_layer=2)
    lm.compile_blocks(backend="aot_eager")
    for lengths in ([[30, 5], [64]], [[1, 2, 3], [40]], [[64], [64]]):
        layout = SequenceLayout.from_lengths(lengths, row_length=64)
        lm(torch.randint(97, (2, 64)), layout=layout).sum().backward()
    counters = torch._dynamo.utils.counters
    return {"breaks": str(dict(counters["graph_break"])), "graphs": str(counters["stats"]["unique_graphs"])}


def plans() -> dict[str, str]:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 3000).astype(np.int64) + 1, 5000)
    results = {}
    for strategy in STRATEGIES:
        for streams in (1, 3) if strategy == "split" else (1,):
            for overlong in ("truncate", "pieces"):
                plan = plan_rows(lengths, 1024, strategy, overlong=overlong, buffer=256, streams=streams)
                parts = (plan.document, plan.start, plan.length, plan.row_offsets, plan.slots)
                results[f"{strategy} {streams} {overlong}"] = digest(*map(torch.from_numpy, parts))
    return results


def command(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "run.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"run.py {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def losses(folder: Path) -> dict[str, list[float]]:
    (folder / "golden.yaml").write_text(
        f"output: {folder}/sweep\ncommon:\n  data.row_length: 512\n  data.overlong: pieces\n  data.tokens_per_step: 2048\n"
        "  data.slots_per_batch: 2048\n  data.validation_documents: 20\n  model.d_model: 64\n  trainer.max_steps: 20\n"
        "  trainer.validate_every: 10\n  trainer.log_every: 1\n  trainer.threads: 2\narms:\n"
        + "".join(f"  {arm}: {{{keys}}}\n" for arm, keys in ARMS.items())
    )
    command("sweep", str(folder / "golden.yaml"))
    results = {}
    files = [*(folder / "sweep").glob("records/*.jsonl"), *(folder / "sweep").glob("records.jsonl")]
    for record in [json.loads(line) for path in files for line in path.read_text().splitlines()]:
        curves, metrics = record["curves"], record["metrics"]
        results[f"run {record['arm']}"] = [
            *(point["loss"] for point in curves["train"]), *(point["loss"] for point in curves["validation"]),
            metrics["val_loss"], metrics["val_loss_start"], metrics["val_loss_as_trained"],
        ]  # fmt: skip
    assert len(results) == len(ARMS)
    return results


def tables(folder: Path) -> dict[str, str]:
    results = {}
    for records in sorted((ROOT / "experiments").glob("*/records")):
        question = records.parent.name
        shutil.copytree(records.parent, folder / question)
        command("report", str(folder / question))
        for path in sorted((folder / question / "tables").glob("*.csv")):
            results[f"{question}/{path.name}"] = path.read_text()
    return results


def main() -> None:
    action, file = sys.argv[1], Path(sys.argv[2])
    some = sys.argv[3:]
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "operators": operators,
            "model": model,
            "graphs": graphs,
            "plans": plans,
            "losses": lambda: losses(folder),
            "tables": lambda: tables(folder),
        }
        for part, make in parts.items():
            if not some or part in some:
                found[part] = make()
    if action == "record":
        file.write_text(json.dumps(found, indent=1))
        return
    golden = json.loads(file.read_text())
    # Runs were named by more keys once.
    golden["losses"] = {re.sub("-[0-9a-f]{10}$", "", key): value for key, value in golden.get("losses", {}).items()}
    wrong = [
        f"{part}: {key}: was {value}, is {found[part].get(key)}"
        for part in found
        for key, value in golden[part].items()
        if found[part].get(key) != value
    ]
    print("\n".join(wrong) or f"all as recorded: {', '.join(f'{len(golden[p])} {p}' for p in found)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
