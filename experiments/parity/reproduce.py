"""Sweeps and benches that make this question's records, and its headline numbers."""

from typing import Any

from packmamba.reproduce import Headline, Step

TINY = (
    *("data.source=stdlib", "data.path=null", "data.unit=null", "data.cut_documents=256", "data.tokens_per_step=2048"),
    *("data.validation_documents=60", "data.num_workers=0", "model.d_model=32"),
    *("model.n_layer=2", "model.compile=false"),
    *("optimizer.lr=5.0e-3", "optimizer.warmup_steps=5", "trainer.precision=32-true", "trainer.accelerator=cpu"),
    *(f"trainer.{key}=40" for key in ("max_steps", "validate_every", "checkpoint_every")),
    "trainer.threads=1",
)
SMALL = (*TINY, "jobs=1", "grid.seed=[1,2,3]", "common={data.row_length: 256}")
GRADIENTS = (
    f"keys=[{', '.join(key for key in TINY if 'precision' not in key)}]",
    "arms={padded: [data.strategy=padded, data.row_length=null], packed-reset: [data.strategy=greedy, data.row_length=256], "
    "packed-leak: [data.strategy=greedy, data.row_length=256, trainer.boundary=leak], single: [data.strategy=single]}",
    "at=[0, 20, 39]",
)
PEERS = ("mamba_ssm", "causal_conv1d")
UNITS = ("files", "functions", "mixture")
MAIN = "padded,packed-reset,packed-control"


def _sweep(name: str, arms: str, *keys: str, **more: Any) -> Step:
    return Step("parity.yaml", ("jobs=auto", f"name={name}", f"arms=[{arms}]", *keys), gpus=1, **more)


def _suffixed(suffix: str, arms: str = MAIN) -> str:
    return ",".join(f"{arm}-{suffix}" for arm in arms.split(","))


def _steps(steps: int) -> tuple[str, ...]:
    return tuple(f"trainer.{key}={steps}" for key in ("max_steps", "validate_every", "checkpoint_every"))


SEED_2 = ("keys=[data.unit=mixture,data.num_workers=0,seed=2]", "arms=[padded,packed-reset,packed-control]")
TAKES = "6 hours of runs"
STEPS = [
    _sweep(
        "files", MAIN, small=(*SMALL, "arms={packed-control: {data.max_tokens_per_batch: 1024}}"), small_on_cpu=True
    ),
    *(_sweep(unit, MAIN, f"data.unit={unit}") for unit in UNITS[1:]),
    *(_sweep(f"leak-{unit}", "packed-leak", f"data.unit={unit}") for unit in UNITS[:2]),
    _sweep("single", "single", "grid.seed=[1,2,3,4,5]"),
    _sweep("single-mamba-ssm", "single-mamba-ssm", "grid.seed=[1,2,3,4,5]", packages=PEERS),
    _sweep("float32", _suffixed("float32"), "grid.seed=[1,2,3,4,5]"),
    _sweep("float32-mixture", _suffixed("float32"), "grid.seed=[1,2,3]", "data.unit=mixture"),
    _sweep("files-rate", _suffixed("rate")),
    _sweep("mixture-long", "padded-long,packed-reset-long"),
    _sweep("mixture-more", "padded-more,packed-reset-more,packed-leak-more", "grid.seed=[9,10,11,12,13,14,15,16]"),
    _sweep("equal-time-files", "packed-equal-time"),
    _sweep("equal-time-functions", "packed-equal-time", "data.unit=functions", *_steps(1192)),
    _sweep("equal-time-mixture", "packed-equal-time", "data.unit=mixture", *_steps(715)),
    Step(
        "speed.yaml",
        (f"arms=[{MAIN},'padded, functions','packed-reset, functions','padded, mixture','packed-reset, mixture']",),
        gpus=1,
    ),
    Step(
        "speed.yaml",
        (
            "name=speed-single",
            "throughput_rounds=10",
            "arms=[single,'single, eager','padded, beside single','packed-reset, beside single']",
        ),
        gpus=1,
    ),
    Step("gradients.yaml", small=GRADIENTS, gpus=1, packages=PEERS, small_on_cpu=True),
    *(
        Step(
            "gradients.yaml",
            (
                f"keys=[data.unit={unit},data.num_workers=0]",
                "arms=[padded,packed-reset,packed-control,packed-leak,single]",
            ),
            gpus=1,
        )
        for unit in UNITS[1:]
    ),
    # Every step from 50 to 100, where the mixture's runs in float32 of seed 2 part.
    Step("gradients.yaml", (*SEED_2, "precisions=[32-true]", f"at={[*range(50, 101)]}"), gpus=1),
]


def _trained(unit: str, name: str, arm: str = "packed-reset", column: str = "difference") -> Headline:
    small = unit == "files" and arm in MAIN
    return Headline(f"{unit}: {name}", f"parity-{unit}", {"arm": arm}, column, alone="parity" if small else "")


SINGLE = "files: packed with reset, times as fast as one document at a time, as CUDA graphs"
CONTROL = {"arm": "packed-control", "weights": "mean of the last"}
HEADLINES = [
    *(_trained(unit, "packed with reset minus padded") for unit in UNITS),
    *(_trained(unit, "packed in padded's GPU time, minus padded", "packed-equal-time") for unit in UNITS),
    *(_trained(unit, "loss of padded", "padded", "loss") for unit in UNITS),
    _trained("mixture", "packed with reset minus padded, 100 million bytes", "packed-reset-long"),
    _trained("mixture", "packed with reset minus padded, more documents", "packed-reset-more"),
    _trained("files", "packed with reset minus padded, twice the rate", "packed-reset-rate"),
    _trained("files", "one document at a time minus padded", "single"),
    Headline(SINGLE, "throughput-files", {"arm": "packed-reset, beside single"}, "speedup"),
    Headline("files: sd of control minus packed with reset", "calibration-files", CONTROL, "sd", alone="calibration"),
]
