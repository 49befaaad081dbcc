"""Sweeps that make this question's records, and its headline numbers."""

from experiments.common import steps_of
from experiments.reproduce import Headline, Step

TASKS = ("mqar", "selective_copying", "induction", "contradiction")
EQUAL_TIME = ("mqar", "contradiction")
MEANS = ("name=row-means", "trainer.mean_over=rows", "arms=[padded-row-means,packed-row-means]")
TIMED = (
    *(
        "data.num_documents=4000",
        "data.validation_fraction=0.01",
        "data.tokens_per_step=1024",
        "data.max_tokens_per_batch=2048",
    ),
    *("data.validation_documents=20", "model.d_model=16", "evaluation_examples=40", "data.num_workers=0"),
    *(*steps_of(40), "trainer.accelerator=cpu", "trainer.threads=1", "trainer.cuda_graphs=false"),
)
SMALL = (*TIMED, "jobs=1", "grid.seed=[1,2]")


def _sweep(name: str, *keys: str) -> Step:
    return Step(f"{name}.yaml", ("jobs=auto", *keys), small=SMALL, gpus=1, small_on_cpu=True)


TAKES = "2.6 hours of runs"
STEPS = [
    *(_sweep(task, "arms=[padded,packed-reset,packed-leak]") for task in TASKS),
    _sweep("mqar", *MEANS),
    Step("speed.yaml", small=("throughput_rounds=2", *TIMED), gpus=1, small_on_cpu=True),
    *(_sweep(f"equal-time-{task}") for task in EQUAL_TIME),
]
ROWS = [
    *((f"{arm} minus padded, nats an answer", arm, "difference") for arm in ("packed-reset", "packed-leak")),
    *((f"accuracy of {arm}", arm, "accuracy") for arm in ("padded", "packed-reset", "packed-leak")),
]
TIME = "packed in padded's GPU time, minus padded, nats an answer"
HEADLINES = [
    Headline(f"{task}: {name}", f"answers-{task}", {"arm": arm}, column)
    for tasks, rows in ((TASKS, ROWS), (EQUAL_TIME, [(TIME, "packed-equal-time", "difference")]))
    for task in tasks
    for name, arm, column in rows
]
