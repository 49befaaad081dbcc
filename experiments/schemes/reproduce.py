"""List the steps that make the records, and the README's headline numbers."""

from experiments.reproduce import Headline, Step

TAKES = "an hour on two cores"
STEPS = [
    Step(
        "schemes.yaml",
        small=("grid.seed=[0,1]", "trainer.max_steps=20", "trainer.validate_every=20", "data.validation_documents=20"),
    )
]

HEADLINES = [
    Headline(f"{where}: {name} minus padded", "differences", {"arm": arm}, metric)
    for where, metric in (("validation loss", "val_loss"), ("its first 32 tokens", "val_loss_start"))
    for name, arm in (
        ("packed with reset", "packed-reset"),
        ("packed with reset, sums in another order,", "packed-control"),
        ("packed with leak", "packed-leak"),
        ("packed with carry", "packed-carry"),
    )
]
