"""An arm of the bench: which documents make a batch, whose kernels compute, and Trainer's steps on them, timed."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from packmamba.config import ConfigError
from packmamba.integrations.transformers import patch
from packmamba.ops.mamba_ssm import _peer
from packmamba.timing import PeakMemory, free_memory, now

Documents = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Arm:
    """What one line of the table does; sizes of None are the bench's.

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
        from transformers import Trainer, TrainingArguments

        clock = Clock(self.device, warm_up)
        free_memory()
        with self.borrowed(arm) as model, tempfile.TemporaryDirectory() as folder:
            peak = PeakMemory(self.device)
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=per_step, num_train_epochs=1, learning_rate=self.learning_rate,
                lr_scheduler_type="constant", bf16=self.precision == "bfloat16", report_to=[], save_strategy="no",
                logging_steps=1000, disable_tqdm=True, use_cpu=self.device.type == "cpu", seed=self.seed,
                dataloader_pin_memory=self.device.type == "cuda",
            )  # fmt: skip
            trainer = type("InOrder", (Trainer,), {"_get_train_sampler": lambda self, *_: SequentialSampler(self.train_dataset)})(
                model=model, args=arguments, data_collator=arm.collate, callbacks=[clock.callback()],
                train_dataset=[{"input_ids": list(document)} for document in documents],
            )  # fmt: skip
            clock.watch(trainer)
            trainer.train()
            return Turn(clock.seconds(), clock.losses(), peak.bytes())


@dataclass(frozen=True)
class Turn:
    seconds: float
    """Of the steps behind the first ones."""
    losses: list[float]
    """Of every step, nats per target."""
    peak: int | None


class Clock:
    """When Trainer's steps end, and what they lost, without a wait between them."""

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self._device, self._warm_up, self._lost = device, warm_up, list[Tensor]()
        self._begun = self._ended = 0.0

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Watch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == clock._warm_up:
                    clock._begun = now(clock._device)

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == state.max_steps:
                    clock._ended = now(clock._device)

        return Watch()

    def watch(self, trainer: Any) -> None:
        step: Callable[..., Tensor] = trainer.training_step

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            loss = step(*args, **kwargs)
            self._lost.append(loss.detach())
            return loss

        trainer.training_step = watched

    def seconds(self) -> float:
        return self._ended - self._begun

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._lost]
