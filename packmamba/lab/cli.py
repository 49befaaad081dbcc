"""Commands of ``packmamba`` and ``python run.py``.

A command is a function of its words, whose first line of documentation is its help. It imports
itself what takes seconds, as Lightning and pandas do: help and errors come at once. An
error is one line on stderr with an exit status: 1 where something was found or failed, 2 for a
wrong request, 3 where the same command goes on, 130 after Ctrl-C.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Optional

from packmamba import __version__
from packmamba.errors import COMMAND, Unfinished, UserError, extra, missing_package, need, refusing, suggest
from packmamba.files import full_disk, space_for, write_whole

try:
    import torch
    from tqdm import tqdm

    from packmamba.config import CONFIGS, CONFIGURATION, Config, DataConfig, import_plugins, key, registry, resolve
    from packmamba.config.load import PACKAGE, keys_of, load, load_config, newest_run, read_layers, shown
    from packmamba.data.sources import read_texts, reads_text
    from packmamba.data.sources.records import find_chat_template, write_tokenizer_of
    from packmamba.data.token_store import load_corpora
    from packmamba.data.tokenizer import TEMPLATE, TOKENIZER, load_tokenizer, train_tokenizer
    from packmamba.evaluation import generate as continue_tokens
    from packmamba.evaluation import language_modeling
    from packmamba.evaluation.load import load_model, read_config, usable_device
    from packmamba.evaluation.registry import EVALUATIONS, EvalContext, check, default_max_slots
    from packmamba.evaluation.registry import evaluate as evaluate_by_name
    from packmamba.isolation import leakcheck as check_isolation
    from packmamba.isolation.adapters import adapt
    from packmamba.lab import records
    from packmamba.lab.run_id import RunLock, find_records, record_path, run_folder
    from packmamba.nn.pretrained import read_json, read_weights
    from packmamba.ops import BACKENDS, build
    from packmamba.ops.backends import backend_name
except ModuleNotFoundError as error:
    sys.exit(f"packmamba: error: {error}")

DEVICE = "cpu, cuda:1, ...; auto: a GPU if there is one."
FIRST = """name data.source data.path data.strategy data.row_length data.tokens_per_step model.d_model
optimizer.lr trainer.boundary trainer.max_steps""".split()
RUN = "the folder of a run or checkpoint"
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclasses.dataclass
class LoadConfig:
    """Declare the keys of commands that load a model."""

    device: str = key("auto", DEVICE)
    dtype: Optional[str] = key(None, "dtype of the weights; null for float32.", choices=DTYPES)


@dataclasses.dataclass
class EvalConfig(LoadConfig):
    """Declare the keys of ``eval``."""

    tasks: list[str] = key(["perplexity"], "Evaluations, or lm-evaluation-harness tasks.")
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    examples: int = key(200, "Examples of each task.", low=1)
    seed: int = key(1_000_000, "Seed of the tasks' examples.", low=0)
    options: dict[str, Any] = key({}, "Such as options.mqar.num_pairs=4.")
    max_slots: Optional[int] = key(None, "Tokens of a forward pass; null: fill the device.", low=1)
    include_path: Optional[str] = key(None, "Folder of harness tasks.")
    limit: Optional[int] = key(None, "Maximum examples of a harness task.", low=1)
    output: Optional[str] = key(None, "Folder of records and items; null: RUN/evaluation.")
    plugins: list[str] = key([], "Modules to import first.")


@dataclasses.dataclass
class GenerateConfig(LoadConfig):
    """Declare the keys of ``generate``."""

    max_new_tokens: int = key(64, "Maximum tokens to generate.", low=1)
    temperature: float = key(0.0, "Sampling temperature; 0: greedy.", low=0)
    top_p: float = key(1.0, "Probability of nucleus sampling.", above=0, high=1)
    seed: int = key(0, "Seed of sampling.", low=0)


@dataclasses.dataclass
class TokenizeConfig:
    """Declare the keys of ``tokenize``."""

    vocab_size: int = key(16_000, "Size of the vocabulary: bytes, merges, special tokens.", high=2**22)
    special_tokens: list[str] = key([], "Besides begin and end token, such as <|im_start|> of a chat template.")
    output: str = key("runs/tokenizer", "A new or empty folder.")
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    plugins: list[str] = key([], "Modules to import first.")


@dataclasses.dataclass
class LeakcheckConfig(LoadConfig):
    """Declare the keys of ``leakcheck``."""

    boundaries: str = key("position_ids", "Boundary arguments (Hugging Face), joined by +, or attention_mask.")
    patch: bool = key(False, "Patch the Hugging Face model first.")
    lengths: Optional[list[int]] = key(None, "Documents' lengths; null: awkward ones.", low=1)
    device: str = key("cpu", DEVICE)
    plugins: list[str] = key([], "Modules to import first.")


@dataclasses.dataclass
class ReportConfig:
    """Declare the keys of ``report``."""

    baseline: Optional[str] = key(None, "Arm to compare with; null: the first of padded, single, packed.")
    output: Optional[str] = key(None, "Folder for several folders' report; null: only print.")


def train(words: list[str]) -> None:
    """Train a model; the same command again resumes it."""
    files, overrides = split(words, "a YAML file", 0, 1)
    config = load_config(files[0] if files else CONFIGS / "train.yaml", overrides)
    from lightning.pytorch.utilities import rank_zero_only

    from packmamba.lab.fit import fit
    from packmamba.lab.report.html import format_table

    record = fit(config)
    places = f"Run: {run_folder(config)}\nRecord: {record_path(config)}"
    rank_zero_only(print)(f"\n{format_table([record])}\n\n{places}\nLeakcheck: {record.get('leakcheck')}")
    if (step := record["metrics"].get("diverged_at_step")) is not None:
        raise Unfinished(f"the loss diverged at step {step}; reduce optimizer.lr")


def tokenize(words: list[str]) -> None:
    """Train a tokenizer (byte-level BPE) on the training documents, for data.tokenizer."""
    _, overrides = split(words, "no file", 0, 0)
    config = load(TokenizeConfig, None, overrides)
    records.check_writable(config.output, "output", new=True)
    data = config.data
    tokens = (data.begin_token, data.end_token, *config.special_tokens)
    need(all(config.special_tokens), "special_tokens", "texts that are not empty", config.special_tokens)
    least = 256 + len({*tokens} - {None})
    need(config.vocab_size >= least, "vocab_size", f"at least {least}: bytes and special tokens", config.vocab_size)
    need(reads_text(data), "data.source", "documents of text", "ids, which need no tokenizer; name another")
    has_both = all(any(read_texts(data, held_out)) for held_out in (False, True))
    need(has_both, "data.path", "documents in training and validation", "none in one of them; add others with text")
    template, _ = find_chat_template("bytes", data.chat_template)
    documents = read_texts(data, held_out=False)
    tokenizer = train_tokenizer(config.output, documents, config.vocab_size, *tokens, template=template)
    texts = tqdm(read_texts(data, held_out=True), "Validation", unit=" documents", disable=None)
    sizes = [(len(text.encode()), len(tokenizer.encode(text))) for text in texts]
    ratio = sum(size for size, _ in sizes) / sum(count for _, count in sizes)
    made = f"{tokenizer.vocab_size:,} tokens, {ratio:.2f} bytes a token in validation"
    print(f"{made}; next, with the same keys of data: {COMMAND} train data.tokenizer={config.output}")


def sweep(words: list[str]) -> None:
    """Train every run of a sweep, and report; the same command again continues."""
    (file,), overrides = split(words, "a YAML file", 1, 1)
    from packmamba.lab.sweep import load_sweep, run_sweep

    config, runs = load_sweep(file, overrides)
    try:
        run_sweep(config, runs)
    finally:  # also of a sweep that stopped: what it has is reported
        if records.has_records(config.output) and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            report([config.output])


def demo(words: list[str]) -> None:
    """Train a small model in seven arms of batching schemes on a CPU, and compare them."""
    sweep([str(CONFIGS / "demo.yaml"), *words])


def evaluate(words: list[str]) -> None:
    """Evaluate a trained model: perplexity, synthetic tasks, lm-evaluation-harness."""
    (folder,), overrides = split(words, RUN, 1, 1)
    run = read_config(folder)
    layers = [({"data": dataclasses.asdict(run.data)}, folder), *read_layers(None, overrides)]
    if run.data.sources and any(word.startswith(("data.source=", "data.path=")) for word in overrides):
        layers[0][0]["data"]["sources"] = []  # other documents than the run's mixture
    config = resolve(EvalConfig, layers)
    is_own = config.data.tokenizer == run.data.tokenizer or not Path(folder, TOKENIZER).is_file()
    need(is_own, "data.tokenizer", f"{folder}'s own; leave it out", config.data.tokenizer)
    need(config.tasks, "tasks", f"one or more of {', '.join(EVALUATIONS)}", "none")
    need({*config.tasks} - {*EVALUATIONS} or not config.limit, "limit", "null without a harness task", config.limit)
    for name, keys in config.options.items():
        mine = name in config.tasks and type(keys) is dict
        need(mine, f"options.{name}", f"keys of one of {', '.join(config.tasks)}", keys)
    output = Path(config.output or Path(folder, "evaluation"))
    records.check_writable(output, "output")
    shared: dict[str, Any] = {"examples": config.examples, "seed": config.seed, "trainer": run.trainer}
    of_harness = {"limit": config.limit, "include_path": config.include_path}
    contexts = {}
    for name in config.tasks:
        options = ({} if name in EVALUATIONS else of_harness) | config.options.get(name, {})
        contexts[name] = EvalContext(config.data, options=options, folder=folder, **shared)
        check(name, contexts[name])
    model = load_model(folder, config.device, config.dtype)
    for name, context in contexts.items():
        # A checkpoint without a tokenizer is read by the one of the documents, if that is known.
        is_known = reads_text(config.data) and config.data.tokenizer != str(Path(folder, TOKENIZER))
        context.tokenizer = model.tokenizer or (load_tokenizer(config.data) if is_known else None)
        context.max_slots = config.max_slots or default_max_slots(model.model)
        check(name, context, len(model.model.lm_head.weight))
    with RunLock(output):
        for number, name in enumerate(config.tasks, start=1):
            print(f"[{number}/{len(config.tasks)}] {name}", file=sys.stderr, flush=True)
            _evaluate(name, model, contexts[name], config, output)
    print(f"\nRecords and items: {output}")


def _evaluate(name: str, model: Any, context: Any, config: EvalConfig, output: Path) -> None:
    """Print an evaluation's record in ``output``; append it first if it is not there."""
    from packmamba.lab.report.html import format_table

    settings: Any = {"name": name, "options": config.options.get(name, {}), "max_slots": context.max_slots}
    settings |= {key: getattr(config, key) for key in ("dtype", "examples", "seed", "limit", "include_path")}
    settings["data"] = {key: value for key, value in vars(config.data).items() if key != "cache_dir"}
    settings["boundary"] = {context.trainer.boundary: context.trainer.boundary_options}
    # A run's folder may get other weights, as one that was trained on.
    settings["weights"] = float(sum(weight.detach().double().sum() for weight in model.model.parameters()))
    # The files of a path may have changed.
    if name in language_modeling.EVALUATIONS or settings["options"].get("documents") == "validation":
        split = context.options.get(language_modeling.SPLIT, "validation")
        settings["documents"] = getattr(load_corpora(config.data), split).corpus_hash
    # The same weights may be another model, as of Mamba-3 by ``decay``, or one of another name.
    decisive = json.dumps([settings, model.model.config, model.name], sort_keys=True, default=str)
    digest = hashlib.sha256(decisive.encode()).hexdigest()[:10]
    done = [each for each in records.records_of(output, "evaluation") if each["config"].get("id") == digest]
    # A user's own task may have changed.
    if not done or (config.include_path and name not in EVALUATIONS):
        begun = time.perf_counter()
        result = evaluate_by_name(name, model.model, context)
        seconds = time.perf_counter() - begun
        records.write_items(output / "items" / f"{name}-{digest}.jsonl", result.items)
        keys = {"id": digest, "evaluation": settings, "model": model.model.config}
        identity = ("evaluation", model.name, model.name, keys, model.config.seed, result.corpus_hash)
        done = [records.make_record(*identity, result.metrics, seconds, result.curves)]
        records.append_record(output / "records.jsonl", done[0])
    print(f"\n{format_table(done)}")


def generate(words: list[str]) -> None:
    """Continue a text with a trained model."""
    need(len(words) >= 2, "generate", f"{RUN}, and a text", " ".join(words) or "none")
    folder = newest_run(words[0])
    prompt = words[1]
    config = load(GenerateConfig, None, words[2:])
    read_config(folder)
    need(Path(folder, TOKENIZER).is_file(), folder, "a model of text", f"one without {TOKENIZER}")
    model = load_model(folder, config.device, config.dtype)
    tokenizer: Any = model.tokenizer
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    ids = begin + tokenizer.encode(prompt).tolist()
    sampling = {name: value for name, value in vars(config).items() if name not in ("device", "dtype")}
    limits: Any = {"stop_token": tokenizer.end_id, "max_slots": max(2048, len(ids))}
    with refusing(ValueError):
        (new,) = continue_tokens(model.model, [ids], **sampling, **limits)
    print(prompt + tokenizer.decode(new))


def export(words: list[str]) -> None:
    """Write a trained model and tokenizer in Hugging Face's format: RUN/huggingface or FOLDER."""
    (folder, *target), keys = split(words, f"{RUN}, and a new folder", 1, 2)
    need(not keys, "export", "no keys", " ".join(keys))
    path = Path(target[0]) if target else Path(folder, "huggingface")
    records.check_writable(path, str(path), new=True)
    model = load_model(folder, "cpu")
    try:
        with space_for(path):
            _export(model, path)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    print(f"Written, for transformers: {path}")


def _export(model: Any, path: Path) -> None:
    """Write weights, tokenizer and chat template."""
    with refusing(ValueError):
        model.model.save_pretrained(path, format="huggingface")
    if model.tokenizer is not None:
        if model.trained:
            write_tokenizer_of(model.config.data, path)
        else:
            # The checkpoint's own, which say what begins and ends texts.
            for file in [*model.folder.glob("*token*"), *model.folder.glob(TEMPLATE)]:
                shutil.copy(file, path)
        # Without eos_token_id, transformers takes 0.
        ids = {"bos_token_id": model.tokenizer.begin_id, "eos_token_id": model.tokenizer.end_id}
        published = json.loads((path / "config.json").read_text())
        for name, content in (("config.json", published | ids), ("generation_config.json", ids)):
            write_whole(path / name, (json.dumps(content, indent=2) + "\n").encode())


def leakcheck(words: list[str]) -> int:
    """Check if anything crosses document boundaries, in any model; exit status 1 if so."""
    (folder,), overrides = split(words, RUN, 1, 1)
    config = load(LeakcheckConfig, None, overrides)
    published = Path(folder, "config.json")
    with refusing(ValueError, TypeError, OSError):
        if published.is_file() and "model_type" in read_json(published):
            transformers: Any = extra("transformers", folder)
            from packmamba.integrations.transformers import patch

            device = usable_device(config.device)
            prepare: Callable = patch if config.patch else lambda model: model
            models = transformers.AutoModelForCausalLM
            described = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            # A model without weights refuses what the loaded one would.
            with torch.device("meta"):
                adapt(prepare(models.from_config(described)), config.boundaries, None)
            try:
                model = models.from_pretrained(folder, local_files_only=True, dtype=config.dtype)
            except Exception:
                read_weights(Path(folder))  # names a file that is broken
                raise
            result = check_isolation(prepare(model).to(device).eval(), config.boundaries, lengths=config.lengths)
        else:
            # Layouts mark the documents of all other models.
            unread = " ".join(word for word in overrides if word.startswith(("boundaries=", "patch=")))
            need(not (unread and published.is_file()), unread, "a Hugging Face checkpoint", f"{folder}; leave it out")
            loaded = load_model(folder, config.device, config.dtype)
            trainer = loaded.config.trainer
            as_trained = loaded.trained and trainer.boundary != "reset"
            call: Any = partial(trainer.scheme().logits, loaded.model) if as_trained else loaded.model
            result = check_isolation(call, vocab_size=len(loaded.model.lm_head.weight), lengths=config.lengths)
            if as_trained:
                result.boundaries = f"trainer.boundary={trainer.boundary}, as in training"
    print(result)
    return 0 if result.ok else 1 if result.raises is None else 2


def report(words: list[str]) -> None:
    """Make tables, figures and report.html of records or experiments, of all folders in one."""
    folders, overrides = split(words, "folders of records or runs, or an experiment", 1, len(words))
    config = load(ReportConfig, None, overrides)
    from packmamba.lab.report.aggregate import with_items
    from packmamba.lab.report.html import build_sections, format_sections, write_sections

    clone = import_experiments("by_name") if find_clone() else None
    experiments: dict[str, Path] = clone.experiments() if clone else {}
    found: list[Any] = []
    for name in folders:
        folder: Any = Path(name) if Path(name).is_dir() else experiments.get(name)
        need(folder, "report", "a folder or an experiment", f"'{name}'{suggest(name, experiments)}")
        run = folder / CONFIGURATION
        loaded: Any = find_records([load_config(run)]) if run.is_file() else records.read_records(folder)
        need(None not in loaded, folder, "a finished run", "one without a record")
        found += with_items(folder, loaded)
    import_plugins(plugin for record in found for plugin in record["config"].get("plugins") or ())
    kinds = clone.kinds_of(folder, found) if clone else {}
    if len(folders) > 1 or config.baseline not in (None, found[0].get("sweep", {}).get("baseline")):
        arms = dict.fromkeys(record["arm"] for record in found)
        need(config.baseline in (None, *arms), "baseline", f"one of {', '.join(arms)}", f"'{config.baseline}'")
        for record in found:  # of several folders each arm has the seeds of its runs
            planned = (len(folders) == 1 and record.get("sweep")) or {"seeds": [], "apart": True}
            # No contrast was registered with this baseline.
            record["sweep"] = planned | {"baseline": config.baseline, "late": False, "margin": None, "primary": []}
    is_written = len(folders) == 1 or config.output is not None
    sections = build_sections(found, figures=is_written, kinds=kinds)
    print(f"\n{format_sections(sections)}")
    if is_written:
        print(f"\nReport, with figures: {write_sections(config.output or folder, sections)}")


def bench(words: list[str]) -> None:
    """Measure time or memory, and report."""
    names, overrides = split(words, "an experiment, <experiment>/<bench>, or a YAML file", 0, 1)
    report([str(import_experiments("by_name").run_bench("".join(names), overrides))])


def reproduce(words: list[str]) -> None:
    """Run an experiment, compare with its committed numbers; scale=small: in a minute."""
    names, overrides = split(words, "an experiment, or <experiment>/<step>", 0, 1)
    import_experiments("reproduce").reproduce("".join(names), overrides)


def find_clone() -> Path | None:
    """Return the folder of a clone, whose experiments can be run, if there is one.

    It is the checkout, or the current folder.
    """
    roots = (PACKAGE.parent, Path.cwd())
    return next((root for root in roots if (root / "experiments" / "by_name.py").is_file()), None)


def import_experiments(name: str) -> Any:
    """Import ``experiments.<name>`` of a clone. Raises ConfigError without one."""
    clone = find_clone()
    need(clone, "experiments", "a clone as the current folder", f"{Path.cwd()}; clone PackMamba")
    sys.path += {str(clone)}.difference(sys.path)
    return importlib.import_module(f"experiments.{name}")


def kernels(words: list[str]) -> None:
    """Show kernels, versions, GPUs, compilers and the backend that runs; build: compile kernels."""
    need(words in ([], ["build"]), "kernels", "nothing, or build", " ".join(words))
    for row in build.info() if words else ():
        if row["problem"] is None:
            print(f"Building {row['kind']} kernels for {row['target']} ...", flush=True)
            build.build(row["kind"])
    python = sys.version.split()[0]
    print(f"packmamba {__version__}, Python {python}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        print(f"GPU {i}: {card.name}, {card.total_memory >> 30} GiB, compute capability {card.major}.{card.minor}")
    for row in build.info():
        kind = row["kind"]
        state = f"{'built' if row['built'] else 'built on first use'} for {row['target']} by {row['compiler']}"
        print(f"{kind} kernels: {row['problem'] or state}")
        if kind == "cpu" or torch.cuda.is_available():
            print(f"On {kind}, ops.backend=auto runs {backend_name('auto', torch.device(kind))}")
    for name, backend in BACKENDS.items():
        if backend.missing:
            print(f"Backend {name} needs {' and '.join(backend.missing)}")


COMMANDS: dict[str, tuple[Callable, str, type | str | None]] = {
    "demo": (demo, "[key=value ...]", "packmamba.lab.sweep:SweepConfig"),
    "train": (train, "[FILE.yaml] [key=value ...]", Config),
    "tokenize": (tokenize, "[key=value ...]", TokenizeConfig),
    "sweep": (sweep, "FILE.yaml [key=value ...]", "packmamba.lab.sweep:SweepConfig"),
    "eval": (evaluate, "RUN [tasks=[...]] [key=value ...]", EvalConfig),
    "generate": (generate, "RUN TEXT [key=value ...]", GenerateConfig),
    "export": (export, "RUN [FOLDER]", None),
    "leakcheck": (leakcheck, "FOLDER [key=value ...]", LeakcheckConfig),
    "report": (report, "FOLDER ... [baseline=ARM]", ReportConfig),
    "bench": (bench, "EXPERIMENT [key=value ...]", None),
    "reproduce": (reproduce, "EXPERIMENT [scale=small] [key=value ...]", None),
    "kernels": (kernels, "[build]", None),
}


def split(words: list[str], expected: str, least: int, most: int) -> tuple[list[str], list[str]]:
    """Split words into arguments, runs' names completed, and overrides."""
    arguments = [newest_run(word) for word in words if "=" not in word]
    for word in words:
        if word.startswith("--"):
            raise UserError(f"expected key=value, got {word}; keys have no dashes")
    if not least <= len(arguments) <= most:
        raise UserError(f"expected {expected}, and key=value, got {' '.join(arguments) or 'none'}")
    return arguments, [word for word in words if "=" in word]


def print_help(command: str, prog: str) -> None:
    """Print a command's usage, and its keys by section with default and help."""
    function, usage, schema = COMMANDS[command]
    print(f"usage: {prog} {command} {usage}\n\n{function.__doc__}")
    if schema is None:
        return
    keys = registry(schema)
    config: Any = load(keys, CONFIGS / "demo.yaml") if command == "demo" else keys()
    groups: dict[str, list[str]] = {"the first keys to set": [], "general": []}
    for name, field, value in keys_of(config):
        if "help" in field.metadata:
            choices = registry(field.metadata["limits"].get("choices"))
            values = f" One of {', '.join(map(str, choices))}." if choices else ""
            line = f"{name}={shown(value)}  {field.metadata['help']}{values}"
            is_first = schema is Config and name in FIRST
            heading = "the first keys to set" if is_first else name.rpartition(".")[0] or "general"
            wrapped = textwrap.fill(line, 112, initial_indent="  ", subsequent_indent="      ")
            groups.setdefault(heading, []).append(wrapped)
    for heading, lines in groups.items():
        if lines:
            print(f"\n{heading}:", *lines, sep="\n")


def main(argv: list[str] | None = None, prog: str = "packmamba") -> int:
    """Run a command; return its exit status."""
    words = sys.argv[1:] if argv is None else [*argv]
    try:
        if words[:1] == ["--version"]:
            print(f"packmamba {__version__}")
            return 0
        if not words or words[0] in ("-h", "--help"):
            print(f"usage: {prog} COMMAND ...    ({prog} COMMAND --help: its keys)\n")
            for name, (function, usage, _) in COMMANDS.items():
                print(f"  {name} {usage}\n      {function.__doc__}")
            return 0 if words else 2
        command, *words = words
        if command not in COMMANDS:
            raise UserError(f"expected a command, got '{command}'{suggest(command, COMMANDS)}")
        if {"-h", "--help"}.intersection(words):
            print_help(command, prog)
            return 0
        if command in ("train", "sweep"):
            print("Loading PyTorch and Lightning ...", flush=True)
        status = COMMANDS[command][0](words) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a reader such as head has ended: no error, and nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        failure: Exception = missing_package(error.name)
    except KeyboardInterrupt:
        failure = Unfinished("stopped; the same command resumes", status=130)
    except (UserError, OSError) as error:
        failure = full_disk(error, "output") or error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "out of memory" not in str(error):
            raise  # a fault of the program, whose traceback is wanted
        failure = UserError(f"out of memory ({error}); reduce data.max_tokens_per_batch or the model")
    for bar in [*getattr(tqdm, "_instances", ())]:  # drawn still: the error would stand on its line
        bar.close()
    print(f"{prog}: error: {' '.join(str(failure).split())}", file=sys.stderr)
    return getattr(failure, "status", 2)
