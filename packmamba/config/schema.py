"""Every key of a training configuration, one dataclass per section: default, sentence, rules; below them, rules between keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from packmamba.config.rules import (
    Holds,
    above,
    at_least,
    at_most,
    between,
    chosen,
    each,
    key,
    named,
    one_of,
    options,
    unique,
    unknown_options,
)
from packmamba.config.sections import between_sections
from packmamba.config.streams import Streams

LENGTH = Holds("1 to 2**31 - 1", lambda value: 1 <= value < 2**31)
SIZE = Holds("an integer of at least 1", lambda value: value >= 1)
SIZES = (SIZE, at_most(2**20))
COUNT = (at_least(1), at_most(2**31 - 1))
VOCABULARY = Holds("1 to 2**32", lambda value: 1 <= value <= 2**32)
PROCESSES = 1024
TOKEN = Holds("a token", bool)


@dataclass
class DataConfig(Streams):
    source: str = key(
        "stdlib",
        "Where documents come from: stdlib (its functions), text, jsonl or parquet (files of yours), packages (Python code), "
        "huggingface (a data set), megatron (ids), task, synthetic (random).",
        named("packmamba.data.sources:SOURCES"),
    )
    path: Optional[str] = key(
        None,
        "A folder whose every visible file is a document (text); a file, folder or pattern such as a/*.parquet (jsonl, parquet); "
        "a data set's name or folder (huggingface); what .bin and .idx are called without these endings (megatron).",
    )
    unit: Optional[str] = key(
        None,
        "What a document of source packages is: files, functions, or mixture (half of the files whole, of the others the "
        "functions); null: files.",
        one_of("files", "functions", "mixture"),
    )
    text_key: str = key("text", "The field or column that holds the document (jsonl, parquet, huggingface).")
    subset: Optional[str] = key(None, "Configuration of a data set that has several (huggingface).")
    split: str = key("train", "Which split of a data set to read, such as train or train[:10%] (huggingface).")
    streaming: bool = key(
        False, "Read a data set over the network as it comes, without a copy on the disk (huggingface)."
    )
    bad_lines: str = key(
        "error",
        "What a line or row whose text cannot be read does: error, or skip (counted and reported).",
        one_of("error", "skip"),
    )
    tokenizer: str = key("bytes", "bytes, or the path of a `tokenizers` JSON file.")
    begin_token: Optional[str] = key(
        "<s>",
        "Token put before every document; null for none. A tokenizer file must know it; bytes give it a new id.",
        TOKEN,
    )
    end_token: Optional[str] = key("</s>", "Token put after every document; null for none.", TOKEN)
    validation_fraction: float = key(
        0.05,
        "Share of source files (text, stdlib) or documents (all others) held out for validation, which every run needs.",
        Holds("at least 0 and below 1", lambda value: 0 <= value < 1),
    )
    distribution: str = key(
        "documents-2k",
        "Length distribution of synthetic documents.",
        named("packmamba.data.lengths:LENGTH_DISTRIBUTIONS"),
    )
    num_documents: int = key(10000, "How many synthetic documents.", *COUNT)
    vocab_size: int = key(
        256,
        "Vocabulary of synthetic documents, which get no begin and end tokens.",
        VOCABULARY,
    )
    task: Optional[str] = key(
        None,
        "Whose examples are documents with source task, such as mqar.",
        named("packmamba.evaluation.tasks:TASKS"),
    )
    task_options: dict[str, Any] = key({}, "Parameters of the task, such as num_pairs.")
    corpus_seed: int = key(0, "Seed of synthetic documents and examples, and of the validation split.", at_least(0))
    cache_dir: str = key("runs/corpora", "Where tokenised corpora are kept.")
    num_proc: Optional[int] = key(
        None, "Processes that read and tokenise a corpus; null for one a core.", at_least(1), at_most(PROCESSES)
    )

    # From here on keys lay tokens out and decide no document: packmamba/training/unchanged.py counts on it.
    mode: str = key(
        "matched",
        "matched: the documents of a step are drawn first, then arranged; stream: the strategy fills rows as documents come.",
        one_of("matched", "stream"),
    )
    strategy: str = key(
        "greedy",
        "How documents become rows, such as single (a row each), padded, greedy (packed) or split (cut at row ends).",
        named("packmamba.data.packing:STRATEGIES"),
    )
    row_length: Optional[int] = key(
        1024, "Slots of a row. With strategy padded, null pads to the longest document of each batch.", LENGTH
    )
    overlong: str = key(
        "error",
        "What a document longer than a row does: error, truncate, or pieces (each restarts from zero). split cuts anyway.",
        one_of("error", "truncate", "pieces"),
    )
    buffer: int = key(4096, "Documents that greedy sorts at a time.", LENGTH)
    streams: int = key(
        1,
        "Parallel streams of split: row b of the next batch continues row b of this one. In mode stream, streams that are more "
        "than a step's rows take turns.",
        LENGTH,
    )
    stagger: bool = key(
        False,
        "Each stream of split begins at a place of its own inside its first document, whose beginning comes as a document of "
        "its own at the end: rows of several streams do not end at like places. Needs mode stream.",
    )
    shuffle_steps: Optional[int] = key(
        None,
        "Draw the rows of every so many steps in random order: the same pieces as without, in another order. Needs mode stream.",
        at_least(1),
    )
    tokens_per_step: int = key(
        4096, "What one optimizer step consumes on all ranks: real tokens (matched) or slots (stream).", *COUNT
    )
    cut_documents: Optional[int] = key(
        None,
        "Cut longer training documents into parts of at most this many tokens before they are shuffled; each part starts from "
        "zero, in every arm.",
        LENGTH,
    )
    cut_at_steps: bool = key(
        False,
        "Cut a document where a step ends, in every arm alike, so that a step holds exactly tokens_per_step tokens; its rest "
        "starts from zero in the next step. Needs mode matched.",
    )
    slots_per_batch: int = key(
        4096, "Most slots of one forward pass; a step that needs more accumulates gradients.", *COUNT
    )
    validation_documents: Optional[int] = key(
        None, "Evaluate on this many validation documents; null for all.", at_least(1)
    )
    num_workers: int = key(
        0, "Processes that prepare batches; 0 prepares them in the training process.", at_least(0), at_most(PROCESSES)
    )

    def problems(self) -> Iterator[str]:
        strategy = chosen(self, "strategy")
        if self.streams > 1 and not strategy.splits_documents:
            yield f"data.streams: only strategy split has streams, got {self.streams} with '{self.strategy}'"
        if self.cut_at_steps and self.mode != "matched":
            yield f"data.cut_at_steps: only steps of mode matched count tokens, got '{self.mode}'"
        if self.unit is not None and self.source != "packages":
            yield f"data.unit: only data.source=packages has units, got '{self.unit}' with '{self.source}'"
        if self.row_length is None and strategy.needs_row_length:
            yield f"data.row_length: strategy '{self.strategy}' needs one, got null"
        if self.stagger and not (strategy.splits_documents and self.mode == "stream"):
            yield f"data.stagger: expected strategy split and mode stream, got '{self.strategy}' and '{self.mode}'"
        if self.shuffle_steps is not None and (self.mode != "stream" or not strategy.pads or self.row_length is None):
            yield f"data.shuffle_steps: expected mode stream and rows of one length, got '{self.mode}' and '{self.strategy}'"


MIXER_KEYS = ("d_state", "d_conv", "expand", "dt_rank", "learned_initial_state")
"""Keys of the section ``model`` that are arguments of mixers that have them."""


@dataclass
class ModelConfig:
    vocab_size: Optional[int] = key(None, "Rows of the embedding; null takes the corpus's vocabulary.", VOCABULARY)
    d_model: int = key(128, "Width of the residual stream.", *SIZES)
    n_layer: int = key(2, "Number of blocks.", *SIZES)
    mixer: str = key(
        "mamba1",
        "What a block does with its tokens, such as mamba1.",
        named("packmamba.nn.mixers:MIXERS"),
    )
    mixer_options: dict[str, Any] = key(
        {},
        "Further arguments of the mixer, such as dt_max, beside d_state, d_conv, expand, dt_rank and learned_initial_state.",
    )
    d_state: int = key(16, "States per channel of the scan.", *SIZES)
    d_conv: int = key(
        4, "Width of the causal convolution, 2 to 4.", Holds("2, 3 or 4", lambda value: value in (2, 3, 4))
    )
    expand: int = key(2, "d_inner = expand * d_model.", *SIZES)
    dt_rank: Any = key(
        "auto",
        "Rank of the projection to delta; auto is ceil(d_model / 16).",
        Holds(
            "'auto' or an integer of at least 1", lambda value: value == "auto" or (type(value) is int and value >= 1)
        ),
    )
    tie_embeddings: bool = key(True, "The head shares the embedding's weight.")
    learned_initial_state: bool = key(
        False, "Each layer learns the scan state that documents start from, instead of zero."
    )
    compile: bool = key(
        False, "torch.compile fuses what lies between operators and matrix products, block by block, and in the loss."
    )
    recompute: str = key(
        "none",
        "What the backward computes again to save memory: none; inner, the convolution's output and delta; block, each block.",
        one_of("none", "inner", "block"),
    )

    def of_mixer(self) -> dict[str, Any]:
        """The mixer's arguments: keys that it has, and its further options."""
        taken = options(chosen(self, "mixer"))
        return {key: getattr(self, key) for key in MIXER_KEYS if key in taken} | self.mixer_options

    def problems(self) -> Iterator[str]:
        mixer = chosen(self, "mixer")
        for name in MIXER_KEYS:
            if name not in options(mixer) and getattr(self, name) != getattr(ModelConfig, name):
                yield f"model.{name}: mixer '{self.mixer}' has no such option, got {getattr(self, name)}"
        yield from unknown_options(
            mixer, "model.mixer_options", self.mixer_options, but=(*MIXER_KEYS, "recompute", "backend")
        )


@dataclass
class OptimizerConfig:
    name: str = key("adamw", "The optimizer, such as adamw.", named("packmamba.training.optimizer:OPTIMIZERS"))
    options: dict[str, Any] = key({}, "Further arguments of the optimizer; adamw has none.")
    lr: float = key(2e-3, "Peak learning rate.", above(0))
    betas: list[float] = key(
        [0.9, 0.95],
        "AdamW's decay rates.",
        Holds("two numbers in [0, 1)", lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value)),
    )
    weight_decay: float = key(
        0.1, "Decay of matrices; biases, norms, A_log, D and initial states have none.", at_least(0)
    )
    warmup_steps: int = key(20, "Steps of linear warm-up.", at_least(0))
    schedule_steps: Optional[int] = key(
        None,
        "Steps in which the learning rate rises and falls; after them it stays. null: trainer.max_steps. Where it is given, "
        "trainer.max_steps may be raised later, and the run goes on.",
        at_least(1),
    )
    final_lr_fraction: float = key(0.1, "The cosine ends at this share of the peak.", between(0, 1))
    grad_clip: Optional[float] = key(1.0, "Largest gradient norm; null for no clipping.", above(0))

    def problems(self) -> Iterator[str]:
        yield from unknown_options(chosen(self, "name"), "optimizer.options", self.options)


@dataclass
class TrainerConfig:
    boundary: str = key(
        "reset",
        "What crosses a document boundary, such as reset (nothing), leak, or carry (reset, and a document cut by a row's end "
        "continues from its own state in the next batch); foreign, noise and carry_scan carry another stream's state, noise like "
        "states, only the scan's.",
        named("packmamba.training.boundary:BOUNDARIES"),
    )
    boundary_options: dict[str, Any] = key({}, "Arguments of the boundary scheme; reset, leak and carry have none.")
    mean_over: str = key(
        "targets",
        "What a step's loss is the mean over: targets, each alike; or rows, each with the mean of its own, pass by pass. The "
        "latter depends on how documents lie in rows: it is here to show that.",
        one_of("targets", "rows"),
    )
    max_steps: int = key(200, "Optimizer steps; see optimizer.schedule_steps to raise it later.", *COUNT)
    validate_every: int = key(50, "Steps between evaluations; the last step is always evaluated.", at_least(1))
    average_snapshots: int = key(
        1,
        "Evaluate and keep the mean of the weights at this many evenly spaced steps up to the last; 1 keeps the last weights.",
        at_least(1),
        at_most(10000),
    )
    average_share: float = key(
        0.1, "Share of the steps, the last ones, over which snapshots are spaced.", between(0, 1)
    )
    evaluate_every: Optional[int] = key(
        None, "Steps between answers to ``evaluations`` during the training; null: only when it ends.", at_least(1)
    )
    checkpoint_every: int = key(50, "Steps between checkpoints.", at_least(1))
    log_every: int = key(10, "Steps between logged points.", at_least(1))
    loggers: list[Any] = key(
        ["csv", "tensorboard"],
        "Where curves go while the run trains: csv, tensorboard, wandb, mlflow, or the class path of any Lightning logger; with "
        "arguments as {class_path: ..., init_args: {...}}; [] for nowhere.",
    )
    callbacks: list[Any] = key(
        [],
        "Further Lightning callbacks, by class path such as my_module.MyCallback; with arguments as "
        "{class_path: ..., init_args: {...}}.",
    )
    leakcheck_every: Optional[int] = key(
        0,
        "Steps between checks that what crosses document boundaries in a batch is what trainer.boundary says; 0: only when "
        "training begins; null: never. A check costs about two batches.",
        at_least(0),
    )
    precision: str = key("32-true", "Lightning's precision.")
    accelerator: str = key("auto", "Lightning's accelerator.", one_of("auto", "cpu", "gpu", "cuda", "mps", "tpu"))
    devices: int = key(1, "Devices of each machine.", at_least(1), at_most(PROCESSES))
    num_nodes: int = key(1, "Machines, each started by torchrun or SLURM.", at_least(1), at_most(2**16))
    strategy: str = key(
        "auto",
        "Several devices: ddp (each has all parameters), fsdp2 (each keeps a share), or auto: ddp where there are several.",
        one_of("auto", "ddp", "fsdp2"),
    )
    cuda_graphs: bool = key(
        False,
        "Replay a batch's forward and backward as one CUDA graph, captured once for each shape: for models that a GPU computes "
        "faster than a host launches their kernels. One GPU.",
    )
    deterministic: bool = key(
        False,
        "The same command gives the same bits: on a CPU for any number of cores, loader workers and jobs, with one thread unless "
        "trainer.threads says how many; on one GPU. Some operators are slower, and compiled code is made anew in each run.",
    )
    init_from: Optional[str] = key(
        None,
        "Weights to start from: the folder of a run or of a published checkpoint, a .ckpt file, or <a sweep's folder>:<arm>, its "
        "run with this run's seed. The schedule is this run's own.",
    )
    threads: Optional[int] = key(
        None, "CPU threads; null for PyTorch's choice, or one where trainer.deterministic.", between(1, 1024)
    )  # more end the process where the system gives no more

    def problems(self) -> Iterator[str]:
        yield from unknown_options(chosen(self, "boundary"), "trainer.boundary_options", self.boundary_options)


@dataclass
class OpsConfig:
    backend: str = key(
        "auto",
        "Operators' backend, such as reference; auto takes the compiled kernels of the device.",
        named("packmamba.ops.backends:BACKENDS"),
    )


@dataclass
class Config:
    name: str = key(
        "train",
        "Names the run's folder and its arm in tables.",
        Holds("at most 200 bytes of text", lambda value: 0 < len(value.encode(errors="replace")) <= 200),
    )
    output: Optional[str] = key(
        None,
        "Folder whose records/ gets the run's record, such as runs/mine; null keeps it in the run's own folder.",
        old_name="experiment",
    )
    plugins: list[str] = key(
        [],
        "Python modules to import first, from the current folder or installed; keys may name what they add to registries. "
        "Their names are part of the run's name.",
    )
    evaluations: list[str] = key(
        [],
        "Evaluations that the trained model answers, such as [perplexity, next_line]; their numbers join the run's record.",
        each(named("packmamba.evaluation.registry:EVALUATIONS")),
        unique,
    )
    evaluation_options: dict[str, Any] = key(
        {}, "For each of the evaluations its parameters, such as evaluation_options.mqar.num_pairs=4."
    )
    evaluation_examples: int = key(200, "Examples of each task among the evaluations.", *COUNT)
    seed: int = key(
        0,
        "Seed of initial weights and of the order of documents.",
        Holds("0 to 2**32 - 1", lambda value: 0 <= value < 2**32),
    )
    runs_dir: str = key("runs", "Where runs keep checkpoints, logs and records.")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)

    def problems(self) -> Iterator[str]:
        yield from between_sections(self)
