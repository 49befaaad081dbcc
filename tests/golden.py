"""Compare two commits to the bit, on one machine: python tests/golden.py record|compare FILE [part
...].

Record in a checkout of the older commit, compare in one of the newer, with this same script: the
package is that of the current folder. Only public functions, commands and files are used. PARTS are
the parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path.cwd()
if __name__ == "__main__":
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", CUDA_VISIBLE_DEVICES="", MPLBACKEND="agg")
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from packmamba import MambaLM, PackedMamba, SequenceLayout, cli, leakcheck, ops  # noqa: E402
from packmamba.data.packing import plan_rows  # noqa: E402
from packmamba.evaluation import generate, score  # noqa: E402

CONFIGURATIONS = yaml.safe_load((Path(__file__).parent / "data" / "golden.yaml").read_text())
PLANNED = list(CONFIGURATIONS["runs"])[:8]
FEW = " data.overlong=truncate model.d_model=8 model.n_layer=1 trainer.max_steps=1"
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def digest(*values: torch.Tensor | np.ndarray) -> str:
    result = hashlib.sha256()
    for value in values:
        value = torch.as_tensor(value).detach().contiguous()
        result.update(str((tuple(value.shape), value.dtype)).encode())
        result.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def operators(_: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    rows = SequenceLayout.from_lengths([[3, 5, 6], [9], [], [1, 1, 14]], 16, [[0, 0, 0], [7], [], [0, 0, 0]])
    long = SequenceLayout.from_lengths([[130, 1, 127], [257]], row_length=260)
    for (name, layout), dtype in product({"rows": rows, "long": long}.items(), DTYPES):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = dtype, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        x, delta, z = (draw(*layout.shape, 24) for _ in range(3))
        b, c = draw(*layout.shape, 16), draw(*layout.shape, 16)
        a = (-draw(24, 16, dtype=wide).detach().exp()).requires_grad_()
        skip, bias = draw(24, dtype=wide), draw(24, dtype=wide)
        state, conv_state = draw(layout.num_documents, 24, 16, dtype=wide), draw(layout.num_documents, 24, 3)
        weight, conv_bias = draw(24, 4), draw(24)
        for backend in ("cpu", "reference"):
            options = {"layout": layout, "return_final_state": True, "backend": backend}
            conv, scan = (x, weight, conv_bias, conv_state), (x, delta, a, b, c, skip, z, bias, state)
            given = {"z": z, "delta_bias": bias, "delta_softplus": True, "initial_state": state}
            outputs = {"scan": (ops.ssm_pack(x, delta, a, b, c, skip, **given, **options), scan)}
            given = {"activation": "silu", "initial_state": conv_state}
            outputs["conv"] = ops.conv1d_pack(x, weight, conv_bias, **given, **options), conv
            for operator, ((y, last), inputs) in outputs.items():
                gradients = torch.autograd.grad(y.square().sum() + last.square().sum(), inputs)
                results[f"{operator} {name} {dtype} {backend}"] = digest(y, last, *gradients)
            plain = ops.ssm_pack(x, delta.abs(), a, b, c, backend=backend)
            results[f"plain {name} {dtype} {backend}"] = digest(ops.conv1d_pack(x, weight, backend=backend), plain)
    return results


def model(_: Path) -> dict[str, object]:
    results: dict[str, object] = {}
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
    torch.manual_seed(1)
    layer, x = PackedMamba(24, d_state=8), torch.randn(2, 64, 24)
    results["layer"] = digest(layer(x, layout=layout), *layer.state_dict().values())
    lm.eval()
    requests = [([5, 6, 7][: i % 3], [(3 * i + j) % 97 for j in range(1 + i % 7)]) for i in range(20)]
    scores = [[s.log_likelihood, s.is_greedy] for s in score(lm, requests, max_slots=64, begin_token=0)]
    results["score"] = digest(torch.tensor(scores, dtype=torch.float64))
    for temperature in (0.0, 0.8):
        continued = generate(lm, [[1, 2, 3], [4]], max_new_tokens=12, temperature=temperature, seed=1)
        results[f"generate {temperature}"] = str(continued)
    check = leakcheck(lm, boundaries="position_ids")
    results["leakcheck"] = str([check.leaks, check.isolated_forward, check.isolated_backward, check.same_as_alone])
    return results


def plans(_: Path) -> dict[str, object]:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 3000).astype(np.int64) + 1, 5000)
    results: dict[str, object] = {}
    for strategy, streams, overlong in product(PLANNED, (1, 3), ("truncate", "split")):
        if streams == 1 or strategy == "concat_split":
            plan = plan_rows(lengths, 1024, strategy, overlong=overlong, buffer=256, streams=streams)
            parts = (plan.document, plan.start, plan.length, plan.row_offsets, plan.slots)
            results[f"{strategy} {streams} {overlong}"] = digest(*parts)
    return results


def write_documents(folder: Path) -> None:
    """Lengths from a few bytes to several rows, in 64 files and in one of JSON lines."""
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, n).tolist()).decode() for n in rng.integers(1, 9, 200)]
    texts = [" ".join(rng.choice(words, n)) + " é" for n in rng.lognormal(3, 1, 1200).astype(int) + 1]
    (folder / "text").mkdir()
    for i, text in enumerate(texts[:64]):
        (folder / "text" / f"{i}.txt").write_text(text)
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def arguments(folder: Path, name: str, keys: str) -> list[str]:
    given = dict(word.split("=", 1) for word in f"{CONFIGURATIONS['common']} {keys}".split()) | {"name": "golden"}
    if given["data.source"] in ("task", "synthetic", "stdlib"):
        del given["data.path"]
    words = [f"{key}={value}".replace("{folder}", str(folder)) for key, value in given.items()]
    return ["train", *words, f"runs_dir={folder}/runs/{name}"]


def command(*words: str) -> str:
    """Run a command of the package in this process; return what went wrong."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = cli.main(list(words))
    return "" if not status else f"{' '.join(words)} ended with {status}: {output.getvalue()[-600:]}"


def run_folder(folder: Path, name: str) -> Path:
    (path,) = {path.parent for path in (folder / "runs" / name).glob("*/config.json")}
    return path


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "record.json").read_text())


def results_of(folder: Path, name: str) -> dict[str, object]:
    """Losses, other numbers that repeat, and a hash of the final weights of the run in
    ``runs/<name>``.
    """
    run = run_folder(folder, name)
    record, times = record_of(run), re.compile("second|memory|wall|time")
    curves = record["curves"]
    positions = [list(point.values()) for point in curves.get("loss_by_position", [])]
    return {
        "train": [point["loss"] for point in curves["train"]],
        "validation": [point["loss"] for point in curves["validation"]],
        "by position": digest(np.array(positions, dtype=float)),
        **{f"metric {key}": value for key, value in record["metrics"].items() if not times.search(key)},
        "corpus": record["corpus_hash"],
        "weights": digest(*(tensor for _, tensor in sorted(MambaLM.from_pretrained(run).state_dict().items()))),
    }


def runs(folder: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, keys in CONFIGURATIONS["runs"].items():
        keys = keys.replace("{greedy}", str(run_folder(folder, "greedy")) if "{greedy}" in keys else "")
        results[name] = command(*arguments(folder, name, keys)) or results_of(folder, name)
    return results


def corpora(folder: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, keys in CONFIGURATIONS["corpora"].items():
        cache = folder / f"corpora-{len(results)}"
        failed = command(*arguments(folder, name, f"{keys} {FEW} data.cache_dir={cache}"))
        results[name] = failed or results_of(folder, name)["corpus"]
    return results


PARTS = {f.__name__: f for f in (operators, model, plans, corpora, runs)}


def differences(was: object, now: object, place: str) -> list[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        return [line for key in was for line in differences(was[key], now.get(key, "missing"), f"{place}: {key}")]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [line for i, (a, b) in enumerate(zip(was, now)) for line in differences(a, b, f"{place}[{i}]")][:3]
    return [] if was == now else [f"{place}: was {str(was)[:200]}, is {str(now)[:600]}"]


def main() -> None:
    action, file, *some = sys.argv[1:]
    golden = json.loads(Path(file).read_text()) if Path(file).is_file() else {}
    torch.set_num_threads(1)
    wrong: list[str] = []
    for part in some or PARTS:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            write_documents(folder)
            found = json.loads(json.dumps(PARTS[part](folder)))
        lines = [f"{part}: {value}" for value in found.values() if " ended with " in str(value)]
        lines += differences(golden[part], found, part) if action == "compare" else []
        title = f"{part}: {len(found)} values, {len(lines)} differ, {time.monotonic() - begun:.0f} s"
        print(title, *lines, sep="\n", flush=True)
        wrong += lines
        if action == "record":
            golden[part] = found
            Path(file).write_text(json.dumps(golden, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
