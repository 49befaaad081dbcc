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
    _step("post", *POOL, *SHORT, keys=(FROM,)),
    _step("post-more", *POOL, *SHORT, "arms={shuffled-post: {data.shuffle_steps: 36}}", keys=(FROM,)),
    _step("post-leak", *TINY, *SHORT, WINDOW, ROWS, _of(AFTERS), keys=(FROM,)),
    _step("speed", *TINY, "common={data.row_length: 64, data.streams: 32}", WHOLE, "throughput_rounds=4"),
]


def _at(T: int) -> dict[str, str]:
    return {"setting": f"T = {T}, 14M, 100M tokens"}


def _small(steps: int = 80, T: int = 64, after: str = "rate 0.005") -> dict[str, str]:
    """What the tables of a small version call the setting."""
    return {"setting": f"T = {T}, width 64, {1024 * steps / 1e6:.3g}M tokens, {after}"}


def _small_after(T: int = 64) -> dict[str, str]:
    return _small(36, T, "post-training")


SMALL, BRIEF = _small(), _small(36)
MAIN = _at(2048)
LONG = {"setting": "T = 2048, 14M, 262M tokens"}
LARGER = {"setting": "T = 2048, 47M, 100M tokens"}
OUTCOMES = ("coverage", "continuity", "own over zero")
AT_RATE = {"setting": f"{MAIN['setting']}, rate 0.004"}
AFTER = {"setting": "T = 2048, 14M, 32.8M tokens, post-training"}
ORDER = {"setting": f"{MAIN['setting']}, tuning seeds"}


def _headline(
    name: str,
    table: str,
    setting: dict[str, str],
    what: str | dict[str, object],
    column: str,
    small: dict[str, str] = SMALL,
    unit: str = "files",
) -> Headline:
    row = {"what": what} if isinstance(what, str) else what
    return Headline(name, f"{table}-{unit}", setting | row, column, alone=table, small=small)


INSIDE_AND_BEYOND = ("inside", "beyond")
SHUFFLED = "own minus the pool's rows shuffled"
HEADLINES = [
    *(
        _headline(f"{outcome} {places} T", "primary", MAIN, {"outcome": outcome, "places": places}, "difference")
        for outcome in ("coverage", "continuity")
        for places in INSIDE_AND_BEYOND
    ),
    *(_headline(f"own over zero {places} T", "ladder", MAIN, "own over zero", places) for places in INSIDE_AND_BEYOND),
    *(
        _headline(f"{what} {places} T, 262M tokens", "ladder", LONG, what, places, BRIEF)
        for what in OUTCOMES
        for places in INSIDE_AND_BEYOND
    ),
    _headline("plain streams minus the pool, beyond T", "order", ORDER, "plain streams", "beyond"),
    _headline("the pool's rows shuffled minus the pool, beyond T", "order", MAIN, "shuffled", "beyond"),
    _headline(
        "plain streams minus the pool's rows shuffled, beyond T", "order", ORDER, "plain streams, shuffled", "beyond"
    ),
    _headline("own minus other shuffled rows, beyond T", "order", MAIN, "own, other rows", "beyond"),
    *(_headline(f"{SHUFFLED}, {places} T", "order", MAIN, "own, shuffled", places) for places in INSIDE_AND_BEYOND),
    _headline("noise over zero beyond T", "ladder", MAIN, "noise", "beyond"),
    *(_headline(f"{what} minus own, beyond T", "ladder", MAIN, what, "beyond") for what in ("own scan", "whole")),
    *(
        _headline(f"own over zero {places} T, 47M parameters", "ladder", LARGER, "own over zero", places, BRIEF)
        for places in INSIDE_AND_BEYOND
    ),
    *(
        _headline(f"{what} beyond T{of}", "ladder", setting, what, "beyond", BRIEF)
        for of, setting in (
            (" = 512", _at(512)),
            (", rate 0.004", AT_RATE),
            (" = 8192", _at(8192)),
        )
        for what in OUTCOMES
    ),
    *(
        _headline(f"{SHUFFLED}, {name}", "order", setting, "own, shuffled", places, BRIEF)
        for name, setting, places in (
            ("inside T = 512", _at(512), "inside"),
            ("beyond T = 512", _at(512), "beyond"),
            ("beyond T, rate 0.004", AT_RATE, "beyond"),
        )
    ),
    *(
        _headline(f"{name} over zero beyond T, post-training", "ladder", AFTER, what, "beyond", _small_after())
        for name, what in (("foreign", "coverage"), ("noise", "noise"), ("own", "own over zero"))
    ),
    _headline(f"{SHUFFLED}, beyond T, post-training", "order", AFTER, "own, shuffled", "beyond", _small_after()),
    *(
        _headline(f"rows of {T} minus rows of 2048", "row-length", {}, {"arm": "rows", "rows": T}, "all places", {})
        for T in (512, 8192)
    ),
    *(
        _headline(f"leak minus reset inside T, T = {T}", "leak", _at(T), "leak", "inside", _small(T=small))
        for T, small in ((512, 64), (2048, 64), (8192, 256))
    ),
    *(
        _headline(
            f"leak minus reset, post-training, {name}",
            "leak",
            AFTER | {"setting": AFTER["setting"].replace("2048", str(T))},
            "leak",
            "all places",
            _small_after(small),
            unit,
        )
        for name, unit, T, small in (
            ("T = 512", "files", 512, 64),
            ("T = 2048", "files", 2048, 64),
            ("T = 8192", "files", 8192, 256),
            ("mixture", "mixture", 2048, 128),
        )
    ),
    *(
        _headline(f"context gain at 8 T, {arm}", "context-gain", MAIN, {"arm": arm}, "gain_8")
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
