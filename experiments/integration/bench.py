"""Time models in Hugging Face's Trainer: as they come, flattened as they come, and patched, in
turns.
"""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from experiments.by_name import Bench
from experiments.common import PeakMemory
from experiments.leakcheck.bench import chosen_models, find_kernels, make_configuration
from experiments.timing import free_memory, median, now, spread, take_turns
from packmamba.config import ConfigError, DataConfig, key, load_config
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.sources.builtin import open_stdlib
from packmamba.integrations.transformers import patch
from packmamba.lab.records import append_record, make_record, provenance
from packmamba.layout import round_up

Documents = Sequence[Sequence[int]]
SIZES = ("documents_per_step", "steps", "warm_up_steps", "rounds")


@dataclass(frozen=True)
class Arm:
    """Hold an arm of the table; sizes that it does not name are the bench's.

    Attributes:
        batches: padded to the batch's longest; the same with all documents sorted by length before;
            flattened into one row.
        kernels: transformers' own path, on mamba-ssm's kernels or on PyTorch alone; None where it
            is patched.
        patched: by ``packmamba.integrations.transformers.patch``.
        leaks: documents change what follows them; for the legend.
        multiple_of: rows end in padding up to a multiple of so many tokens, as collators'
            ``pad_to_multiple_of``.
    """

    batches: str
    kernels: str | None = None
    patched: bool = False
    leaks: bool = False
    multiple_of: int = 1
    documents_per_step: int = 1
    steps: int = 1
    warm_up_steps: int = 0
    rounds: int = 1

    def arranged(self, documents: Documents) -> Documents:
        """Return the first documents, as many as it takes, in the order in which they are trained
        on.
        """
        first = self.warm_up_steps * self.documents_per_step
        rest = documents[first : first + self.steps * self.documents_per_step]
        return [*documents[:first], *(sorted(rest, key=len, reverse=True) if self.batches == "grouped" else rest)]

    def collate(self, features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        """A batch as transformers' collators make it.

        A document's first token is no target: Trainer divides by what is.
        """
        if self.batches == "flattened":
            from transformers import DataCollatorWithFlattening

            batch = DataCollatorWithFlattening()(features)
        else:
            rows = [torch.tensor(feature["input_ids"]) for feature in features]
            pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
            batch = {"input_ids": pad(rows), "attention_mask": pad([torch.ones_like(row) for row in rows])}
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            batch["labels"][:, 0] = -100
        missing = -batch["input_ids"].shape[1] % self.multiple_of
        fill = {"labels": -100}  # others 0, as TRL's padding-free collator
        return {name: torch.nn.functional.pad(batch[name], (0, missing), value=fill.get(name, 0)) for name in batch}

    def per_document(self, logits: Tensor, lengths: Sequence[int]) -> Tensor:
        """The logits (tokens, vocab) of a batch's documents, one behind the other."""
        if self.batches == "flattened":
            return logits[0, : sum(lengths)]
        return torch.cat([row[:length] for row, length in zip(logits, lengths)])


def functions_of(modeling: Any) -> dict[str, Any]:
    """Return the functions that transformers' module of a model defines."""
    found = inspect.getmembers(modeling, inspect.isfunction)
    return {name: function for name, function in found if function.__module__ == modeling.__name__}


def check_kernels(modeling: Any) -> None:
    """Raise ConfigError unless transformers' module of a model has found the peers' kernels for
    training.
    """
    for name, function in functions_of(modeling).items():
        if not name.endswith("_update"):  # which generates
            if inspect.getclosurevars(function).nonlocals.get("is_new_implementation") is False:
                raise ConfigError(
                    "arms: kernels=mamba_ssm needs mamba-ssm and causal-conv1d, in which transformers does not find "
                    f"{name} here"
                )


def on_torch_alone(modeling: Any) -> Any:
    """Return the context of transformers' own path without kernels, also where they are installed."""
    functions = functions_of(modeling).items()
    return mock.patch.multiple(modeling, **{name: inspect.unwrap(function) for name, function in functions})


class Measured:
    """One model as transformers makes it and the same patched; an arm borrows one of them for a
    turn.
    """

    def __init__(self, model: Any, config: SpeedConfig, device: torch.device) -> None:
        self.modeling = sys.modules[type(model).__module__]
        model.config.use_cache = False  # as Trainer sets it
        self.models = {False: model, True: patch(copy.deepcopy(model))}
        self.start = copy.deepcopy(model.state_dict())
        self.config, self.device = config, device

    @contextlib.contextmanager
    def borrowed(self, arm: Arm) -> Iterator[torch.nn.Module]:
        """The arm's model on the device, with the weights that all start from."""
        if arm.kernels == "mamba_ssm":
            check_kernels(self.modeling)
        model: Any = self.models[arm.patched]
        model.load_state_dict(self.start)
        model.to(self.device).train()
        try:
            with on_torch_alone(self.modeling) if arm.kernels == "torch" else contextlib.nullcontext():
                yield model
        finally:
            model.zero_grad(set_to_none=True)
            model.cpu()

    def evaluate(self, arm: Arm, *batches: Documents) -> tuple[Tensor, float]:
        """Return logits (tokens, vocab) and the last batch's loss, in float32 as in training, of
        the arm's batches.
        """
        found, loss = [], float("nan")
        with self.borrowed(arm) as model, torch.no_grad():
            for documents in batches:
                batch = arm.collate([{"input_ids": list(document)} for document in documents])
                output = model(**{name: value.to(self.device) for name, value in batch.items()})
                lengths, loss = [len(document) for document in documents], float(output.loss)
                found.append(arm.per_document(output.logits.float(), lengths).cpu())
        return torch.cat(found), loss

    def train(self, arm: Arm, documents: Documents) -> Turn:
        """Trainer on these documents in this order, from the start; timed behind the arm's first
        ``warm_up_steps``.
        """
        from transformers import Trainer, TrainerCallback, TrainingArguments

        c, device, losses, times = self.config, self.device, list[Tensor](), list[float]()

        class Timed(Trainer):
            def _get_train_sampler(self, *_: Any) -> SequentialSampler:
                return SequentialSampler(documents)

            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                if self.state.global_step == arm.warm_up_steps:
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
                output_dir=folder, per_device_train_batch_size=arm.documents_per_step, num_train_epochs=1,
                learning_rate=c.learning_rate, lr_scheduler_type="constant", bf16=c.precision == "bfloat16", report_to=[],
                save_strategy="no", logging_steps=1000, disable_tqdm=True, use_cpu=device.type == "cpu", seed=c.seed,
                dataloader_pin_memory=device.type == "cuda",
            )  # fmt: skip
            dataset: Any = [{"input_ids": list(document)} for document in documents]
            Timed(model, arguments, arm.collate, dataset, callbacks=[End()]).train()
            return Turn(times[1] - times[0], [float(loss) for loss in losses], peak.bytes())


@dataclass(frozen=True)
class Turn:
    # Seconds of the steps behind the first ones.
    seconds: float
    # Loss of every step, nats per target.
    losses: list[float]
    peak: int | None


GATE_DOCUMENTS, GATE_LENGTH = 6, 100
# A patched arm's logits in float32 may differ from single documents' by ``TIMES`` what
# transformers' own padded batch differs on the same path, or ``ROUNDING`` if that is more,
# relative: rounding, which random weights amplify from layer to layer.
ROUNDING, TIMES = 1e-5, 10


@dataclass
class SpeedConfig:
    """Hold the keys of both benches."""

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


@dataclass
class IntegrationConfig(SpeedConfig):
    bench: str = "integration"
    model: str = key("130m", "Published size of the model, whose weights are random.")
    overrides: list[str] = key([], "Further keys of the model, such as model.n_layer=2.")


@dataclass
class TrainerConfig(SpeedConfig):
    bench: str = "trainer"
    models: dict[str, Any] = key({}, "By model type its own keys as config; weights are random.")
    shared: dict[str, Any] = key({}, "Keys of every model's configuration that has them.")
    only: list[str] = key([], "Of these models alone; empty: of all.")


def run(c: IntegrationConfig, records_path: Path, progress: bool = True) -> None:
    """Append a record of kind ``integration`` for each arm; RuntimeError if a patched one differs
    from single documents.
    """
    sizes = load_config(None, [f"model={c.model}", *c.overrides]).model
    find_kernels()  # before transformers looks for them
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(c.seed)
    config = MambaConfig(
        vocab_size=sizes.vocab_size or 50280, hidden_size=sizes.d_model, num_hidden_layers=sizes.n_layer,
        state_size=sizes.d_state or 16, expand=sizes.expand, tie_word_embeddings=sizes.tie_embeddings,
    )  # fmt: skip
    named = {"model": c.model, "overrides": list(c.overrides)}
    measure(c, MambaForCausalLM(config), named, records_path, progress)


def run_trainer(c: TrainerConfig, records_path: Path, progress: bool = True) -> None:
    """Append a record of kind ``trainer`` for each model and arm; of an arm that does not run, its
    error.
    """
    models = chosen_models(c.models, c.only)
    find_kernels()
    from transformers import AutoModelForCausalLM

    for name, of in models.items():
        torch.manual_seed(c.seed)
        model = AutoModelForCausalLM.from_config(make_configuration(name, of, c.shared))
        named = {"model": name, "class": type(model).__name__, "keys": {**c.shared, **(of.get("config") or {})}}
        named["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        measure(c, model, named, records_path, progress)
        del model
        free_memory()


def measure(c: SpeedConfig, model: Any, named: dict[str, Any], records_path: Path, progress: bool) -> None:
    """Append a record for each arm of a model; ``named``: what the records' config says of it."""
    ends = isinstance(c, IntegrationConfig)  # at the first error
    sizes = {name: getattr(c, name) for name in SIZES}
    arms = {name: Arm(**{**sizes, **fields}) for name, fields in c.arms.items()}
    provenance()
    measured = Measured(model, c, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    documents = draw_documents(c.distribution, c.documents_per_step * (c.steps + c.warm_up_steps), c.seed)
    arranged = {name: arm.arranged(documents) for name, arm in arms.items()}
    errors: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        try:
            return None if name in errors else call()
        except Exception as error:
            if ends and not isinstance(error, torch.OutOfMemoryError):
                raise
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{named['model']}, {name}: {errors[name]}; it is left out", file=sys.stderr)
        free_memory()  # not above, where the exception's frames hold it

    def turns(name: str) -> Callable[[int], Any]:
        return lambda _: attempt(name, lambda: measured.train(arms[name], arranged[name]))

    gate = Gate(measured, documents, c.margin)
    found = {name: attempt(name, functools.partial(gate, name, arm)) for name, arm in arms.items()}
    begun = time.perf_counter()
    samples: dict[str, list[Turn | None]] = take_turns(
        {name: turns(name) for name in arms}, c.rounds, warm_up=0,
        at_most={name: arm.rounds for name, arm in arms.items()},
        bar=named["model"] if progress else None,
    )  # fmt: skip
    wall = time.perf_counter() - begun
    for name, of_arm in samples.items():
        arm, taken = arms[name], [turn for turn in of_arm if turn is not None and name not in errors]
        if ends and not taken:
            continue
        tokens, slots = _counts(arm, arranged[name][arm.warm_up_steps * arm.documents_per_step :])
        rates = [tokens / turn.seconds for turn in taken]
        speeds: dict[str, Any] = {} if not taken else {
            "real_tokens_per_second": median(rates),
            "real_tokens_per_second_spread": spread(rates),
            "seconds_per_step": median(turn.seconds / arm.steps for turn in taken),
            "slots_per_second": median(rates) * slots / tokens,
            "first_loss": taken[0].losses[0],
            "last_loss": float(np.mean(taken[0].losses[-min(10, arm.steps) :])),
        }  # fmt: skip
        config = {k: v for k, v in vars(c).items() if k not in ("arms", "bench", "models", "shared", "only")}
        config |= {**vars(arm), **named, "rounds": len(taken), "error": errors.get(name)}
        config["transformers"] = importlib.metadata.version("transformers")
        metrics = speeds | {"padding_fraction": 1 - tokens / slots, "tokens_per_step": tokens / arm.steps}
        metrics |= {"peak_memory_bytes": max((turn.peak for turn in taken if turn.peak is not None), default=None)}
        metrics |= found[name] or {}
        curves = {
            "loss": [{"step": step, "loss": loss} for step, loss in enumerate(taken[0].losses)] if taken else [],
            "turns": [{"turn": turn, "real_tokens_per_second": rate} for turn, rate in enumerate(rates)],
        }
        corpus = f"{c.distribution}: bytes of the standard library"
        kind = "integration" if ends else "trainer"
        record = make_record(kind, "integration", name, config, c.seed, corpus, metrics, wall, curves)
        append_record(records_path, record)


def draw_documents(distribution: str, count: int, seed: int) -> Documents:
    """Pieces of the standard library's functions, one after the other as bytes, of drawn lengths."""
    lengths = draw_lengths(distribution, count, seed).tolist()
    functions = open_stdlib(DataConfig(source="stdlib")).read()
    text = itertools.chain.from_iterable(document.content.encode() for document in functions)
    return [list(itertools.islice(text, length)) for length in lengths]


def _counts(arm: Arm, documents: Documents) -> tuple[int, int]:
    """(tokens, slots) of all steps."""
    lengths, per_step = [len(document) for document in documents], arm.documents_per_step
    steps = [lengths[first : first + per_step] for first in range(0, len(lengths), per_step)]
    flat = arm.batches == "flattened"
    rows = [(1, sum(step)) if flat else (len(step), max(step)) for step in steps]
    return sum(lengths), sum(count * round_up(length, arm.multiple_of) for count, length in rows)


class Gate:
    """Compare an arm's logits with single documents', relative, and its loss with that of the
    documents padded; in float32.

    Single documents are computed by transformers without kernels. Its own arms are reported as they
    are, ours must agree.
    """

    def __init__(self, measured: Measured, documents: Documents, margin: float) -> None:
        self.measured = measured
        self.documents = [list(document[:GATE_LENGTH]) for document in documents[:GATE_DOCUMENTS]]
        self.documents[1] = self.documents[1][:1]  # a document of one token too
        plain = Arm("padded", kernels="torch")
        with torch.backends.cudnn.flags(allow_tf32=False):  # which PyTorch allows its convolutions
            self.alone = measured.evaluate(plain, *([document] for document in self.documents))[0]
            logits, self.loss = measured.evaluate(plain, self.documents)
        self.most = margin * TIMES * max(self._off(logits), ROUNDING)

    def _off(self, logits: Tensor) -> float:
        return float((logits - self.alone).norm() / self.alone.norm())

    def __call__(self, name: str, arm: Arm) -> dict[str, float]:
        """Return an arm's metrics. Raises RuntimeError if it is patched and wrong."""
        with torch.backends.cudnn.flags(allow_tf32=False):
            logits, loss = self.measured.evaluate(arm, self.documents)
        found = {"difference": self._off(logits), "loss_difference": abs(loss - self.loss)}
        for what, off in (("logits", found["difference"]), ("loss", found["loss_difference"] / self.loss)):
            if arm.patched and not off <= self.most:
                raise RuntimeError(
                    f"{name}: {what} differ from single documents' by {off:.2g}, relative, more than {self.most:.2g}"
                )
        return found


BENCHES = {"integration": Bench(IntegrationConfig, run), "trainer": Bench(TrainerConfig, run_trainer)}
