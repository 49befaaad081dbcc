"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

TINY = (
    "data.source=stdlib", "data.path=null", "data.unit=null", "data.tokens_per_step=1024", "data.slots_per_batch=1024",
    "data.validation_documents=150", "data.num_workers=0", "model.d_model=64", "model.n_layer=2", "model.compile=false",
    "optimizer.lr=5.0e-3", "optimizer.warmup_steps=5", "trainer.precision=32-true", "trainer.cuda_graphs=false",
    "trainer.accelerator=cpu", "trainer.threads=1", "grid={seed: [1, 2]}",
)  # fmt: skip
"""On a CPU, with the standard library's functions."""
STEPS_OF_TINY = tuple(f"trainer.{key}=80" for key in ("max_steps", "validate_every", "checkpoint_every"))
WINDOWS = "{long_context: {window: 64, most: 8, context: 64, documents: 5, groups: 1}}"
WINDOW = f"evaluation_options={WINDOWS}"
"""Rows of 64 bytes, so that functions are cut."""
LENGTHS = {"T512": 64, "T8192": 256, "mixture": 128, "unmarked": 128}
DOSES = ["rows-T512", "leak-T512", "rows-T8192", "leak-T8192", "foreign-heads-T8192"]
DOSES += ["rows-mixture", "leak-mixture", "rows-unmarked", "leak-unmarked"]
AFTERS = [f"{arm}-post-{text}" for text in ("T8192", "T512", "mixture") for arm in ("rows", "leak")]


def _of(arms: list[str]) -> str:
    """Rows and windows of their own, where arms have them."""
    own = (
        f"{arm}: {{evaluation_options: {WINDOWS}, data.row_length: {LENGTHS[arm.rpartition('-')[2]]}}}" for arm in arms
    )
    return f"arms={{{', '.join(own)}}}"


STREAMS = "common={data.row_length: 64, data.streams: 512}"
POOL = (*TINY, *STEPS_OF_TINY, WINDOW, STREAMS)
ORDERS = "arms={pool-8: {data.streams: 128}, plain: {data.streams: 16}, shuffled: {data.shuffle_steps: 80}}"
WHOLE = "arms={whole: {data.row_length: 512}}"
SHORT = ("grid={seed: [1]}", *(f"trainer.{key}=36" for key in ("max_steps", "validate_every", "checkpoint_every")))
"""Enough steps for streams to have a second turn, after 32."""


def _step(name: str, *small: str, keys: tuple[str, ...] = ()) -> Step:
    return Step(f"{name}.yaml", ("jobs=auto", *keys), small=("jobs=1", *small), gpus=1, small_on_cpu=True)


FROM = "trainer.init_from={output}:zero"
ROWS = "common={data.row_length: 64, data.streams: 1, data.stagger: false, data.shuffle_steps: 80}"
STEPS = [
    _step("calibration", *POOL, "arms={zero: {}, control: {data.slots_per_batch: 512}}"),
    _step("ladder", *POOL),
    _step("ladder-more", *POOL, WHOLE),
    _step("order", *POOL, ORDERS),
    _step("leak", *TINY, *STEPS_OF_TINY, WINDOW, ROWS),
    _step("leak-dose", *TINY, *STEPS_OF_TINY, _of(DOSES), ROWS, "grid={seed: [1]}"),
    *(
        _step(name, *POOL, *SHORT)
        for name in ("carry-or-shuffle", "rows-512", "rows-8192", "ladder-rate", "long", "larger")
    ),
    _step("post", *POOL, *SHORT, "arms={shuffled-post: {data.shuffle_steps: 36}}", keys=(FROM,)),
    _step("post-leak", *TINY, *SHORT, WINDOW, ROWS, _of(AFTERS), keys=(FROM,)),
    _step("speed", *TINY, "common={data.row_length: 64, data.streams: 32}", WHOLE, "throughput_rounds=4"),
]


def _at(T: int) -> dict[str, str]:
    return {"setting": f"T = {T}, 14M, 100M tokens"}


MAIN = _at(2048)
AT_RATE = {"setting": f"{MAIN['setting']}, rate 0.004"}
AFTER = {"setting": "T = 2048, 14M, 32.8M tokens, post-training"}
ORDER = {"setting": f"{MAIN['setting']}, tuning seeds"}
HEADLINES = [
    *(
        Headline(
            f"{outcome} {places} T",
            "primary-files",
            MAIN | {"outcome": outcome, "places": places},
            "difference",
            alone="primary",
        )
        for outcome in ("coverage", "continuity")
        for places in ("inside", "beyond")
    ),
    *(
        Headline(f"own over zero {places} T", "ladder-files", MAIN | {"what": "own over zero"}, places, alone="ladder")
        for places in ("inside", "beyond")
    ),
    *(
        Headline(f"{name} minus the pool, beyond T", "order-files", where | {"what": what}, "beyond", alone="order")
        for name, what, where in (
            ("plain streams", "plain streams", ORDER),
            ("the pool's rows shuffled", "shuffled", MAIN),
        )
    ),
    Headline(
        "plain streams minus the pool's rows shuffled, beyond T",
        "order-files",
        ORDER | {"what": "plain streams, shuffled"},
        "beyond",
        alone="order",
    ),
    Headline(
        "own minus other shuffled rows, beyond T",
        "order-files",
        MAIN | {"what": "own, other rows"},
        "beyond",
        alone="order",
    ),
    *(
        Headline(
            f"own minus the pool's rows shuffled, {places} T",
            "order-files",
            MAIN | {"what": "own, shuffled"},
            places,
            alone="order",
        )
        for places in ("inside", "beyond")
    ),
    Headline("noise over zero beyond T", "ladder-files", MAIN | {"what": "noise"}, "beyond", alone="ladder"),
    *(
        Headline(f"{what} beyond T{of}", "ladder-files", setting | {"what": what}, "beyond", alone="ladder")
        for of, setting in (
            (" = 512", _at(512)),
            (", rate 0.004", AT_RATE),
            (", 262M tokens", {"setting": "T = 2048, 14M, 262M tokens"}),
        )
        for what in ("coverage", "continuity", "own over zero")
    ),
    *(
        Headline(name, "order-files", setting | {"what": "own, shuffled"}, places, alone="order")
        for name, setting, places in (
            ("own minus the pool's rows shuffled, inside T = 512", _at(512), "inside"),
            ("own minus the pool's rows shuffled, beyond T = 512", _at(512), "beyond"),
            ("own minus the pool's rows shuffled, beyond T, rate 0.004", AT_RATE, "beyond"),
        )
    ),
    *(
        Headline(
            f"{name} over zero beyond T, post-training",
            "ladder-files",
            AFTER | {"what": what},
            "beyond",
            alone="ladder",
        )
        for name, what in (("foreign", "coverage"), ("own", "own over zero"))
    ),
    *(
        Headline(
            f"rows of {T} minus rows of 2048",
            "row-length-files",
            {"arm": "rows", "rows": T},
            "all places",
            alone="row-length",
        )
        for T in (512, 8192)
    ),
    *(
        Headline(f"leak minus reset inside T, T = {T}", "leak-files", _at(T) | {"what": "leak"}, "inside", alone="leak")
        for T in (512, 2048, 8192)
    ),
    *(
        Headline(
            f"leak minus reset, post-training, {name}",
            table,
            {"setting": f"T = {T}, 14M, 32.8M tokens, post-training", "what": "leak"},
            "all places",
            alone="leak",
        )
        for name, table, T in (
            *((f"T = {T}", "leak-files", T) for T in (512, 2048, 8192)),
            ("mixture", "leak-mixture", 2048),
        )
    ),
    *(
        Headline(
            f"context gain at 8 T, {arm}", "context-gain-files", MAIN | {"arm": arm}, "gain_8", alone="context-gain"
        )
        for arm in ("zero", "foreign", "own")
    ),
    *(
        Headline(
            f"tokens/s of {arm} over zero's, as CUDA graphs",
            "throughput-files",
            {"arm": arm},
            "real_tokens_per_second",
            {"arm": "zero"},
            alone="throughput",
        )
        for arm in ("own", "foreign")
    ),
]
