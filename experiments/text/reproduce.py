"""Sweeps that make this question's records, and its headline numbers."""

from collections.abc import Iterable

from experiments.reproduce import Headline, Step
from experiments.text.report import PRIMARY as REPORTED

SAMPLE = "experiments/corpus/text-sample.jsonl.gz"
HELD_OUT = f"{{path: {SAMPLE}, split: validation}}"
TINY = (
    "data.num_workers=0 evaluation_examples=60 model.d_model=32 model.n_layer=2 model.d_state=8 model.compile=false jobs=1 "
    "optimizer.warmup_steps=5 trainer.max_steps=30 trainer.precision=32-true trainer.accelerator=cpu trainer.threads=1 "
    "data.tokens_per_step=2048 grid.seed=[1,2]"
).split()
TEXT = (
    *(*TINY, f"data.path={SAMPLE}", "data.subset=validation", "data.validation_documents=100"),
    "evaluations=[perplexity,beyond,headword,last_word]",
    f"evaluation_options={{beyond: {{after: 256, most: 8192}}, last_word: {HELD_OUT}}}",
)
SMALL = {
    "parity": (*TEXT, "arms={padded: {data.max_tokens_per_batch: 4096}}"),
    "states": (
        *(*TEXT, "data.row_length=256", "data.streams=64", "data.max_tokens_per_batch=2048"),
        *("trainer.cuda_graphs=false", "arms={shuffled: {data.shuffle_steps: 30}}"),
    ),
}
# which is in the sweep's grid
PLAIN = [key for key in TINY if not key.startswith("trainer.precision=")]
SMALL_NUMERICS = (
    *(*PLAIN, f"data.path={SAMPLE}", "common.data.subset=validation", "data.validation_documents=100"),
    # rows of 256, eight in a step, so that sizes of micro-batches differ
    "common.data.cut_documents=256",
    "arms={padded-24k: {data.max_tokens_per_batch: 1024}, reset-131k: {data.row_length: 256}, "
    "reset-24k: {data.max_tokens_per_batch: 1024, data.row_length: 256}}",
)
SMALL_TUNED = (
    *(*TINY, "data.path=experiments/corpus/text-pairs-sample.jsonl", "data.validation_documents=40"),
    f"evaluation_options={{pairs: {HELD_OUT}, asked_headword: {HELD_OUT}}}",
)
# P1's, half of the leak harm in the pilot, which ran with Mamba-1 alone.
MARGINS = {"mamba1": 0.00621, "mamba2": 0.00621}
FEW = range(1, 9)
SWEEPS = {
    "parity": ("padded,packed-reset,packed-control,packed-leak", range(1, 17), "padded", "perplexity.loss"),
    "states": ("own,zero,shuffled", range(1, 13), "zero", "beyond.loss"),
    "packers": ("next-fit,greedy,best-fit-decreasing,concat-split,padded-sorted", FEW, "next-fit", "perplexity.loss"),
    "single": ("single", range(1, 5), "null", "perplexity.loss"),
}
PRIMARY = {"parity": "primary=[packed-reset,packed-leak - packed-reset]", "states": "primary=[own,own - shuffled]"}
PILOT = ("data.subset=validation", "evaluation_options.last_word.split=validation")


def sweep_step(file: str, *keys: str, small: Iterable[str] = ()) -> Step:
    """Train a sweep's runs on a GPU, or on a CPU with ``scale=small``."""
    return Step(file, ("jobs=auto", *keys), small=tuple(small), gpus=1, small_on_cpu=True)


def _sweep(name: str, mixer: str) -> Step:
    arms, seeds, baseline, metric = SWEEPS[name]
    keys = [f"name={name}-{mixer}", f"arms=[{arms}]", f"grid.model.mixer=[{mixer}]", f"grid.seed={[*seeds]}"]
    keys += [f"baseline={baseline}", f"table.metrics=[{metric}]", *filter(None, [PRIMARY.get(name)])]
    keys += [f"margin={MARGINS[mixer]}"] if name == "parity" else []
    return sweep_step("text.yaml", *keys, small=SMALL.get(name, ()))


def _pilot(name: str, arms: str, *keys: str, small: Iterable[str] = ()) -> Step:
    return sweep_step(
        "text.yaml", f"name={name}", f"arms=[{arms}]", "grid.model.mixer=[mamba1]", *PILOT, *keys, small=small
    )


def _tuned(mixer: str) -> Step:
    init = f"trainer.init_from={{output}}:packed-reset mixer={mixer}"
    return sweep_step("finetune.yaml", f"name=tuned-{mixer}", f"model.mixer={mixer}", init, small=SMALL_TUNED)


RATES = ("grid.optimizer.lr=[2.0e-3,4.0e-3,8.0e-3]", "grid.seed=[100,101]", "trainer.max_steps=512")
TAKES = "5 hours of runs"
STEPS = [
    _pilot("rates", "padded,packed-reset,packed-leak", *RATES, small=(*SMALL["parity"], "grid.seed=[100,101]")),
    _pilot("harm", "packed-reset,packed-leak", "grid.seed=[102,103,104,105]"),
    *(_sweep(name, mixer) for name in ("parity", "states", "packers", "single") for mixer in MARGINS),
    *map(_tuned, MARGINS),
    sweep_step("numerics.yaml", small=SMALL_NUMERICS),
]
HEADLINES = [
    Headline(f"{title}: {one.name}", "verdicts-text", {"primary": one.name, "architecture": title}, "difference")
    for title in ("Mamba-1", "Mamba-2")
    for one in REPORTED
]
