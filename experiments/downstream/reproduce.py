"""What makes the experiment's records, and the numbers that its README rests on."""

from packmamba.experiments import Headline, Step

TASKS = ("mqar", "selective_copying", "induction", "contradiction")
TINY = (
    "data.num_documents=4000", "data.validation_fraction=0.01", "data.tokens_per_step=1024", "data.slots_per_batch=2048",
    "data.validation_documents=20", "model.d_model=16", "evaluation_examples=40", "trainer.max_steps=40",
    "trainer.validate_every=40", "trainer.checkpoint_every=40", "trainer.accelerator=cpu", "trainer.threads=1",
    "trainer.cuda_graphs=false", "data.num_workers=0", "grid={seed: [1, 2]}",
    "tune.grid={optimizer.lr: [5.0e-3]}", "tune.seeds=[100]",
)  # fmt: skip

TIMED = tuple(key for key in TINY if not key.startswith(("tune", "grid")))

STEPS = [
    Step(f"{name}.yaml", ("jobs=auto",), small=("jobs=1", *TINY), gpus=1, small_on_cpu=True)
    for name in (*TASKS, "row-means")
]
STEPS.append(Step("speed.yaml", (), small=("throughput_rounds=2", *TIMED), gpus=1, small_on_cpu=True))
EQUAL_TIME = ("mqar", "contradiction")
STEPS += [
    Step(
        f"equal-time-{task}.yaml",
        ("jobs=auto",),
        small=("jobs=1", *TIMED, "grid={seed: [1, 2]}"),
        gpus=1,
        small_on_cpu=True,
    )
    for task in EQUAL_TIME
]

ROWS = [
    *((f"{arm} minus padded, nats an answer", arm, "difference") for arm in ("packed-reset", "packed-leak")),
    *((f"accuracy of {arm}", arm, "accuracy") for arm in ("padded", "packed-reset", "packed-leak")),
]
HEADLINES = [
    Headline(f"{task}: {name}", f"answers-{task}", {"arm": arm}, column) for task in TASKS for name, arm, column in ROWS
]
HEADLINES += [
    Headline(
        f"{task}: packed in padded's GPU time, minus padded, nats an answer",
        f"answers-{task}",
        {"arm": "packed-equal-time"},
        "difference",
    )
    for task in EQUAL_TIME
]
