"""Sweeps and benches that make this question's records, and its headline numbers."""

from typing import Any

from experiments.common import steps_of, suffixed
from experiments.reproduce import Headline, Step

TINY = (
    *("data.source=stdlib", "data.path=null", "data.unit=null", "data.cut_documents=256", "data.tokens_per_step=2048"),
    *("data.validation_documents=60", "data.num_workers=0", "model.d_model=32"),
    *("model.n_layer=2", "model.compile=false"),
    *("optimizer.lr=5.0e-3", "optimizer.warmup_steps=5", "trainer.precision=32-true", "trainer.accelerator=cpu"),
    *(*steps_of(40), "trainer.threads=1"),
)
SMALL = (*TINY, "jobs=1", "grid.seed=[1,2,3]", "common={data.row_length: 256}")
# Rows of two documents of the longest: of one, a step whose documents all have that length has no
# leak.
GRADIENTS = (
    f"keys=[{', '.join(key for key in TINY if 'precision' not in key)}]",
    "arms={padded: [data.strategy=padded, data.row_length=null], packed-reset: [data.strategy=greedy, data.row_length=512], "
    "packed-leak: [data.strategy=greedy, data.row_length=512, trainer.boundary=leak], single: [data.strategy=single]}",
    "at=[0, 20, 39]",
)
PEERS = ("mamba_ssm", "causal_conv1d")
UNITS = ("files", "functions", "mixture")
MAIN = ("padded", "packed-reset", "packed-control")
ALL = ",".join(MAIN)


def _sweep(name: str, arms: str, *keys: str, **more: Any) -> Step:
    return Step("parity.yaml", ("jobs=auto", f"name={name}", f"arms=[{arms}]", *keys), gpus=1, **more)


def _bench(name: str, *keys: str, **more: Any) -> Step:
    return Step(f"{name}.yaml", keys, gpus=1, **more)


CONTROL_SMALL = "arms={packed-control: {data.max_tokens_per_batch: 1024}}"
GRADIENT_ARMS = f"arms=[{ALL},packed-leak,single]"
TIMES = {"equal": (514, 1192, 715), "sorted": (932, 1420, 1336), "fastest-sorted": (None, 818, 660)}
LONGER = [(time, unit, count) for time, counts in TIMES.items() for unit, count in zip(UNITS, counts) if count]
SPEED = ("padded", "padded-sorted", "padded-sorted-65536", "padded-sorted-131072", "packed-reset")
TIMED = f"arms=[{','.join([repr(arm + of) for of in ('', ', functions', ', mixture') for arm in SPEED])}]"
TIMED_SINGLE = "arms=[single,'single, eager','padded, beside single','packed-reset, beside single']"
SEED_2 = ("keys=[data.unit=mixture,data.num_workers=0,seed=2]", f"arms=[{ALL}]")
TAKES = "6 hours of runs"
STEPS = [
    _sweep("files", ALL, small=(*SMALL, CONTROL_SMALL), small_on_cpu=True),
    *(_sweep(unit, ALL, f"data.unit={unit}") for unit in UNITS[1:]),
    *(_sweep(f"leak-{unit}", "packed-leak", f"data.unit={unit}") for unit in UNITS[:2]),
    _sweep("single", "single", "grid.seed=[1,2,3,4,5]"),
    _sweep("single-mamba-ssm", "single-mamba-ssm", "grid.seed=[1,2,3,4,5]", packages=PEERS),
    _sweep("float32", suffixed("float32", *MAIN), "grid.seed=[1,2,3,4,5]"),
    _sweep("float32-mixture", suffixed("float32", *MAIN), "grid.seed=[1,2,3]", "data.unit=mixture"),
    _sweep("files-rate", suffixed("rate", *MAIN)),
    _sweep("mixture-long", "padded-long,packed-reset-long"),
    _sweep("mixture-more", "padded-more,packed-reset-more,packed-leak-more", "grid.seed=[9,10,11,12,13,14,15,16]"),
    *(_sweep(f"{t}-time-{unit}", f"packed-{t}-time", f"data.unit={unit}", *steps_of(n)) for t, unit, n in LONGER),
    _bench("speed", TIMED),
    _bench("speed", "name=speed-single", "throughput_rounds=10", TIMED_SINGLE),
    _bench("gradients", small=GRADIENTS, packages=PEERS, small_on_cpu=True),
    *(_bench("gradients", f"keys=[data.unit={unit},data.num_workers=0]", GRADIENT_ARMS) for unit in UNITS[1:]),
    # Every step from 50 to 100, where the mixture's runs in float32 of seed 2 part.
    _bench("gradients", *SEED_2, "precisions=[32-true]", f"at={[*range(50, 101)]}"),
]


def _trained(unit: str, name: str, arm: str = "packed-reset", column: str = "difference") -> Headline:
    small = unit == "files" and arm in MAIN
    return Headline(f"{unit}: {name}", f"parity-{unit}", {"arm": arm}, column, alone="parity" if small else "")


SINGLE = "files: packed with reset, times as fast as one document at a time, as CUDA graphs"
CONTROL = {"arm": "packed-control", "weights": "mean of the last"}
HEADLINES = [
    *(_trained(unit, "packed with reset minus padded") for unit in UNITS),
    *(_trained(unit, "packed in padded's GPU time, minus padded", "packed-equal-time") for unit in UNITS),
    *(_trained(unit, "packed in sorted's GPU time, minus padded", "packed-fastest-sorted-time") for unit in UNITS[1:]),
    *(_trained(unit, "loss of padded", "padded", "loss") for unit in UNITS),
    _trained("mixture", "packed with reset minus padded, 100 million bytes", "packed-reset-long"),
    _trained("mixture", "packed with reset minus padded, more documents", "packed-reset-more"),
    _trained("files", "packed with reset minus padded, twice the rate", "packed-reset-rate"),
    _trained("files", "one document at a time minus padded", "single"),
    Headline(SINGLE, "throughput-files", {"arm": "packed-reset, beside single"}, "speedup"),
    Headline("files: sd of control minus packed with reset", "calibration-files", CONTROL, "sd", alone="calibration"),
]
