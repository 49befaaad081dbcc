"""List the sweeps that make this question's records, and its headline numbers."""

from experiments.reproduce import Headline
from experiments.text.reproduce import SAMPLE, TINY, sweep_step

SMALL = (
    *(*TINY, f"data.path={SAMPLE}", "data.validation_documents=60", "trainer.cuda_graphs=false"),
    *("common.data.source=natural_text", "common.data.subset=validation"),
    *("common.data.row_length=64", "common.data.streams=64", "common.data.max_tokens_per_batch=1024"),
    *("arms.shuffled.data.shuffle_steps=30", "evaluation_options.positions={window: 64, most: 8}"),
    "evaluation_options.beyond={after: 64, most: 512}",
)
TAKES = "2 hours of runs"
STEPS = [
    sweep_step("beyond_rows.yaml", f"name=beyond-rows-{mixer}", f"grid.model.mixer=[{mixer}]", small=SMALL)
    for mixer in ("mamba1", "mamba2")
]
HEADLINES = [
    Headline(f"Mamba-1: {arm} minus {other}", "verdicts", {"contrast": f"{arm} mixer=mamba1 - {other}"}, "difference")
    for arm, other in (("own", "zero"), ("passing", "zero"), ("own", "passing"), ("own", "shuffled"))
]
