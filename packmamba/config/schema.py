"""Every key of a training configuration: one dataclass per section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class DataConfig:
    source: str = "stdlib"
    """Where documents come from: stdlib, text, jsonl or synthetic."""
    path: Optional[str] = None
    """A folder whose every visible file is a document (text), or a JSON-lines file or folder of them (jsonl)."""
    text_key: str = "text"
    """The field of a JSON line that holds the document (jsonl)."""
    bad_lines: str = "error"
    """What a JSON line that cannot be read does: error, or skip (counted and reported)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a `tokenizers` JSON file."""
    begin_token: Optional[str] = "<s>"
    """Token put before every document; null for none. A tokenizer file must know it; bytes give it a new id."""
    end_token: Optional[str] = "</s>"
    """Token put after every document; null for none."""
    validation_fraction: float = 0.05
    """Share of source files (synthetic, jsonl: of documents) held out for validation."""
    distribution: str = "documents-2k"
    """Length distribution of synthetic documents: documents-2k, short or heavy."""
    num_documents: int = 10000
    """How many synthetic documents."""
    vocab_size: int = 256
    """Vocabulary of synthetic documents, which get no begin and end tokens."""
    corpus_seed: int = 0
    """Seed of synthetic documents and of the validation split."""
    cache_dir: str = "runs/corpora"
    """Where tokenised corpora are kept."""

    mode: str = "matched"
    """matched: the documents of a step are drawn first, then arranged; stream: the strategy fills rows as documents come."""
    strategy: str = "greedy"
    """How documents become rows: single, padded, in_order, greedy, first_fit, best_fit, histogram or split."""
    row_length: Optional[int] = 1024
    """Slots of a row. With strategy padded, null pads to the longest document of each batch."""
    overlong: str = "error"
    """What a document longer than a row does: error, truncate, or pieces (each restarts from zero). split cuts anyway."""
    buffer: int = 4096
    """Documents that greedy sorts at a time."""
    streams: int = 1
    """Parallel streams of split: row b of the next batch continues row b of this one."""
    tokens_per_step: int = 4096
    """What one optimizer step consumes on all ranks: real tokens (matched) or slots (stream)."""
    slots_per_batch: int = 4096
    """Most slots of one forward pass; a step that needs more accumulates gradients."""
    validation_documents: Optional[int] = None
    """Evaluate on this many validation documents; null for all."""
    num_workers: int = 0
    """Processes that prepare batches; 0 prepares them in the training process."""


@dataclass
class ModelConfig:
    vocab_size: Optional[int] = None
    """Rows of the embedding; null takes the corpus's vocabulary."""
    d_model: int = 128
    """Width of the residual stream."""
    n_layer: int = 2
    """Number of Mamba blocks."""
    d_state: int = 16
    """States per channel of the scan."""
    d_conv: int = 4
    """Width of the causal convolution, 2 to 4."""
    expand: int = 2
    """d_inner = expand * d_model."""
    dt_rank: Any = "auto"
    """Rank of the projection to delta; auto is ceil(d_model / 16)."""
    tie_embeddings: bool = True
    """The head shares the embedding's weight."""
    learned_initial_state: bool = False
    """Each layer learns the scan state that documents start from, instead of zero."""
    compile: bool = False
    """torch.compile fuses what lies between operators and matrix products, block by block, and in the loss."""
    recompute: str = "none"
    """What the backward computes again to save memory: none; inner, the convolution's output and delta; block, each block."""


@dataclass
class OptimizerConfig:
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates."""
    weight_decay: float = 0.1
    """Decay of matrices; biases, norms, A_log, D and initial states have none."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    final_lr_fraction: float = 0.1
    """The cosine ends at this share of the peak."""
    grad_clip: Optional[float] = 1.0
    """Largest gradient norm; null for no clipping."""


@dataclass
class TrainerConfig:
    boundary: str = "reset"
    """What crosses a document boundary: reset (nothing), leak, leak_conv, leak_scan, or carry (reset, and a document cut by
    a row's end goes on from its state in the next batch)."""
    max_steps: int = 200
    """Optimizer steps."""
    validate_every: int = 50
    """Steps between evaluations; the last step is always evaluated."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between logged points."""
    precision: str = "32-true"
    """Lightning's precision."""
    accelerator: str = "auto"
    """Lightning's accelerator."""
    devices: int = 1
    """Devices of each machine."""
    num_nodes: int = 1
    """Machines."""
    strategy: str = "auto"
    """Several devices: ddp (each has all parameters), fsdp2 (each keeps a share), or auto: ddp where there are several."""
    cuda_graphs: bool = False
    """Replay a batch's forward and backward as one CUDA graph, captured once for each shape: for models that a GPU computes
    faster than a host launches their kernels. One GPU."""
    threads: Optional[int] = None
    """CPU threads; null for PyTorch's choice."""


@dataclass
class OpsConfig:
    backend: str = "auto"
    """Operators' backend: auto, reference, cpu, cuda or mamba_ssm."""


@dataclass
class Config:
    name: str = "train"
    """Names the run's folder and its arm in tables."""
    experiment: Optional[str] = None
    """Folder whose records/ gets the run's record, such as experiments/mine; null keeps it in the run's own folder."""
    seed: int = 0
    """Seed of initial weights and of the order of documents."""
    runs_dir: str = "runs"
    """Where runs keep checkpoints, logs and records."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
