"""Faults of the command line: commands, arguments and assignments that are none."""

from __future__ import annotations

from collections.abc import Iterator

from files import LINES, write
from trials import Trial

from packmamba.cli import COMMANDS

NEEDS = {"sweep": 1, "eval": 1, "generate": 2, "export": 2, "leakcheck": 1, "questions": 1, "kernels": 1}
"""How many words a command cannot do without."""
TAKES_KEYS = ("demo", "train", "corpus", "eval", "generate", "questions", "leakcheck", "sweep", "bench", "reproduce")


def commands() -> Iterator[Trial]:
    for word in (
        "trian",
        "Train",
        "TRAIN",
        "",
        " ",
        "-",
        "--",
        "train.yaml",
        "42",
        "train,eval",
        "\0",
        "ä",
        "x" * 3000,
        "--unknown",
        "-z",
        "None",
        "data.source=jsonl",
        "../train",
        "eval\n",
        "__init__",
        "main",
    ):
        yield Trial("command: unknown", (word,) if word else ("",))
    yield Trial("command: none", ())
    for command in COMMANDS:
        yield Trial("option: unknown", (command, "--nope"), "nope|required|expected")
        yield Trial("option: unknown", (command, *["x"] * NEEDS.get(command, 0), "-q=3"), "q=3|x|required")
    for command, count in NEEDS.items():
        for given in range(count):
            yield Trial("argument: missing", (command, *["x"] * given), "required|expected|x")
    for command in ("report", "export", "kernels"):
        yield Trial(
            "argument: one too many",
            (command, *["info" if command == "kernels" else "x"] * (NEEDS.get(command, 1) + 1)),
            "",
        )
    yield Trial("argument: unknown", ("kernels", "destroy"), "destroy")
    for command in ("bench", "reproduce", "report"):
        for name in (
            "nothing",
            "speedup/nothing",
            "/",
            "..",
            "../speedup",
            "speedup/",
            "a/b/c",
            "",
            "\0",
            "x" * 300,
            "*",
            "speedup.yaml",
            "ä/ö",
        ):
            if (command, name) not in {("report", ".."), ("report", "/"), ("bench", "speedup/")}:
                yield Trial(f"name: of {command}", (command, name), "")


def assignments() -> Iterator[Trial]:
    for word in (
        "data.strategy",
        "=",
        "=3",
        "data.strategy:best_fit",
        "--data.strategy=padded",
        ".",
        "..",
        ".=1",
        "data.=1",
        ".data=1",
        "data..strategy=padded",
        "data strategy=padded",
        "data/strategy=padded",
        "data.strategy==padded",
        "data.strategy= =",
        "data.strategy.x=1",
        "seed.x=1",
        "seed[0]=1",
        "data[=1",
        "data]=1",
        "data.strategy=[",
        "data.strategy={",
        "data.strategy='",
        'data.strategy="',
        "seed=*a",
        "seed=&a",
        "seed=!!python/object:os.system",
        "seed=${nope}",
        "seed=${seed}",
        "seed=${",
        "seed=${oc.env:NOT_THERE_AT_ALL}",
        "seed=${oc.decode:x}",
        "seed=???",
        "seed=%",
        "seed=@x",
        "seed=`x`",
        "seed=a: b",
        "seed=- 1",
        "seed=1\n2",
        "seed=\t",
        "seed=\0",
        "ä=1",
        "seed=ä",
        "\0=1",
        "x" * 5000,
        "x" * 5000 + "=1",
        "seed=" + "9" * 5000,
        "seed=" + "[" * 500,
        "data={source: nowhere}",
        "data={sourc: jsonl}",
        "data={1: 2}",
        "data={null: 2}",
        "data={[1]: 2}",
        "data=[source]",
        "data=text",
        "data=",
        "data=null",
        "model=13b",
        "model=null",
        "model=[130m]",
        "model={}x",
        "model=../train",
        "model=130m.yaml",
        "model=",
        "trainer={max_steps: many}",
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9,0.95,0.99]",
        "optimizer.betas=[0.9,1]",
        "optimizer.betas=[a,b]",
        "optimizer.betas=[.nan,0.9]",
        "optimizer.betas=[-1,0.9]",
        "optimizer.options={a: 1}",
        "model.mixer_options={a: 1}",
        "model.mixer_options={dt_max: -1}",
        "model.mixer_options={dt_max: a}",
        "model.mixer_options={dt_max: null}",
        "model.mixer_options={bias: {}}",
        "trainer.boundary_options={a: 1}",
        "trainer.boundary=carry",
        "evaluations=[mqar,mqar]",
        "evaluations=[mqar] evaluation_options={mqar: 3}",
        "evaluation_options={mqar: {}}",
        "plugins=[nothing_of_this_name]",
        "plugins=['']",
        "plugins=[os.path.nope]",
        "plugins=[../x]",
        "plugins=[.x]",
        "plugins=[1]",
        "data.validation_fraction=1",
        "data.validation_fraction=0",
        "data.validation_fraction=1.5",
        "data.row_length=null data.strategy=greedy",
        "data.streams=2",
        "data.stagger=true",
        "data.shuffle_steps=3",
        "data.unit=files",
        "data.source=task",
        "data.source=task data.task=mqar data.task_options={a: 1}",
        "trainer.devices=1000",
        "trainer.num_nodes=2",
        "trainer.strategy=fsdp2 trainer.precision=16-mixed",
        "trainer.cuda_graphs=true",
        "trainer.accelerator=tpu",
        "trainer.threads=0",
        "trainer.threads=99999",
        "ops.backend=cuda",
        "ops.backend=mamba_ssm",
        "model.d_conv=5",
        "model.d_state=1000",
        "model.d_state=257",
        "model.d_model=1000000000",
        "model.d_model=200000",
        "model.vocab_size=10000000000",
        "model.vocab_size=3",
        "model.n_layer=99999999",
        "model.expand=99999999",
        "data.slots_per_batch=99999999999999",
        "data.tokens_per_step=99999999999999",
        "data.row_length=99999999999999",
        "data.row_length=2147483647",
        "data.num_workers=99999",
        "data.num_proc=99999",
        "trainer.average_snapshots=99999999",
        "model.dt_rank=99999999999",
        f"name={'n' * 300}",
        "name=ab/../cd\0",
        "data.begin_token=''",
        "data.text_key=body",
        "data.tokenizer=nowhere.json",
        "data.source=synthetic",
        "data.source=stdlib",
        "data.path=null",
        "data.source=task data.task=mqar data.path=null data.task_options={num_pairs: 1000000000000}",
        "data.source=task data.task=mqar data.path=null data.task_options={vocab_size: 1000000000000}",
    ):
        yield Trial("assignment", ("train", *BASE, *_split(word)), "", write("docs", LINES))
    for command in TAKES_KEYS:
        first = {
            "sweep": ["it.yaml"],
            "eval": ["m"],
            "generate": ["m", "x"],
            "leakcheck": ["m"],
            "questions": ["q"],
            "bench": ["packing"],
            "reproduce": ["packing"],
        }.get(command, [])
        for word in ("word", "=1", "nope=1", "nope.nope=1", "seed=[", "seed==", "x" * 3000 + "=1", "\0=1"):
            yield Trial(f"assignment: to {command}", (command, *first, word), "", write("it.yaml", "arms: {a: {}}\n"))


BASE = (
    "data.source=jsonl",
    "data.path=docs",
    "data.num_proc=1",
    "model.d_model=8",
    "model.n_layer=1",
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
)


def _split(word: str) -> list[str]:
    """Several assignments, where each word has a key."""
    parts = word.split(" ")
    return parts if all("=" in part.split("{")[0] for part in parts) and len(parts) > 1 and ": " not in word else [word]
