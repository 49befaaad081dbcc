"""Time a Mamba in Hugging Face's Trainer: as it comes, flattened as it comes, and patched, in turns."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import inspect
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from packmamba.config import ConfigError, DataConfig, key, load_config
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.sources.builtin import open_stdlib
from packmamba.integrations.transformers import patch
from packmamba.ops.mamba_ssm import _peer
from packmamba.records import append_record, make_record, provenance
from packmamba.reproduce import Bench
from packmamba.timing import PeakMemory, free_memory, median, now, spread, take_turns

Documents = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Arm:
    """Hold an arm of the table; sizes of None are the bench's.

    Attributes:
        batches: padded to the batch's longest; the same with all documents sorted by length before; flattened into one row.
        kernels: transformers' own path, on mamba-ssm's kernels or on PyTorch alone; None where it is patched.
        patched: by ``packmamba.integrations.transformers.patch``.
        leaks: documents change what follows them; for the legend.
    """

    batches: str
    kernels: str | None = None
    patched: bool = False
    leaks: bool = False
    documents_per_step: int | None = None
    steps: int | None = None
    warm_up_steps: int | None = None
    rounds: int | None = None

    def arranged(self, documents: Documents, per_step: int, warm_up: int) -> Documents:
        """In the order in which they are trained on."""
        first = warm_up * per_step
        rest = documents[first:]
        return [*documents[:first], *(sorted(rest, key=len, reverse=True) if self.batches == "grouped" else rest)]

    def collate(self, features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        """A batch as transformers' collators make it. A document's first token is no target: Trainer divides by what is."""
        if self.batches == "flattened":
            from transformers import DataCollatorWithFlattening

            return DataCollatorWithFlattening()(features)
        rows = [torch.tensor(feature["input_ids"]) for feature in features]
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        tokens, mask = pad(rows), pad([torch.ones_like(row) for row in rows])
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, 0] = -100
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    def per_document(self, logits: Tensor, lengths: Sequence[int]) -> Tensor:
        """The logits (tokens, vocab) of a batch's documents, one behind the other."""
        if self.batches == "flattened":
            return logits[0]
        return torch.cat([row[:length] for row, length in zip(logits, lengths)])


def load_modeling(need_peers: bool) -> Any:
    """transformers' modeling_mamba, which looks for the peers' kernels when it is imported.

    Raises:
        ConfigError: an arm needs them, and it found none.
    """
    with contextlib.suppress(ValueError):
        _peer("mamba_ssm", "ops.selective_scan_interface", "selective_scan_fn")
        _peer("mamba_ssm", "ops.triton.selective_state_update", "selective_state_update")
    from transformers.models.mamba import modeling_mamba

    found = inspect.getclosurevars(modeling_mamba.mamba_inner_fn).nonlocals.get("is_new_implementation")
    if need_peers and not found:
        raise ConfigError(
            "arms: kernels=mamba_ssm needs mamba-ssm and causal-conv1d, which transformers does not find here"
        )
    return modeling_mamba


@contextlib.contextmanager
def on_torch_alone(modeling: Any) -> Iterator[None]:
    """transformers' own path without kernels, also where they are installed."""
    functions = {
        name: function for name, function in vars(modeling).items()
        if inspect.isfunction(function) and function.__module__ == modeling.__name__
    }  # fmt: skip
    for name, function in functions.items():
        setattr(modeling, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(modeling, name, function)


class Measured:
    """One model as transformers makes it and the same patched; an arm borrows one of them for a turn."""

    def __init__(
        self, sizes: Any, device: torch.device, precision: str, learning_rate: float, seed: int, peers: bool
    ) -> None:
        self.modeling = load_modeling(peers)
        from transformers import MambaConfig, MambaForCausalLM

        torch.manual_seed(seed)
        config = MambaConfig(
            vocab_size=sizes.vocab_size, hidden_size=sizes.d_model, num_hidden_layers=sizes.n_layer, state_size=sizes.d_state,
            expand=sizes.expand, tie_word_embeddings=sizes.tie_embeddings,
        )  # fmt: skip
        self.models = {False: MambaForCausalLM(config)}
        self.models[True] = patch(copy.deepcopy(self.models[False]))
        self.start = copy.deepcopy(self.models[False].state_dict())
        self.device, self.precision, self.learning_rate, self.seed = device, precision, learning_rate, seed

    @contextlib.contextmanager
    def borrowed(self, arm: Arm) -> Iterator[torch.nn.Module]:
        """The arm's model on the device, with the weights that all start from."""
        model: Any = self.models[arm.patched]
        model.load_state_dict(self.start)
        model.to(self.device).train()
        try:
            with on_torch_alone(self.modeling) if arm.kernels == "torch" else contextlib.nullcontext():
                yield model
        finally:
            model.zero_grad(set_to_none=True)
            model.cpu()

    def logits(self, arm: Arm, *batches: Documents) -> Tensor:
        """(tokens, vocab) in float32, as in training; of the arm's batches of these documents."""
        found = []
        with self.borrowed(arm) as model, torch.no_grad():
            for documents in batches:
                batch = arm.collate([{"input_ids": list(document)} for document in documents])
                logits = model(**{k: value.to(self.device) for k, value in batch.items() if k != "labels"}).logits
                found.append(arm.per_document(logits.float(), [len(document) for document in documents]).cpu())
        return torch.cat(found)

    def train(self, arm: Arm, documents: Documents, per_step: int, warm_up: int) -> Turn:
        """Trainer on these documents in this order, from the start; timed behind the first ``warm_up`` steps."""
        from transformers import Trainer, TrainerCallback, TrainingArguments

        device, losses, times = self.device, list[Tensor](), list[float]()

        class Timed(Trainer):
            def _get_train_sampler(self, *_: Any) -> SequentialSampler:
                return SequentialSampler(documents)

            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                if self.state.global_step == warm_up:
                    times.append(now(device))
                losses.append(super().training_step(*args, **kwargs).detach())  # without a wait
                return losses[-1]

        class End(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == state.max_steps:
                    times.append(now(device))

        free_memory()
        with self.borrowed(arm) as model, tempfile.TemporaryDirectory() as folder:
            peak = PeakMemory(device)
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=per_step, num_train_epochs=1, learning_rate=self.learning_rate,
                lr_scheduler_type="constant", bf16=self.precision == "bfloat16", report_to=[], save_strategy="no",
                logging_steps=1000, disable_tqdm=True, use_cpu=device.type == "cpu", seed=self.seed,
                dataloader_pin_memory=device.type == "cuda",
            )  # fmt: skip
            dataset: Any = [{"input_ids": list(document)} for document in documents]
            Timed(model, arguments, arm.collate, dataset, callbacks=[End()]).train()
            return Turn(times[1] - times[0], [float(loss) for loss in losses], peak.bytes())


@dataclass(frozen=True)
class Turn:
    seconds: float
    """Of the steps behind the first ones."""
    losses: list[float]
    """Loss of every step, nats per target."""
    peak: int | None


GATE_DOCUMENTS, GATE_LENGTH = 6, 100
ROUNDING, TIMES = 1e-5, 10
"""A patched arm's logits in float32 may differ from single documents' by ``TIMES`` what transformers' own padded batch differs
on the same path, or ``ROUNDING`` if that is more, relative: rounding, which random weights amplify from layer to layer."""


@dataclass
class IntegrationConfig:
    bench: str = "integration"
    model: str = key("130m", "Published size of the model, whose weights are random.")
    overrides: list[str] = key([], "Further keys of the model, such as model.n_layer=2.")
    distribution: str = key("documents-2k", "Lengths of the documents.", choices=LENGTH_DISTRIBUTIONS)
    documents_per_step: int = key(16, "Documents of an optimizer step.", low=1)
    steps: int = key(30, "Timed optimizer steps of a turn.", low=1)
    warm_up_steps: int = key(3, "Optimizer steps before them in each turn.", low=0)
    rounds: int = key(3, "Turns of each arm.", low=1)
    arms: dict[str, Any] = key({}, "Name -> batches, kernels, patched, leaks; sizes of its own.")
    precision: str = key("bfloat16", "Of Trainer: bfloat16 (autocast) or float32.", choices=("bfloat16", "float32"))
    learning_rate: float = key(6e-4, "Of AdamW, constant.", above=0)
    margin: float = key(1.0, "Factor on the difference that the gate allows.", above=0)
    seed: int = key(0, "Seed of weights and lengths.", low=0)


def run(config: IntegrationConfig, records_path: Path, progress: bool = True) -> None:
    """Append a record of kind ``integration`` for each arm.

    Raises:
        RuntimeError: a patched arm differs from single documents; nothing is recorded.
    """
    arms = {name: Arm(**fields) for name, fields in config.arms.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()
    sizes = load_config(None, [f"model={config.model}", *config.overrides]).model
    sizes.vocab_size = sizes.vocab_size or 50280
    peers = any(arm.kernels == "mamba_ssm" for arm in arms.values())
    measured = Measured(sizes, device, config.precision, config.learning_rate, config.seed, peers)
    documents = draw_documents(
        config.distribution, config.documents_per_step * (config.steps + config.warm_up_steps), config.seed
    )
    differences = _gate(measured, arms, documents, config.margin)
    mine = {name: _sizes(arm, config) for name, arm in arms.items()}
    arranged = {
        name: arms[name].arranged(documents[: per_step * (steps + warm_up)], per_step, warm_up)
        for name, (per_step, steps, warm_up) in mine.items()
    }

    def turns(name: str) -> Any:
        per_step, _, warm_up = mine[name]
        return lambda turn: measured.train(arms[name], arranged[name], per_step, warm_up)

    begun = time.perf_counter()
    samples: dict[str, list[Turn]] = take_turns(
        {name: turns(name) for name in arms}, config.rounds, warm_up=0,
        at_most={name: arm.rounds for name, arm in arms.items() if arm.rounds is not None},
        left_out=lambda name: print(f"{name}: out of memory; it is left out", file=sys.stderr),
        bar="integration" if progress else None,
    )  # fmt: skip
    wall = time.perf_counter() - begun
    for name, taken in samples.items():
        per_step, steps, warm_up = mine[name]
        tokens, slots = _counts(arms[name], arranged[name][warm_up * per_step :], per_step)
        rates = [tokens / turn.seconds for turn in taken]
        append_record(
            records_path,
            make_record(
                kind="integration",
                experiment="integration",
                arm=name,
                config={
                    **{key: value for key, value in vars(config).items() if key not in ("arms", "bench")},
                    **vars(arms[name]), "overrides": list(config.overrides),
                    "documents_per_step": per_step, "steps": steps, "warm_up_steps": warm_up, "rounds": len(taken),
                    "transformers": importlib.metadata.version("transformers"),
                },
                seed=config.seed,
                corpus_hash=f"{config.distribution}: bytes of the standard library",
                metrics={
                    "real_tokens_per_second": median(rates),
                    "real_tokens_per_second_spread": spread(rates),
                    "seconds_per_step": median(turn.seconds / steps for turn in taken),
                    "slots_per_second": median(rates) * slots / tokens,
                    "padding_fraction": 1 - tokens / slots,
                    "tokens_per_step": tokens / steps,
                    "peak_memory_bytes": max((turn.peak for turn in taken if turn.peak is not None), default=None),
                    "first_loss": taken[0].losses[0],
                    "last_loss": float(np.mean(taken[0].losses[-min(10, steps) :])),
                    "difference": differences[name],
                },
                wall_seconds=wall,
                curves={
                    "loss": [{"step": step, "loss": loss} for step, loss in enumerate(taken[0].losses)],
                    "turns": [{"turn": turn, "real_tokens_per_second": rate} for turn, rate in enumerate(rates)],
                },
            ),
        )  # fmt: skip


def draw_documents(distribution: str, count: int, seed: int) -> Documents:
    """Pieces of the standard library's functions, one after the other as bytes, of drawn lengths."""
    lengths = draw_lengths(distribution, count, seed).tolist()
    source = open_stdlib(DataConfig(source="stdlib"))
    functions = source.read()
    text = itertools.chain.from_iterable(document.content.encode() for document in functions)
    return [list(itertools.islice(text, length)) for length in lengths]


def _sizes(arm: Arm, config: IntegrationConfig) -> tuple[int, int, int]:
    """(documents of a step, timed steps, steps before them) of an arm."""
    own = (arm.documents_per_step, arm.steps, arm.warm_up_steps)
    of_all = (config.documents_per_step, config.steps, config.warm_up_steps)
    per_step, steps, warm_up = (b if a is None else a for a, b in zip(own, of_all))
    return per_step, steps, warm_up


def _counts(arm: Arm, documents: Documents, per_step: int) -> tuple[int, int]:
    """(tokens, slots) of all steps."""
    lengths = [len(document) for document in documents]
    if arm.batches == "flattened":
        return sum(lengths), sum(lengths)
    steps = [lengths[first : first + per_step] for first in range(0, len(lengths), per_step)]
    return sum(lengths), sum(max(step) * len(step) for step in steps)


def _gate(measured: Measured, arms: dict[str, Arm], documents: Documents, margin: float) -> dict[str, float]:
    """Compare each arm's logits with single documents', relative; in float32.

    Single documents are computed by transformers without kernels. Its own arms are reported as they are, ours must agree.
    """
    some = [list(document[:GATE_LENGTH]) for document in documents[:GATE_DOCUMENTS]]
    some[1] = some[1][:1]  # a document of one token too
    plain = Arm("padded", kernels="torch")
    with torch.backends.cudnn.flags(allow_tf32=False):  # which PyTorch allows its convolutions
        alone = measured.logits(plain, *([document] for document in some))

        def difference(arm: Arm) -> float:
            return float((measured.logits(arm, some) - alone).norm() / alone.norm())

        most = margin * TIMES * max(difference(plain), ROUNDING)
        differences = {name: difference(arm) for name, arm in arms.items()}
    for name, arm in arms.items():
        if arm.patched and not differences[name] <= most:
            raise RuntimeError(
                f"{name}: logits differ from single documents' by {differences[name]:.2g}, relative, more than {most:.2g}"
            )
    return differences


BENCHES = {"integration": Bench(IntegrationConfig, run)}
