"""Keys of a training configuration, with default, help and limits."""

import copy
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

from packmamba.errors import refusing

BOUNDARIES = "packmamba.training.boundary:BOUNDARIES"
LENGTH_DISTRIBUTIONS = "packmamba.data.lengths:LENGTH_DISTRIBUTIONS"
MIXERS = "packmamba.nn.mixers:MIXERS"
OPTIMIZERS = "packmamba.training.optimizer:OPTIMIZERS"
SCHEDULES = "packmamba.training.optimizer:SCHEDULES"
STRATEGIES = "packmamba.data.packing:STRATEGIES"
MIXER_KEYS = ("d_state", "d_conv", "expand", "dt_rank")  # of the section model
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
NAMED = ("csv", "tensorboard", "wandb", "mlflow")
AUTO = ("auto or an integer above 0", lambda value: value == "auto" or (type(value) is int and value > 0))
LOGGERS = (
    f"{', '.join(NAMED)} or class paths",
    lambda names: all(name in NAMED or "." in str(name) for name in names),
)
TWO_RATES = ("two numbers in [0, 1)", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas))


def key(default: Any, help: str, **limits: Any) -> Any:
    """Declare a key of a configuration dataclass.

    Args:
        default: its value where nothing is given; a list or mapping is copied.
        help: a sentence for ``--help``.
        limits: what is checked unless the value is null: ``low``, ``high`` and ``above``
            (exclusive) and ``choices`` (names, or ``module:REGISTRY``), of each element of a list;
            ``check``: a description of valid values, and a predicate of the whole value.
            ``null``: what null stands for, in ``--help`` and as a remedy in errors.
    """
    if "null" in limits:
        help = f"{help.rstrip('.')}; null: {limits['null']}."
    metadata = {"help": help, "limits": limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def registry(place: Any) -> Any:
    """Import the registry at ``module:NAME``, or a class by its path.

    Other values than texts are returned as they are.
    """
    return pkgutil.resolve_name(place) if isinstance(place, str) else place


def options(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's or class's own arguments, which a key of options may set."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is not parameter.empty]


@dataclass
class DataConfig:
    """Choose documents, and how they become rows and steps (the section ``data``)."""

    source: str = key("stdlib", "Where documents come from.", choices="packmamba.data.sources:SOURCES")
    path: Optional[str] = key(None, "Folder, file, pattern, or URL of one; dataset (huggingface); prefix (megatron).")
    sources: list[Any] = key([], "A mixture instead: [{source: text, path: a, weight: 3}, ...], by weight in tokens.")
    unit: Optional[str] = key(None, "Documents of packages.", null="files", choices=("files", "functions", "mixture"))
    text_key: str = key("text", "Field or column of the document; where it is missing, prompts are read.")
    loss_on: str = key("completion", "Of prompts: answers, or all tokens.", choices=("completion", "all"))
    chat_template: Optional[str] = key(None, "Template of messages: chatml, or a Jinja file.", null="the tokenizer's")
    subset: Optional[str] = key(None, "Configuration of the dataset (huggingface).")
    split: str = key("train", "Split, such as train[:10%] (huggingface).")
    tokenizer: str = key("bytes", "bytes; or a tokenizer.json, a folder or Hub name with one.")
    begin_token: Optional[str] = key("<s>", "Token before every document.", null="none")
    end_token: Optional[str] = key("</s>", "Token after every document.", null="none")
    validation_fraction: float = key(0.05, "Fraction of files (text) or documents held out.", above=0, high=0.99)
    test_fraction: float = key(0.0, "Fraction of files (text) or documents for the test split.", low=0, high=0.99)
    test_path: Optional[str] = key(None, "Test documents of the same source; null: none, or test_fraction of path's.")
    distribution: str = key("documents-2k", "Lengths of synthetic documents.", choices=LENGTH_DISTRIBUTIONS)
    num_documents: int = key(10000, "Synthetic documents, or a task's examples.", low=1)
    vocab_size: int = key(256, "Vocabulary of synthetic documents.", low=1)
    task: Optional[str] = key(None, "Task of source task.", choices="packmamba.data.tasks:TASKS")
    task_options: dict[str, Any] = key({}, "Parameters of the task, such as num_pairs.")
    cache_dir: str = key("runs/corpora", "Folder for tokenized corpora.")
    streaming: bool = key(False, "Train while documents are tokenized: in source order, shuffled within shards.")
    num_proc: Optional[int] = key(None, "Threads that tokenize.", null="a core each, at most 16", low=1)
    batching: str = key("matched", "Arrange a step's documents, or stream into rows.", choices=("matched", "stream"))
    strategy: str = key("greedy", "How documents become rows.", choices=STRATEGIES)
    row_length: Optional[int] = key(1024, "Tokens of a row.", null="the longest (unpacked strategies)", low=1)
    overlong: str = key("error", "For documents longer than a row.", choices=("error", "truncate", "split"))
    buffer: int = key(4096, "Window of greedy, in documents.", low=1)
    streams: int = key(1, "Parallel streams of concat_split.", low=1)
    stagger: bool = key(False, "Begin streams inside documents (concat_split, stream).")
    shuffle_steps: Optional[int] = key(None, "Shuffle rows over this many steps (stream).", low=1)
    tokens_per_step: int = key(4096, "Tokens of an optimizer step (stream: with padding).", low=1)
    cut_documents: Optional[int] = key(None, "Cut training documents to this length.", low=1)
    cut_at_steps: bool = key(True, "Cut documents so that steps hold tokens_per_step exactly (matched).")
    max_tokens_per_batch: int = key(
        4096, "Maximum tokens (padding included) of a micro-batch, without carried streams.", low=1
    )
    validation_documents: Optional[int] = key(None, "Documents to validate on.", null="all held out", low=1)
    num_workers: int = key(0, "Workers of the DataLoader.", low=0)

    @property
    def step_rows(self) -> int:
        """Return how many rows a step has."""
        return self.tokens_per_step // (self.row_length or self.tokens_per_step)

    @property
    def takes_turns(self) -> bool:
        """Return whether steps read streams in turn, since there are more than a step has rows."""
        return self.batching == "stream" and self.streams > self.step_rows >= 1

    @property
    def batch_rows(self) -> int:
        """Return how many of a step's rows a micro-batch has."""
        return min(self.step_rows, max(1, self.max_tokens_per_batch // (self.row_length or 1)))


@dataclass
class ModelConfig:
    """Describe the language model (the section ``model``)."""

    pretrained: Optional[str] = key(None, "Checkpoint: a folder or Hub name; it decides the model's other keys.")
    vocab_size: Optional[int] = key(None, "Rows of the embedding.", null="the corpus's vocabulary", low=1)
    d_model: int = key(128, "Width of the residual stream.", low=1)
    n_layer: int = key(2, "Blocks.", low=1)
    mixer: str = key("mamba1", "Sequence mixer of a block.", choices=MIXERS)
    mixer_options: dict[str, Any] = key({}, "More arguments of the mixer, such as dt_max.")
    d_state: Optional[int] = key(None, "States per channel.", null="16 of mamba1, 128 of the others", low=1)
    d_conv: int = key(4, "Taps of the convolution.", low=2, high=4)
    expand: int = key(2, "d_inner = expand * d_model.", low=1)
    dt_rank: Any = key("auto", "Rank of delta; auto: ceil(d_model / 16).", check=AUTO)
    tie_embeddings: bool = key(True, "The head shares the embedding's weight.")
    compile: bool = key(False, "torch.compile the blocks, and on a CPU the loss.")
    recompute: str = key("none", "Recompute in the backward pass.", choices=("none", "inner", "block"))

    def of_mixer(self) -> dict[str, Any]:
        """Return the arguments of the mixer: the keys that it takes, and its options."""
        taken = options(registry(MIXERS)[self.mixer])
        keys = {name: getattr(self, name) for name in MIXER_KEYS if name in taken}
        if self.mixer != "mamba1":  # mamba1's defaults stand for the mixer's own
            keys = {name: value for name, value in keys.items() if value != getattr(type(self), name)}
        return {name: value for name, value in keys.items() if value is not None} | self.mixer_options


@dataclass
class OptimizerConfig:
    """Choose the optimizer and its learning rate (the section ``optimizer``)."""

    name: str = key("adamw", "The optimizer.", choices=OPTIMIZERS)
    options: dict[str, Any] = key({}, "Further arguments: eps of adamw, momentum and ns_steps of muon.")
    lr: float = key(2e-3, "Peak learning rate.", above=0)
    betas: list[float] = key([0.9, 0.95], "Decay rates of AdamW's moments; muon's AdamW's, too.", check=TWO_RATES)
    weight_decay: float = key(0.1, "Only matrices decay.", low=0)
    warmup_steps: int = key(20, "Steps of linear warm-up.", low=0)
    schedule: str = key("cosine", "How the learning rate falls after the warm-up.", choices=SCHEDULES)
    decay_fraction: float = key(0.2, "Last fraction of the steps after warm-up, in which wsd falls.", above=0, high=1)
    schedule_steps: Optional[int] = key(None, "Steps of the schedule.", null="max_steps", low=1)
    final_lr_fraction: float = key(0.1, "Of the peak, at the schedule's end.", low=0, high=1)
    grad_clip: Optional[float] = key(1.0, "Maximum gradient norm.", null="no clipping", above=0)


@dataclass
class TrainerConfig:
    """Choose the boundary scheme, and how long and on what to train (the section ``trainer``)."""

    boundary: str = key("reset", "Boundary scheme.", choices=BOUNDARIES)
    boundary_options: dict[str, Any] = key({}, "Arguments of the boundary scheme.")
    mean_over: str = key("targets", "Of a step's loss; rows: row means by micro-batch.", choices=("targets", "rows"))
    max_steps: int = key(200, "Optimizer steps.", low=1)
    validate_every: int = key(50, "Steps between validations.", low=1)
    evaluate_every: Optional[int] = key(None, "Steps between evaluations.", null="at the end", low=1)
    samples: int = key(0, "Validation documents to continue as text at each validation.", low=0)
    checkpoint_every: int = key(50, "Steps between checkpoints.", low=1)
    log_every: int = key(10, "Steps between logged points.", low=1)
    loggers: list[Any] = key(["csv", "tensorboard"], f"{LOGGERS[0]}.", check=LOGGERS)
    log_axis: str = key("steps", "What loggers plot against: steps, or tokens so far.", choices=("steps", "tokens"))
    callbacks: list[Any] = key([], "Class paths, or {class_path: ..., init_args: {...}}.")
    leakcheck_every: Optional[int] = key(0, "Steps between leakchecks; 0: only the first.", null="none", low=0)
    precision: str = key("32-true", "Lightning's.", choices=PRECISIONS)
    accelerator: str = key("auto", "Lightning's.", choices=("auto", "cpu", "gpu", "cuda", "mps", "tpu"))
    devices: int = key(1, "Devices of each machine.", low=1)
    num_nodes: int = key(1, "Machines, each started by torchrun or SLURM.", low=1)
    strategy: str = key("auto", "Over several devices; auto is ddp.", choices=("auto", "ddp", "fsdp2"))
    context_parallel: int = key(1, "Devices that share each row, along its length; for long documents.", low=1)
    cuda_graphs: bool = key(False, "Replay micro-batches as CUDA graphs (small models).")
    deterministic: bool = key(False, "The same bits again, on a CPU or one GPU.")
    init_from: Optional[str] = key(None, "Initial weights: folder of a run or checkpoint, or <sweep>:<arm>.")
    threads: Optional[int] = key(None, "CPU threads.", null="PyTorch's, or 1 if deterministic", low=1, high=1024)

    def scheme(self) -> Any:
        """Make the boundary scheme, with its options. Raises ConfigError."""
        with refusing(TypeError, prefix="trainer.boundary_options: "):
            return registry(BOUNDARIES)[self.boundary](**self.boundary_options)


@dataclass
class OpsConfig:
    """Choose the kernels (the section ``ops``)."""

    backend: str = key("auto", "Operators' backend.", choices="packmamba.ops.backends:BACKENDS")


@dataclass
class Config:
    """Hold a run's configuration: its sections, its name and where it goes."""

    name: str = key("train", "Name of the run and of its arm in tables.")
    output: Optional[str] = key(None, "Folder of the record.", null="the run's own")
    plugins: list[str] = key([], "Modules to import first.")
    evaluations: list[str] = key([], "After training: perplexity, mqar, ..., or tasks of lm-evaluation-harness.")
    evaluation_options: dict[str, Any] = key({}, "Such as evaluation_options.mqar.num_pairs=4.")
    evaluation_examples: int = key(200, "Examples of each task.", low=1)
    seed: int = key(0, "Seed of initial weights and the order of documents.", low=0, high=2**32 - 1)
    runs_dir: str = key("runs", "Folder of run folders.")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
