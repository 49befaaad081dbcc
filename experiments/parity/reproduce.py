"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

TINY = (
    "data.source=stdlib", "data.path=null", "data.unit=null", "data.cut_documents=256", "data.tokens_per_step=2048",
    "data.validation_documents=60", "data.num_workers=0", "model.d_model=32", "model.n_layer=2", "model.compile=false",
    "optimizer.lr=5.0e-3", "optimizer.warmup_steps=5", "trainer.max_steps=40", "trainer.validate_every=40",
    "trainer.checkpoint_every=40", "trainer.precision=32-true", "trainer.accelerator=cpu", "trainer.threads=1",
    "grid={seed: [1, 2, 3]}",
)  # fmt: skip
"""On a CPU, with the standard library's functions."""
PACKED = "packed-reset: {data.strategy: greedy, data.row_length: 256}"
CONTROL = "packed-control: {data.strategy: in_order, data.row_length: 256, data.slots_per_batch: 1024}"
PADDED = "padded: {data.strategy: padded, data.row_length: null}"


UNITS = ("files", "functions", "mixture")


def _step(name: str, *small: str, sweep: tuple[str, ...] = ("jobs=auto",)) -> Step:
    return Step(f"{name}.yaml", sweep, small=("jobs=1", *TINY, *small), gpus=1, small_on_cpu=True)


PEERS = ("mamba_ssm", "causal_conv1d")
GRADIENTS = (
    f"keys=[{', '.join(key for key in TINY if not key.startswith(('grid', 'trainer.precision')))}]",
    "arms={padded: [data.strategy=padded, data.row_length=null], packed-reset: [data.strategy=greedy, data.row_length=256], "
    "single: [data.strategy=single]}",
    "at=[0, 20, 39]",
)
STEPS = [
    _step("calibration", f"arms={{{PACKED}, {CONTROL}}}"),
    _step("files", f"arms={{{PADDED}, {PACKED}, {CONTROL}}}"),
    Step("gradients.yaml", small=GRADIENTS, gpus=1, packages=PEERS, small_on_cpu=True),
    *(Step(f"gradients-{name}.yaml", small=("at=[0]",), gpus=1) for name in ("functions", "mixture", "parting")),
    Step("functions.yaml", ("jobs=auto",), small=("trainer.max_steps=40",), gpus=1),
    Step("mixture.yaml", ("jobs=auto",), small=("trainer.max_steps=40",), gpus=1),
    Step("single.yaml", ("jobs=auto",), small=("trainer.max_steps=40", "trainer.cuda_graphs=false"), gpus=1),
    Step(
        "single-mamba-ssm.yaml",
        ("jobs=auto",),
        small=("trainer.max_steps=40",),
        gpus=1,
        packages=PEERS,
    ),
    Step("functions-control.yaml", ("jobs=auto",), small=("trainer.max_steps=40",), gpus=1),
    Step("mixture-control.yaml", ("jobs=auto",), small=("trainer.max_steps=40",), gpus=1),
    *(
        Step(f"{name}.yaml", ("jobs=auto",), small=("trainer.max_steps=40",), gpus=1)
        for name in ("float32", "float32-mixture", "files-rate", "mixture-long", "mixture-more", "tokenizer")
    ),
    *(
        Step(f"{name}.yaml", (), small=("throughput_rounds=3", "trainer.cuda_graphs=false"), gpus=1)
        for name in ("speed", "speed-single")
    ),
    *(Step(f"equal-time-{unit}.yaml", ("jobs=auto",), small=("trainer.max_steps=60",), gpus=1) for unit in UNITS),
]


def _trained(unit: str, name: str, arm: str, column: str) -> Headline:
    small = unit == "files" and arm not in ("packed-equal-time", "single", "packed-reset-rate")
    return Headline(f"{unit}: {name}", f"parity-{unit}", {"arm": arm}, column, alone="parity" if small else "")


def _speed(unit: str) -> Headline:
    arm = "packed-reset" if unit == "files" else f"packed-reset, {unit}"
    return Headline(f"{unit}: steps in the time of one of padded", f"equal-time-{unit}", {"arm": arm}, "ratio")


def _over_single(name: str, arm: str) -> Headline:
    name = f"files: packed with reset, times as fast as one document at a time, {name}"
    packed = {"arm": "packed-reset, beside single"}
    return Headline(name, "throughput-files", packed, "real_tokens_per_second", {"arm": arm})


def _control(name: str, column: str, weights: str = "mean of the last") -> Headline:
    row = {"arm": "packed-control", "weights": weights}
    return Headline(f"files: {name}", "calibration-files", row, column, alone="calibration")


def _apart(unit: str, name: str, arm: str) -> Headline:
    alone = "drift" if arm != "packed-reset-float32" and unit == "files" else ""
    return Headline(f"{unit}: difference of a step's loss: {name}", f"drift-{unit}", {"arm": arm}, "later", alone=alone)


def _gradients(unit: str, name: str, precision: str, arm: str = "packed-reset") -> Headline:
    row = {"arm": arm, "precision": precision}
    name = f"{unit}: gradients of a step, largest difference: {name}"
    return Headline(name, f"gradients-{unit}", row, "relative_difference", alone="gradients" if unit == "files" else "")


def _inside(unit: str, arm: str = "packed-reset", said: str = "") -> Headline:
    name = f"{unit}: packed with reset minus padded{said}, inside the first 2048 bytes"
    return Headline(name, f"places-{unit}", {"arm": arm}, "inside")


LONG, LONGER = "packed-reset-long", ", 100 million bytes"
HEADLINES = [
    *(_trained(unit, "packed with reset minus padded", "packed-reset", "difference") for unit in UNITS),
    *(_inside(unit) for unit in UNITS),
    _trained("mixture", f"packed with reset minus padded{LONGER}", LONG, "difference"),
    _inside("mixture", LONG, LONGER),
    _trained("mixture", "packed with reset minus padded, more documents", "packed-reset-more", "difference"),
    _trained("mixture", "packed with a leak minus padded, more documents", "packed-leak-more", "difference"),
    _trained("files", "packed with reset minus padded, twice the rate", "packed-reset-rate", "difference"),
    _trained("mixture", "packed with reset minus padded, in float32", "packed-reset-float32", "difference"),
    _trained("files", "one document at a time minus padded", "single", "difference"),
    *(_trained(u, "sums in another order, minus packed with reset", "packed-control", "difference") for u in UNITS),
    *(_apart(unit, "packed and padded", "packed-reset") for unit in UNITS),
    *(_apart(unit, "sums in another order", "packed-control") for unit in UNITS),
    *(_apart(unit, "packed and padded in float32", "packed-reset-float32") for unit in ("files", "mixture")),
    _gradients(
        "files", "one document at a time, mamba-ssm's kernels, and padded in float32", "32-true", "single-mamba-ssm"
    ),
    *(
        _gradients(unit, *which)
        for unit in UNITS
        for which in (
            ("packed and padded in float32", "32-true"),
            ("one document at a time, our kernels, and padded in float32", "32-true", "single"),
            ("packed and padded in bfloat16", "bf16-mixed"),
            ("padded in bfloat16 and in float32", "bf16-mixed", "padded"),
        )
    ),
    *(_speed(unit) for unit in UNITS),
    *(_over_single(name, arm) for name, arm in (("as CUDA graphs", "single"), ("without graphs", "single, eager"))),
    *(_trained(unit, "packed in padded's GPU time, minus padded", "packed-equal-time", "difference") for unit in UNITS),
    *(_trained(unit, "loss of padded", "padded", "loss") for unit in UNITS),
    *(_trained(unit, "loss of packed with reset", "packed-reset", "loss") for unit in UNITS),
    _control("loss of packed with reset, last weights", "loss", "last, by the trainer"),
    _control("standard deviation of control minus packed with reset", "sd"),
    _control("the largest of these differences", "largest"),
    _control("seeds for equivalence within 0.005 nats", "seeds_equivalence"),
]
