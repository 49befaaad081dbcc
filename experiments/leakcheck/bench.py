"""Check which of transformers' state-space, linear-attention and hybrid models leak when documents
are packed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.by_name import Bench
from packmamba.config import ConfigError, key, need, suggest
from packmamba.integrations.transformers import patch
from packmamba.isolation import LeakCheckResult, leakcheck
from packmamba.lab.records import append_record, make_record, provenance
from packmamba.ops.mamba_ssm import _peer

KERNELS = ("causal-conv1d", "mamba-ssm", "flash-linear-attention", "flash-attn")
TRL = "trl"  # among boundaries: all arguments that TRL's own collator makes
PATCHED = ", patched"  # ends the name of an arm whose model is patched


@dataclass
class AuditConfig:
    experiment: str = key("leakcheck", "The question, which the records name.")
    boundaries: list[str] = key(
        ["position_ids"], "Boundary arguments as leakcheck takes them; trl: those of TRL's collator.",
        check=("at least one argument", bool),
    )  # fmt: skip
    shared: dict[str, Any] = key({}, "Keys of every model's configuration that has them.")
    models: dict[str, Any] = key({}, "By model type its family, its own keys as config, and patch: if to patch it.")
    only: list[str] = key([], "Of these models alone; empty: of all.")
    device: str = key("cpu", "cpu or cuda: with the kernels that models need for packing, if they are installed.")
    seed: int = key(0, "Seed of the weights.", low=0)


def run(c: AuditConfig, records_path: Path, progress: bool = True) -> None:
    """Append a record per model and boundary argument; metrics are 1, 0 or null, and tokens
    reached.
    """
    arms = chosen_models(c.models, c.only)
    for name, of in arms.items():
        make_configuration(name, of, c.shared)  # before any work
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    provenance()
    if c.device != "cpu":
        # one block size each: others take minutes to build
        os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
        find_kernels()
    chosen = [boundaries for boundaries in c.boundaries if boundaries != TRL or _version(TRL)]
    arms |= {f"{name}{PATCHED}": of for name, of in arms.items() if of.get("patch")}
    cells = [(arm, of, boundaries) for arm, of in arms.items() for boundaries in chosen]
    for arm, of, boundaries in tqdm(cells, unit="check", disable=not progress, mininterval=1):
        begun = time.perf_counter()
        torch.manual_seed(c.seed)
        configuration = make_configuration(arm.removesuffix(PATCHED), of, c.shared)
        model: Any = transformers.AutoModelForCausalLM.from_config(configuration).to(c.device)
        model = patch(model) if arm.endswith(PATCHED) else model
        try:
            result = leakcheck(Collated(model)) if boundaries == TRL else leakcheck(model, boundaries)
            failed = False
        except Exception as error:  # a model that does not run here does not end the audit
            said, failed = f"{type(error).__name__}: {' '.join(str(error).split())}", True
            result = LeakCheckResult(boundaries, raises=said)
        append_record(records_path, _record(c, arm, of, boundaries, model, result, failed, time.perf_counter() - begun))


def chosen_models(models: dict[str, Any], only: list[str]) -> dict[str, dict[str, Any]]:
    """Select the models that ``only`` names, all where it is empty.

    Raises ConfigError for an unknown name.
    """
    for name in only:
        if name not in models:
            raise ConfigError(f"only: unknown model '{name}'{suggest(name, models)}")
    return {name: dict(of or {}) for name, of in models.items() if not only or name in only}


class Collated(torch.nn.Module):
    """Call a model with all that TRL's collator of packed documents makes."""

    def __init__(self, model: Any) -> None:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        super().__init__()
        self.model, self.config = model, model.config
        self.collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> Any:
        if position_ids is not None:
            starts = (position_ids[0] == 0).nonzero()[1:, 0].tolist()
            batch = self.collator([{"input_ids": part.tolist()} for part in input_ids[0].tensor_split(starts)])
            marks = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
            options |= {k: v.to(input_ids.device) if isinstance(v, Tensor) else v for k, v in marks.items()}
        return self.model(input_ids=input_ids, **options)


def find_kernels() -> None:
    """Make mamba-ssm's kernels importable one by one, before transformers asks: the whole package
    wants more than they do.
    """
    for module, name in (
        ("selective_scan_interface", "selective_scan_fn"),
        ("triton.selective_state_update", "selective_state_update"),
        ("triton.ssd_combined", "mamba_chunk_scan_combined"),
    ):
        with contextlib.suppress(ValueError, ImportError):
            _peer("mamba_ssm", f"ops.{module}", name)


def make_configuration(name: str, of: dict[str, Any], shared: dict[str, Any]) -> Any:
    """Make a transformers configuration of this type.

    Raises ConfigError for an unknown type or key.
    """
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        raise ConfigError(f"models.{name}: transformers has no such model type{suggest(name, CONFIG_MAPPING)}")
    made = CONFIG_MAPPING[name]
    known, own = {field.name for field in dataclasses.fields(made)}, of.get("config") or {}
    unknown = ", ".join(own.keys() - known)
    need(not unknown, f"models.{name}.config", f"keys of {made.__name__}", unknown)
    return made(**{k: v for k, v in shared.items() if k in known} | own)


def _record(
    c: AuditConfig, arm: str, of: dict[str, Any], boundaries: str, model: Any, result: LeakCheckResult, failed: bool,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    import transformers

    config = {"boundaries": boundaries, "family": of.get("family"), "class": type(model).__name__}
    config |= {"keys": of.get("config") or {}, "shared": c.shared, "device": c.device}
    config |= {"transformers": transformers.__version__, "trl": _version(TRL) if boundaries == TRL else None}
    config |= {"kernels": {name: _version(name) for name in KERNELS}}
    config |= {"module": result.module, "error": result.raises, "verdict": str(result)}
    raises = result.raises is not None
    flags = {"leaks": None if raises else result.leaks, "raises": raises, "fails": failed}
    names = ("isolated_forward", "isolated_backward", "same_as_alone", "ignored", "endless")
    flags |= {name: getattr(result, name) for name in names}
    flags |= {f"padding_{side}": result.padding.get(side) for side in ("left", "right")}
    metrics = {name: None if flag is None else int(flag) for name, flag in flags.items()}
    metrics |= {name: getattr(result, name) for name in ("largest", "difference", "reach")}
    corpus = "random tokens, documents of 19, 1, 23, 2, 38 and of 64, 63, 1, 65 tokens"
    return make_record("audit", c.experiment, arm, config, c.seed, corpus, metrics, seconds)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


BENCHES = {"leakcheck": Bench(AuditConfig, run)}
