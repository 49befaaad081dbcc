"""Sweeps that make this question's records, and its headline numbers."""

from experiments.common import steps_of, suffixed
from experiments.reproduce import Headline, Step

SMALL = (
    *("data.source=stdlib", "data.path=null", "data.unit=null", "data.validation_documents=150", "data.num_workers=0"),
    *("data.tokens_per_step=1024", "data.max_tokens_per_batch=1024"),
    *("model.d_model=64", "model.n_layer=2", "model.compile=false"),
    *("optimizer.lr=5.0e-3", "optimizer.warmup_steps=5", "trainer.precision=32-true", "trainer.cuda_graphs=false"),
    *(*steps_of(80), "trainer.accelerator=cpu", "trainer.threads=1", "jobs=1", "grid.seed=[1,2]"),
)
WINDOW = "evaluation_options={long_context: {window: 64, most: 8, context: 64, documents: 5, groups: 1}}"
STREAMS = "common={data.row_length: 64, data.streams: 512}"


def _sweep(name: str, arms: str, *keys: str, seeds: range = range(1, 9), small: tuple[str, ...] = ()) -> Step:
    overrides = ("jobs=auto", f"name={name}", f"arms=[{arms}]", f"grid.seed={[*seeds]}", *keys)
    every = (*SMALL, WINDOW, *small) if small else ()
    return Step("boundaries.yaml", overrides, small=every, gpus=1, small_on_cpu=True)


FIVE, THREE = range(1, 6), range(1, 4)
FROM = "trainer.init_from={output}:zero"
LEAKS = ("rows", "leak", "foreign-heads", "leak-conv", "leak-scan")
LADDER = ("zero", "foreign", "own")
DOSES = ",".join(suffixed(suffix, "rows", "leak") for suffix in ("T512", "T8192", "mixture", "unmarked"))
AFTER = ("rows", "leak", "foreign-heads", "leak-scan", "leak-conv")
AFTERS = ",".join(suffixed(f"post-{suffix}", "rows", "leak") for suffix in ("T512", "T8192", "mixture"))
TAKES = "6 hours"
STEPS = [
    _sweep("calibration", "zero,control", small=(STREAMS, "arms={control: {data.max_tokens_per_batch: 512}}")),
    _sweep("ladder", ",".join(LADDER), small=(STREAMS,)),
    _sweep("ladder-more", "noise,own-scan,whole", small=(STREAMS, "arms={whole: {data.row_length: 512}}")),
    _sweep("order", "pool-32,pool-8,plain,shuffled", seeds=range(101, 104)),
    _sweep("carry-or-shuffle", "shuffled"),
    _sweep("ladder-rate", suffixed("rate", *LADDER, "shuffled"), seeds=FIVE),
    _sweep("long", suffixed("long", *LADDER), seeds=FIVE),
    _sweep("larger", "zero-47M,own-47M", seeds=FIVE),
    _sweep("rows-512", suffixed("T512", *LADDER, "shuffled"), seeds=FIVE),
    _sweep("rows-8192", suffixed("T8192", *LADDER), seeds=FIVE),
    _sweep("leak", ",".join(LEAKS), seeds=FIVE, small=("common={data.row_length: 64}",)),
    _sweep("leak-dose", f"{DOSES},foreign-heads-T8192", seeds=THREE),
    _sweep("post", suffixed("post", *LADDER), FROM, small=(STREAMS,)),
    _sweep("post-more", "noise-post,shuffled-post", FROM, seeds=range(6, 9)),
    _sweep("post-leak", f"{suffixed('post', *AFTER)},{AFTERS}", FROM, seeds=FIVE),
    Step("speed.yaml", gpus=1),
]
MAIN = {"setting": "T = 2048, 14M, 100M tokens"}
POST = {"setting": "T = 2048, 14M, 32.8M tokens, post-training"}


def _headline(
    name: str, table: str, what: str, column: str, setting: dict[str, str] = MAIN, key: str = "what"
) -> Headline:
    return Headline(name, f"{table}-files", setting | {key: what}, column, alone=table)


GRAPHS = "tokens/s of own over zero's, as CUDA graphs"
HEADLINES = [
    *(
        _headline(f"{outcome} {places} T", "primary", outcome, "difference", MAIN | {"places": places}, "outcome")
        for outcome in ("coverage", "continuity")
        for places in ("inside", "beyond")
    ),
    *(_headline(f"own over zero {places} T", "ladder", "own over zero", places) for places in ("inside", "beyond")),
    _headline("noise over zero beyond T", "ladder", "noise", "beyond"),
    _headline("own over zero beyond T, post-training", "ladder", "own over zero", "beyond", POST),
    _headline("the pool's rows shuffled minus the pool, beyond T", "order", "shuffled", "beyond"),
    _headline("own minus the pool's rows shuffled, beyond T", "order", "own, shuffled", "beyond"),
    _headline("leak minus reset inside T, T = 2048", "leak", "leak", "inside"),
    _headline("leak minus reset, post-training, T = 2048", "leak", "leak", "all places", POST),
    *(_headline(f"context gain at 8 T, {arm}", "context-gain", arm, "gain_8", key="arm") for arm in LADDER),
    Headline(GRAPHS, "throughput-files", {"arm": "own"}, "speedup", alone="throughput"),
]
