"""Sweeps that make this question's records, and its headline numbers."""

from packmamba.reproduce import Headline, Step

SAMPLE = "experiments/corpus/text-sample.jsonl.gz"
HELD_OUT = f"{{path: {SAMPLE}, split: validation}}"
TINY = (
    *("data.num_workers=0", "evaluation_examples=60", "model.d_model=32", "model.n_layer=2", "model.d_state=8"),
    *(
        "model.compile=false",
        "optimizer.warmup_steps=5",
        "trainer.max_steps=30",
        "trainer.precision=32-true",
        "trainer.accelerator=cpu",
    ),
    *("trainer.threads=1", "jobs=1", "grid.seed=[1,2]"),
)
TEXT = (
    *(*TINY, f"data.path={SAMPLE}", "data.subset=validation", "data.tokens_per_step=2048"),
    *("data.validation_documents=100", "evaluations=[perplexity,beyond,headword,last_word]"),
    f"evaluation_options={{beyond: {{after: 256, most: 8192}}, last_word: {HELD_OUT}}}",
)
SMALL = (*TEXT, "arms={padded: {data.max_tokens_per_batch: 4096}}")
POOL = (
    *(*TEXT, "data.row_length=256", "data.streams=64", "data.max_tokens_per_batch=2048", "trainer.cuda_graphs=false"),
    "arms={shuffled: {data.shuffle_steps: 30}}",
)
SMALL_TUNED = (
    *(*TINY, "data.tokens_per_step=2048", "data.num_documents=400"),
    f"common={{data.task_options: {{path: {SAMPLE}}}}}",
    f"evaluation_options={{pairs: {HELD_OUT}, asked_headword: {HELD_OUT}}}",
)
MARGINS: dict[str, float | None] = {"mamba1": None, "mamba2": None}
"""P1's, half of the pilot's leak harm; None until the pilot has run."""
ARMS = {
    "parity": ("padded,packed-reset,packed-control,packed-leak", range(1, 17)),
    "states": ("own,zero,shuffled", range(1, 13)),
    "packers": ("next-fit,greedy,best-fit-decreasing,concat-split,padded-sorted", range(1, 9)),
    "state-passing": ("state-passing", range(1, 9)),
    "single": ("single", range(1, 5)),
}
PRIMARY = {
    "parity": (
        "baseline=padded",
        "primary=[packed-reset,packed-leak - packed-reset]",
        "table.metrics=[perplexity.loss]",
    ),
    "states": ("baseline=zero", "primary=[own,own - shuffled]", "table.metrics=[beyond.loss]"),
    "packers": ("baseline=next-fit",),
}
PILOT = ("data.subset=validation", "evaluation_options.last_word.split=validation")


def _sweep(name: str, mixer: str, small: tuple[str, ...] = ()) -> Step:
    arms, seeds = ARMS[name]
    keys = (f"name={name}-{mixer}", f"arms=[{arms}]", f"grid.model.mixer=[{mixer}]", f"grid.seed={[*seeds]}")
    margin = (f"margin={MARGINS[mixer]}",) if name == "parity" and MARGINS[mixer] else ()
    keys = ("jobs=auto", *keys, *PRIMARY.get(name, ()), *margin)
    return Step("text.yaml", keys, small=small, gpus=1, small_on_cpu=True)


def _pilot(name: str, arms: str, *keys: str, small: tuple[str, ...] = ()) -> Step:
    keys = ("jobs=auto", f"name={name}", f"arms=[{arms}]", "grid.model.mixer=[mamba1]", *PILOT, *keys)
    return Step("text.yaml", keys, small=small, gpus=1, small_on_cpu=True)


def _tuned(mixer: str) -> Step:
    init = f"trainer.init_from={{output}}:packed-reset mixer={mixer}"
    return Step(
        "finetune.yaml",
        ("jobs=auto", f"name=tuned-{mixer}", f"model.mixer={mixer}", init),
        small=SMALL_TUNED,
        gpus=1,
        small_on_cpu=True,
    )


RATES = ("grid.optimizer.lr=[2.0e-3,4.0e-3,8.0e-3]", "grid.seed=[100,101]", "trainer.max_steps=512")
TAKES = "5 hours of runs"
STEPS = [
    _pilot("rates", "padded,packed-reset,packed-leak", *RATES, small=(*SMALL, "grid.seed=[100,101]")),
    _pilot("harm", "packed-reset,packed-leak", "grid.seed=[102,103,104,105]"),
    *(_sweep("parity", mixer, SMALL) for mixer in MARGINS),
    *(_sweep("states", mixer, POOL) for mixer in MARGINS),
    *(_sweep("packers", mixer) for mixer in MARGINS),
    *(_tuned(mixer) for mixer in MARGINS),
    *(_sweep(name, mixer) for name in ("state-passing", "single") for mixer in MARGINS),
]
NAMES = (
    "P1 packed with reset minus padded",
    "P2 leak minus reset",
    "P3 own minus shuffled, beyond T",
    "P4 own minus zero, beyond T",
)
HEADLINES = [
    Headline(f"{title}: {name}", "verdicts-text", {"primary": name, "architecture": title}, "difference")
    for title in ("Mamba-1", "Mamba-2")
    for name in NAMES
]
