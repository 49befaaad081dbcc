"""The Lightning module: loss and optimizer step."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import lightning
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torchmetrics import Metric

from packmamba.config import Config, OptimizerConfig, TrainerConfig, need, refusing, resolve, validate
from packmamba.data.batch import PackedBatch, StepBatch
from packmamba.nn import MambaLM
from packmamba.nn.loss import linear_cross_entropy
from packmamba.nn.mixers.mixer import is_plain
from packmamba.ops.checks import accumulation_dtype
from packmamba.training.boundary import Boundary, Reset, StatefulBoundary, flatten_states, unflatten_states
from packmamba.training.cuda_graphs import BatchGraphs
from packmamba.training.optimizer import learning_rate, make_optimizer

Backward = Callable[[Tensor], Any]
RESET = Reset()
# Buckets of positions [0, 1), [1, 2), [2, 4), ..., from the document's first token.
POSITION_EDGES = (0, *(2**n for n in range(17)))
START_TOKENS = 32  # of a document: ``val/loss_start`` is their mean loss


class BucketedLoss(Metric):
    """Compute the mean loss of each bucket of targets, such as the sources of a mixture."""

    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(self, buckets: Sequence[Any]) -> None:
        super().__init__()
        self.buckets = buckets
        for name, dtype in {"sums": torch.float64, "counts": torch.int64}.items():
            self.add_state(name, torch.zeros(len(buckets), dtype=dtype), dist_reduce_fx="sum")

    def _apply(self, fn: Any, *arguments: Any, **options: Any) -> Any:
        """Keep dtypes under precision bf16-true and 16-true: bfloat16 sums stop growing."""
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), *arguments, **options)

    def update(self, losses: Tensor, loss_mask: Tensor, bucket: Tensor) -> None:
        """Add (B, L) of a batch."""
        bucket = bucket[loss_mask]
        self.sums.index_add_(0, bucket, losses[loss_mask].to(self.sums.dtype))
        self.counts.index_add_(0, bucket, torch.ones_like(bucket, dtype=self.counts.dtype))

    def compute(self) -> dict[Any, Tensor]:
        """Return means in nats, NaN of a bucket without targets."""
        return dict(zip(self.buckets, self.sums / self.counts))


class LossByPosition(BucketedLoss):
    """Compute mean losses, of all and by bucket of positions.

    One is of documents' first START_TOKENS.
    """

    edges: Tensor

    def __init__(self) -> None:
        super().__init__(POSITION_EDGES)
        self.register_buffer("edges", torch.tensor(POSITION_EDGES[1:]), persistent=False)

    def update(self, losses: Tensor, loss_mask: Tensor, position_indices: Tensor) -> None:
        """Add (B, L) of a batch."""
        super().update(losses, loss_mask, torch.bucketize(position_indices, self.edges, right=True))

    def compute(self) -> dict[str, Tensor]:
        """Return means in nats."""
        # START_TOKENS is an edge, so the first buckets hold exactly these tokens.
        ends = {"loss": None, "loss_start": POSITION_EDGES.index(START_TOKENS)}
        means = {name: self.sums[:end].sum() / self.counts[:end].sum() for name, end in ends.items()}
        return {**means, "by_position": self.sums / self.counts, "counts": self.counts}


class PackedLitModule(lightning.LightningModule):
    """Train a MambaLM on the StepBatches of a PackedDataModule, in any Trainer.

    A step's loss is the sum over its real targets, of
    all micro-batches and ranks, divided by their number.

    Args:
        model: arguments of MambaLM, a MambaLM, or another module with its methods.
        boundary: a key of BOUNDARIES, with ``boundary_options`` as arguments.
        mean_over: "targets"; or "rows": average each micro-batch's row means, then the
            micro-batches, weighted by their targets. So it depends on ``max_tokens_per_batch``.
        cuda_graphs: replay forward and backward of a micro-batch as one CUDA graph.
        compile: torch.compile the blocks, and on a CPU the loss.
        lr, optimizer: keys of the section ``optimizer``;
            ``schedule_steps`` None: the Trainer's steps.

    Raises ConfigError.
    """

    def __init__(
        self,
        model: nn.Module | dict[str, Any] | None = None,
        boundary: str = "reset",
        lr: float = 2e-3,
        *,
        boundary_options: dict[str, Any] | None = None,
        mean_over: str = "targets",
        cuda_graphs: bool = False,
        compile: bool = False,
        **optimizer: Any,
    ) -> None:
        super().__init__()
        # The module steps by itself: micro-batches share one denominator, the step's targets.
        self.automatic_optimization = False
        self.compiled = compile
        takes = isinstance(model, dict | nn.Module)
        need(takes, "model", "MambaLM's arguments or a module", f"{model}; pass your own")
        options = boundary_options or {}
        trainer = validate(TrainerConfig(boundary=boundary, boundary_options=options, mean_over=mean_over))
        self.optimizer_config = resolve(OptimizerConfig, [({"lr": lr, **optimizer}, type(self).__name__)])
        # Two instances: validation must not touch the states that training carries.
        self.boundary, self.evaluation_boundary = trainer.scheme(), trainer.scheme()
        self.mean_over, self.cuda_graphs = mean_over, cuda_graphs
        with refusing(TypeError, prefix="model: "):
            self.model: Any = MambaLM(**model) if isinstance(model, dict) else cast(Any, model)
        if compile:
            self.model.compile_blocks()
        # For ``load_from_checkpoint``: a model of the user's own must be given there again.
        self.save_hyperparameters(ignore="model")
        if isinstance(self.model, MambaLM):
            # With what is no part of the model's own configuration: ``recompute``.
            self.save_hyperparameters({"model": self.model.config | (model if isinstance(model, dict) else {})})
        self.alone, self.as_trained = LossByPosition(), LossByPosition()
        self.by_source: BucketedLoss | None = None  # made when batches of a mixture come
        self._graphs: BatchGraphs | None = None

    @classmethod
    def from_config(cls, config: Config, vocab_size: int) -> "PackedLitModule":
        """Build model and module from a run's configuration."""
        trainer, optimizer = config.trainer, dict(vars(config.optimizer))
        optimizer["schedule_steps"] = config.optimizer.schedule_steps or trainer.max_steps
        names = ("boundary", "boundary_options", "mean_over", "cuda_graphs")
        more = {name: getattr(trainer, name) for name in names}
        module = cls(make_model(config, vocab_size), compile=config.model.compile, **more, **optimizer)
        module._log_hyperparams = False  # a run logs its whole configuration
        return module

    @property
    def scaled(self) -> bool:
        """Tell whether gradients are scaled, as in float16."""
        return self._trainer is not None and self._trainer.precision == "16-mixed"

    def configure_model(self) -> None:
        """Shard blocks, then the rest, where the Trainer's strategy is FSDP2.

        Raises ConfigError.
        """
        # FSDP2 gathers a block while it computes; what is
        # left (embedding, head, norm) is one more unit.
        if self.device_mesh is not None and not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            # By default Lightning's strategy makes all devices of a node tensor parallel: each
            # would train weights of its own.
            sharded = mesh.size() == self.trainer.world_size
            sizes = "data_parallel_size to be all devices, tensor_parallel_size 1"
            need(sharded, "strategy", sizes, mesh.size())
            need(self.boundary.sharded, "strategy", f"ddp with boundary={self.boundary.name}", "FSDP2")
            for part in (*self.model.backbone.layers, self.model):
                fully_shard(part, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer that the configuration names."""
        # The fused optimizer would unscale after clipping.
        fused = self.device.type in ("cpu", "cuda") and not self.scaled
        return make_optimizer(self.model, self.optimizer_config, fused)

    def learning_rate(self, number: int) -> float:
        """Return the learning rate of step ``number``, from 0.

        The schedule ends with the Trainer's steps.
        """
        steps = self.optimizer_config.schedule_steps or self.trainer.estimated_stepping_batches
        return learning_rate(self.optimizer_config, number, steps)

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the model with tokens (B, L) and MambaLM's other arguments."""
        return self.model(tokens, *args, **kwargs)

    def loss(self, batch: PackedBatch, boundary: Boundary = RESET) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy, and without gradient each slot's (B, L)."""
        return self._loss(boundary.hidden(self.model, batch), batch)

    def _loss(self, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the sum over targets, not their mean.

        ``accumulate`` divides by the step's targets.
        """
        layout = batch.layout
        mask = batch.loss_mask
        # The head is the largest product: padding is left out.
        slots = layout.token_slots if layout.has_padding else None
        weights = None  # of targets: all 1
        if self.mean_over == "rows":
            # (B, 1): of T targets in R rows, each of row i's n_i weighs (T / R) / n_i, so that the
            # micro-batch's sum is T times the mean of its rows' means.
            targets_of_row = mask.sum(1, keepdim=True)
            rows = (targets_of_row > 0).sum().clamp(min=1)
            weights = (targets_of_row.sum() / rows / targets_of_row.clamp(min=1)).expand(mask.shape)
        head = self.model.lm_head
        if is_plain(head):
            return linear_cross_entropy(hidden, head.weight, batch.targets, mask, slots, self.compiled, weights)
        # With an adapter the weight is not the whole.
        logits = head(hidden).flatten(0, 1)
        logits = logits.to(accumulation_dtype(logits.dtype))
        losses = cross_entropy(logits, batch.targets.flatten(), reduction="none")
        losses = torch.where(mask, losses.view(mask.shape), 0)
        return (losses if weights is None else losses * weights).sum(), losses.detach()

    def accumulate(self, step: StepBatch, backward: Backward, world_size: int = 1) -> Tensor:
        """Add the step's gradients; return its loss on this rank's targets over all."""
        if self.cuda_graphs:
            return self._replay(step)
        strategy = self._trainer.strategy if self._trainer is not None else None
        total = torch.zeros((), dtype=torch.float32, device=step.batches[0].tokens.device)
        for i, batch in enumerate(step.batches):
            last = i + 1 == len(step.batches)
            # Ranks exchange gradients once a step, with the last micro-batch.
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(last)
            elif isinstance(strategy, DDPStrategy):
                cast(Any, strategy.model).require_backward_grad_sync = last
            loss = self.loss(batch, self.boundary)[0] / max(step.num_targets, 1)
            backward(loss * world_size)  # DDP and FSDP average gradients
            total = total + loss.detach()
        return total

    def _replay(self, step: StepBatch) -> Tensor:
        """Accumulate by CUDA graphs; on one device, as the configuration demands."""
        if self._graphs is None:
            self._graphs = BatchGraphs(self.graph_loss, list(self.model.parameters()))
        losses = []
        boundary: Any = self.boundary
        carries = isinstance(boundary, StatefulBoundary)
        num_targets = max(step.num_targets, 1)
        for i, batch in enumerate(step.batches):
            incoming = boundary.incoming(self.model, batch) if carries else []
            place = {"first": i == 0, "last": i + 1 == len(step.batches)}
            loss, _, *final = self._graphs(batch, num_targets, *flatten_states(incoming), **place)
            # A graph's results lie at fixed addresses, which the next replay overwrites.
            losses.append(loss.clone())
            if carries:
                boundary.store(batch, unflatten_states([part.clone() for part in final], incoming))
        return torch.stack(losses).sum()

    def graph_loss(self, batch: PackedBatch, *incoming: Tensor) -> tuple[Tensor, ...]:
        """Compute what a CUDA graph replays: the loss, each slot's, and the rows' final states."""
        if not isinstance(self.boundary, StatefulBoundary):
            return self.loss(batch, self.boundary)
        # Of no documents, for the structure alone: which tensors belong to which layer.
        states = unflatten_states(incoming, self.model.start_states(0))
        hidden, final = self.boundary.forward(self.model, batch, states)
        return *self._loss(hidden, batch), *flatten_states(final)

    def take_step(
        self, step: StepBatch, optimizer: Any, number: int, backward: Any = Tensor.backward, ranks: int = 1
    ) -> Any:
        """Take step ``number``, from 0; return ``accumulate``'s loss."""
        # A function of the step: no scheduler, whose state would have to be resumed.
        for parameters in optimizer.param_groups:
            parameters["lr"] = self.learning_rate(number)
        self.boundary.step = number
        optimizer.zero_grad()
        loss = self.accumulate(step, backward, ranks)
        optimizer.step()
        return loss

    def training_step(self, step: StepBatch, step_index: int) -> Tensor:
        """Take an optimizer step of all its micro-batches.

        Log its loss, learning rate, padding and gradient norm.
        """
        optimizer: Any = self.optimizers()
        number = self.global_step  # counts the calls of ``optimizer.step``
        ranks = self.trainer.world_size
        loss = self.take_step(step, optimizer, number, self.manual_backward, ranks)
        if ranks > 1:
            torch.distributed.all_reduce(loss)  # without the strategy's barrier
        every = getattr(self.trainer, "log_every_n_steps", None) or 1
        if number + 1 in (1, self.trainer.max_steps) or (number + 1) % every == 0:
            # On the CPU, and only here: it waits for the GPU.
            self.log("train/loss", loss.cpu(), prog_bar=True)
            logged: Any = {f"train/{name}": value for name, value in self.boundary.measures().items()}
            logged["train/learning_rate"] = self.learning_rate(number)
            logged["data/padding_fraction"] = 1 - step.num_tokens / step.num_slots
            if (norm := getattr(optimizer.optimizer, "gradient_norm", None)) is not None:
                # The norm of sharded gradients is a DTensor: sum it over ranks.
                logged["train/gradient_norm"] = getattr(norm, "full_tensor", lambda: norm)()
            self.log_dict({name: torch.tensor(float(value), dtype=torch.float64) for name, value in logged.items()})
        return loss

    def validation_step(self, batch: PackedBatch, batch_index: int, dataloader_idx: int = 0) -> None:
        """Add a batch's losses to the metrics.

        Loader 0 reads documents alone, loader 1 as trained.
        """
        # Documents alone are read under reset, whatever the training's scheme is.
        boundary, metric = RESET, self.alone
        if dataloader_idx:
            boundary, metric = self.evaluation_boundary, self.as_trained
        losses = self.loss(batch, boundary)[1]
        metric.update(losses, batch.loss_mask, batch.layout.position_indices)
        if batch.source_names and metric is self.alone:
            if self.by_source is None:
                self.by_source = BucketedLoss(batch.source_names).to(self.device)
            if batch.source is not None and len(batch.source):  # a rank's batch may hold no document
                self.by_source.update(losses, batch.loss_mask, batch.source[batch.layout.documents])

    def on_validation_epoch_start(self) -> None:
        """Empty the metrics and the states that validation carries."""
        for part in (self.evaluation_boundary, self.alone, self.as_trained, self.by_source):
            if part is not None:
                part.reset()

    def on_validation_epoch_end(self, split: str = "val") -> None:
        """Log the losses.

        They are of all targets, of documents' first tokens, and by source of a mixture.
        """
        # Of the two metrics only those whose loader ran.
        for metric, suffix in ((self.alone, ""), (self.as_trained, "_as_trained")):
            for name in ("loss", "loss_start") if metric.update_called else ():
                shown = f"{name}{suffix}" == "loss"
                loss = metric.compute()[name]
                self.log(f"{split}/{name}{suffix}", loss, prog_bar=shown, sync_dist=True)
        for name, loss in self.by_source.compute().items() if self.by_source is not None else ():
            self.log(f"{split}/loss/{name}", loss, sync_dist=True)

    test_step = validation_step
    on_test_epoch_start = on_validation_epoch_start

    def predict_step(self, batch: PackedBatch, batch_index: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Score the S documents of a batch, each from zero state, in the batch's order.

        Returns:
            ``loss``: (S,) float64, mean nats per target, NaN for a document without a target.
            ``num_targets``: (S,) int64. A document's log likelihood is ``-loss * num_targets``.
        """
        losses = self.loss(batch)[1][batch.loss_mask].double()
        document = batch.layout.documents[batch.loss_mask]
        num_targets = torch.bincount(document, minlength=batch.layout.num_documents)
        sums = torch.zeros_like(num_targets, dtype=torch.float64).index_add_(0, document, losses)
        return {"loss": sums / num_targets, "num_targets": num_targets}

    def on_test_epoch_end(self) -> None:
        """Log the same losses under ``test/``."""
        self.on_validation_epoch_end("test")

    def on_fit_start(self) -> None:
        """Drop captured CUDA graphs."""
        self._graphs = None  # of parameters that may have moved

    on_fit_end = on_fit_start

    def on_train_start(self) -> None:
        """Forget states of an earlier training, unless this one continues it or a checkpoint."""
        if self.global_step == 0:
            self.boundary.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add every rank's carried states and all random generators.

        So resuming keeps the bits.
        """
        # Each rank carries the states of its own streams; rank 0 writes those of all.
        carried = [self.boundary.state_dict()] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(carried, carried[0])
        checkpoint["carry"] = carried
        checkpoint["rng"] = _collect_rng_states()
        # A plain list: checkpoints are loaded with weights_only=True, which takes no NumPy arrays.
        kind, numbers, *place = checkpoint["rng"]["numpy"]
        checkpoint["rng"]["numpy"] = (kind, numbers.tolist(), *place)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them when training resumes. Raises ConfigError for another number of devices."""
        # Else Lightning would copy float64 weights into a module that it makes float64 later.
        if self._trainer is not None and self._trainer.precision == "64-true":
            self.double()
        # Validation and test load the weights alone.
        if self._trainer is None or self._trainer.state.fn != "fit":
            return
        carried = checkpoint["carry"]
        ranks = self.trainer.world_size
        need(len(carried) == ranks, "trainer.devices", f"{len(carried)}, as the checkpoint has", ranks)
        self.boundary.load_state_dict(carried[self.trainer.global_rank], self.device)
        # Where a checkpoint is loaded onto a GPU: random states are taken from the CPU alone.
        _set_rng_states(move_data_to_device(checkpoint["rng"], torch.device("cpu")))


def make_model(config: Config, vocab_size: int) -> MambaLM:
    """Make the configured model with new weights, or load ``model.pretrained``.

    Raises ConfigError.
    """
    model = config.model
    shared: Any = {"recompute": model.recompute, "backend": config.ops.backend}
    if model.pretrained is not None:
        with refusing(FileNotFoundError, ValueError, prefix="model.pretrained: "):
            loaded = MambaLM.from_pretrained(str(model.pretrained), **shared)
        rows = len(loaded.lm_head.weight)
        expected = f"an embedding of the corpus's {vocab_size} ids"
        need(rows >= vocab_size, "model.pretrained", expected, f"{rows}; set data.tokenizer to the checkpoint's")
        return loaded
    # The embedding may have more rows than the corpus has ids, as padded or published ones do.
    rows = vocab_size if model.vocab_size is None else model.vocab_size
    need(rows >= vocab_size, "model.vocab_size", f"at least the corpus's {vocab_size}", rows)
    options = {name: getattr(model, name) for name in ("d_model", "n_layer", "tie_embeddings", "mixer")}
    with refusing(ValueError, TypeError, prefix="model."):
        return MambaLM(rows, **shared, **options, **model.of_mixer())
