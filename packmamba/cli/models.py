"""The commands that take a trained model: eval, generate, export."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import OmegaConf

from packmamba.config import (
    ConfigError,
    DataConfig,
    Holds,
    at_least,
    key,
    load,
    parse_override,
    resolve,
    suggest,
)
from packmamba.records import append_record, check_writable, make_record, read_records, write_items


@dataclass
class EvalConfig:
    """Keys of ``eval``."""

    tasks: list[str] = key(["perplexity"], "Evaluations by name, or tasks of lm-evaluation-harness.")
    data: DataConfig = field(default_factory=DataConfig)
    examples: int = key(200, "Examples of each task.", at_least(1))
    seed: int = key(1_000_000, "Seed of the tasks' examples.", at_least(0))
    options: dict[str, Any] = key({}, "For each evaluation its parameters, such as options.mqar.num_pairs=4.")
    max_slots: Optional[int] = key(
        None, "Slots of a pass; null: 16384 on a GPU, 65536 of a model narrower than 1024, 2048 on a CPU.", at_least(1)
    )
    device: str = key("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")
    dtype: Optional[str] = key(None, "dtype of the weights: float64, float32, bfloat16, float16; null: as they are.")
    include_path: Optional[str] = key(None, "A folder with YAML tasks of lm-evaluation-harness.")
    limit: Optional[int] = key(None, "Most examples of a task of lm-evaluation-harness; null: all.", at_least(1))
    output: Optional[str] = key(None, "Folder for records/ and items/; null: evaluation/ in the model's folder.")
    plugins: list[str] = key([], "Python modules to import first.")


def evaluate_model(folder: str, overrides: Sequence[str]) -> tuple[Path, list[dict[str, Any]]]:
    """Answers every evaluation that has no record yet; returns the output folder and the records of all.

    Each evaluation's record is written when it ends, so a killed command goes on with the evaluations that have none.
    """
    from packmamba.evaluation.load import read_config

    config = _load(read_config(folder).data, folder, overrides)
    output = Path(config.output) if config.output else Path(folder) / "evaluation"
    check_writable(output / "records", "output")
    from packmamba.evaluation.load import load_model
    from packmamba.evaluation.registry import EVALUATIONS, default_max_slots
    from packmamba.training.run_id import RunLock

    manager = _harness_tasks([name for name in config.tasks if name not in EVALUATIONS], config, list(EVALUATIONS))
    subject = load_model(folder, config.device, config.dtype)
    max_slots = config.max_slots or default_max_slots(subject.model)
    for name in config.tasks:
        if name in EVALUATIONS:
            EVALUATIONS[name].check(_asked(name, subject, config, max_slots), len(subject.model.lm_head.weight))
    found = []
    with RunLock(output):
        for number, name in enumerate(config.tasks, start=1):
            print(f"[{number}/{len(config.tasks)}] {name}", file=sys.stderr, flush=True)
            run = _ours if name in EVALUATIONS else functools.partial(_harness, manager)
            found.append(run(name, subject, config, max_slots, output))
    return output, found


def _load(data: DataConfig, folder: str, overrides: Sequence[str]) -> EvalConfig:
    config = resolve(
        EvalConfig,
        [(OmegaConf.create({"data": asdict(data)}), folder), *((parse_override(o), f"'{o}'") for o in overrides)],
    )
    if not config.tasks:
        raise ConfigError("tasks: expected at least one, got none")
    for name in config.options:
        if name not in config.tasks:
            raise ConfigError(f"options.{name}: not among tasks{suggest(name, config.tasks)}")
        if not isinstance(config.options[name], dict):
            raise ConfigError(f"options.{name}: expected keys and their values, got {config.options[name]!r}")
    return config


def _harness_tasks(names: list[str], config: EvalConfig, ours: list[str]) -> Any:
    """lm-evaluation-harness' manager of the tasks with these names. Raises ConfigError for one that it does not know."""
    if not names:
        return None
    missing = importlib.util.find_spec("lm_eval") is None
    for name in () if missing else _in_no_file(names, config.include_path):
        raise ConfigError(f"tasks: unknown '{name}', neither ours nor lm-evaluation-harness'{suggest(name, ours)}")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        hint = "tasks of lm-evaluation-harness need pip install 'packmamba[eval]'"
        raise ConfigError(f"tasks: unknown '{names[0]}'{suggest(names[0], ours)}; {hint}") from None
    if config.include_path is not None:
        own = TaskManager(include_path=config.include_path, include_defaults=False)  # its own take long to read
        if set(names) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=config.include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(f"tasks: unknown '{name}', neither ours nor lm-evaluation-harness'{suggest(name, ours)}")
    return manager


def _in_no_file(names: Iterable[str], include_path: str | None) -> list[str]:
    """The names that are in no YAML file of tasks: looking takes a third of a second, the harness's own index twenty."""
    spec = importlib.util.find_spec("lm_eval")
    roots = [Path(root) / "tasks" for root in (spec.submodule_search_locations if spec else None) or ()]
    if odd := [name for name in names if name.startswith(".") or set(name) & set("*?[")]:
        return odd  # they may be in files, but are no names
    unknown = {name: name.encode(errors="replace") for name in names}
    for root in [*roots, *([Path(include_path)] if include_path else [])]:
        for path in root.rglob("*yaml*"):
            content = path.read_bytes() if unknown and path.is_file() else b""
            unknown = {name: word for name, word in unknown.items() if word not in content}
    return list(unknown)


def _asked(name: str, subject: Any, config: EvalConfig, max_slots: int) -> Any:
    from packmamba.evaluation.registry import EvalContext

    return EvalContext(
        config.data, subject.tokenizer, config.examples, config.seed, max_slots, dict(config.options.get(name, {})),
        trainer=subject.config.trainer, losses=subject.losses,
    )  # fmt: skip


def _ours(name: str, subject: Any, config: EvalConfig, max_slots: int, output: Path) -> dict[str, Any]:
    from packmamba.evaluation.registry import evaluate

    asked = _asked(name, subject, config, max_slots)
    data = asdict(config.data)
    del data["cache_dir"]
    settings = {"name": name, "examples": config.examples, "seed": config.seed, "options": asked.options,
                "max_slots": max_slots, "dtype": config.dtype, "data": data}  # fmt: skip
    if asked.boundary().as_trained:
        settings["boundary"] = {subject.config.trainer.boundary: subject.config.trainer.boundary_options}

    def run() -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], str]:
        result = evaluate(name, subject.model, asked)
        return result.metrics, result.curves, result.items, result.corpus_hash

    return _recorded(settings, subject, output, run)


def _harness(manager: Any, name: str, subject: Any, config: EvalConfig, max_slots: int, output: Path) -> dict[str, Any]:
    settings = {"name": name, "harness": True, "limit": config.limit, "max_slots": max_slots, "dtype": config.dtype,
                "include_path": _contents(config.include_path)}  # fmt: skip

    def run() -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], str]:
        import lm_eval

        from packmamba.evaluation.lm_eval_adapter import PackMambaLM

        try:
            found = lm_eval.simple_evaluate(
                PackMambaLM(subject.model, str(subject.folder), max_slots), tasks=[name], limit=config.limit,
                task_manager=manager, log_samples=True,
            )  # fmt: skip
        except (ConnectionError, FileNotFoundError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(f"tasks: the documents of '{name}' cannot be had: {said}") from None
        values = {k.partition(",")[0]: v for k, v in found["results"][name].items() if isinstance(v, (int, float))}
        items = [
            {"doc_id": s["doc_id"], "responses": s["filtered_resps"]} | {m: s[m] for m in s["metrics"]}
            for s in found["samples"][name]
        ]
        return values, {}, items, f"lm-eval {lm_eval.__version__} {name}"

    return _recorded(settings, subject, output, run)


def _contents(folder: str | None) -> str | None:
    """Tells apart what the folder's files say: questions may be written anew."""
    if folder is None:
        return None
    said = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        said.update(path.read_bytes())
    return said.hexdigest()[:16]


def _recorded(settings: dict[str, Any], subject: Any, output: Path, run: Any) -> dict[str, Any]:
    """The record of these settings and weights: the one that is there, or a new one with its items beside it."""
    from packmamba.evaluation.load import weights_id
    from packmamba.report.items import checksum_of

    settings = settings | {"weights": weights_id(subject.model)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:10]
    path = output / "records" / f"{settings['name']}-{digest}.jsonl"
    kept = output / "items" / f"{settings['name']}-{digest}.jsonl"
    if path.is_file() and path.stat().st_size:  # a crash may leave it empty
        return next(r for r in read_records(output) if r["config"].get("id") == digest)
    begun = time.perf_counter()
    metrics, curves, items, corpus_hash = run()
    write_items(kept, items)
    record = make_record(
        kind="evaluation",
        experiment=subject.name,
        arm=subject.name,
        config={"id": digest, "evaluation": settings, "model": subject.model.config, "items": checksum_of(kept)},
        seed=subject.config.seed if subject.trained else 0,
        corpus_hash=corpus_hash,
        metrics=metrics,
        curves=curves,
        wall_seconds=time.perf_counter() - begun,
    )
    append_record(path, record)
    return record


@dataclass
class GenerateConfig:
    """Keys of ``generate``."""

    max_new_tokens: int = key(64, "Most tokens that are added.", at_least(1))
    temperature: float = key(
        0.0, "0: the most likely token; else logits are divided by it and a token is drawn.", at_least(0)
    )
    top_p: float = key(
        1.0,
        "Draw among the most likely tokens whose probabilities reach this sum.",
        Holds("above 0 and at most 1", lambda p: 0 < p <= 1),
    )
    seed: int = key(0, "Seed of the draws.", at_least(0))
    device: str = key("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")
    dtype: Optional[str] = key(None, "dtype of the weights: float64, float32, bfloat16, float16; null: as they are.")

    def problems(self) -> Iterator[str]:
        from packmamba.evaluation.generation import check_sampling

        try:
            check_sampling(self.max_new_tokens, self.temperature, self.top_p)
        except ValueError as error:
            yield str(error)


def continue_text(folder: str, prompt: str, overrides: Sequence[str]) -> str:
    """The prompt's continuation. Raises ConfigError without a tokenizer, or of a prompt without a token."""
    config = load(GenerateConfig, None, overrides)
    from packmamba.evaluation.generation import generate
    from packmamba.evaluation.load import load_model

    subject = load_model(folder, config.device, config.dtype)
    tokenizer = subject.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer: its model speaks no text")
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    ids = [*begin, *tokenizer.encode(prompt).tolist()]
    if not ids:
        raise ConfigError("the prompt is empty, and the model has no begin token")
    try:
        (new,) = generate(
            subject.model, [ids], config.max_new_tokens, config.temperature, config.top_p, tokenizer.end_id, config.seed,
            max_slots=max(2048, len(ids)),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tokenizer.decode(new)


def export_model(folder: str, target: str) -> Path:
    """Writes the model and its tokenizer in Hugging Face's format. Raises ConfigError for what that cannot hold."""
    from packmamba.data.tokenizer import write_tokenizer
    from packmamba.evaluation.load import load_model

    subject = load_model(folder, "cpu")
    path = Path(target)
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise ConfigError(f"{target} is there and not empty; name a new folder")
    check_writable(path, "folder")
    try:
        subject.model.save_pretrained(path, format="huggingface")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if subject.tokenizer is not None:
        data = subject.config.data
        write_tokenizer(path, data.tokenizer, data.begin_token, data.end_token)
        ids = {"bos_token_id": subject.tokenizer.begin_id, "eos_token_id": subject.tokenizer.end_id}
        # Else transformers takes 0 for the end, which may be any token, and generates past ours.
        (path / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return path
