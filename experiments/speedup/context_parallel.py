"""Time training passes over long rows that several GPUs share, and one GPU alone; write one JSON
file.

torchrun --nproc-per-node=R -m experiments.speedup.context_parallel FILE MODEL ROW_LENGTH...      needs R GPUs

MODEL: a key of SIZES, of Mamba-2 in bfloat16 with each block recomputed. A pass is forward,
backward and the sum of gradients over ranks. Rows hold one document, which crosses every edge, or
documents of 57 to 2048 tokens, few of which cross one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from experiments import timing
from experiments.operators.gpu import draw_rows
from packmamba import ContextParallel, MambaLM, SequenceLayout
from packmamba.lab.records import provenance
from packmamba.nn.loss import linear_cross_entropy

SIZES: dict[str, dict[str, Any]] = {"130m": {"d_model": 768, "n_layer": 24}, "1.3b": {"d_model": 2048, "n_layer": 48}}
VOCABULARY, PASSES = 50288, 5


def measure(
    model: DistributedDataParallel, context: ContextParallel, row_length: int, documents: str
) -> dict[str, float]:
    """Return the seconds of a pass, a median and its spread, and this rank's peak of memory."""
    layout = SequenceLayout.from_lengths(draw_rows(documents, row_length, 1, 0), row_length)
    local = context.shard(layout).to("cuda")
    tokens = context.columns(torch.randint(VOCABULARY, layout.shape, generator=torch.Generator().manual_seed(0))).cuda()
    is_target = torch.ones_like(tokens, dtype=torch.bool)

    def take_pass() -> None:
        dist.barrier()
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model(tokens, layout=local, return_hidden=True)
            loss, _ = linear_cross_entropy(hidden, model.module.lm_head.weight, tokens, is_target)
        (loss / row_length).backward()

    torch.cuda.reset_peak_memory_stats()
    times = [timing.seconds(take_pass, "cuda") for _ in range(2 + PASSES)][2:]
    memory = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "documents": layout.num_documents}
    return {"seconds": timing.median(times), "spread": timing.spread(times)} | memory


def main(path: str, size: str, *row_lengths: str) -> None:
    dist.init_process_group("nccl")
    context = ContextParallel()
    torch.cuda.set_device(context.rank)
    torch.manual_seed(0)
    model = MambaLM(VOCABULARY, mixer="mamba2", recompute="block", **SIZES[size]).cuda()
    shared = DistributedDataParallel(model, device_ids=[context.rank], gradient_as_bucket_view=True)
    found = {"what": __doc__, "model": size, "ranks": context.size, **provenance()}
    for row_length in map(int, row_lengths):
        for documents in ("one", "documents-2k"):
            row = found[f"{documents}, {row_length}"] = measure(shared, context, row_length, documents)
            if context.rank == 0:
                print(documents, row_length, row, flush=True)
                Path(path).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
