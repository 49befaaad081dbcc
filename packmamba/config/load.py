"""Read configurations from YAML files and ``key=value``, and validate them once.

A configuration is layers over the defaults of a dataclass: a file, then one layer for each
override. OmegaConf merges them and checks types; ``validate`` checks what types cannot say: each
key's limits (``schema.key``), then the rules between keys. Everything is checked here, before a
document is read, so that a typo costs no time; every error is one line that names the key, what was
expected, what came and what to do.
"""

import copy
import dataclasses
import functools
import glob
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter, ge, gt, le
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from torch.utils._pytree import tree_map

from packmamba.config import schema
from packmamba.config.schema import Config, options, registry
from packmamba.errors import COMMAND, ConfigError, need, refusing, suggest

PACKAGE = Path(__file__).resolve().parents[1]
# Of a wheel, or of a checkout.
CONFIGS = next(filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs")))
# A run's whole configuration, in its folder.
CONFIGURATION = "configuration.yaml"

# Words of OmegaConf's error messages, and what was expected where they occur.
EXPECTED_BY_WORD = {
    "Integer": "an integer",
    "Float": "a number",
    "bool": "true or false",
    "to string": "text",
    "None": "a value",
    "List": "a list such as [a,b]",
    "": "keys and values, as in the defaults",
}
BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", ge),
    "above": ("above", gt),
    "high": ("at most", le),
}
# The commands that a file with a key is for; other files are for train.
KINDS = {"bench": "bench", "arms": "sweep"}
RECORDS = ("jsonl", "splits", "parquet", "huggingface")
# Keys of data that say what the documents are, and that few of our sources read; a plugin's may
# read any. Sizes of synthetic documents may stand beside another source, which an arm may name.
KEYS_OF_SOURCES = {
    "unit": ("packages",),
    **dict.fromkeys(("text_key", "loss_on"), RECORDS),
    **dict.fromkeys(("subset", "split"), ("huggingface",)),
    **dict.fromkeys(("task", "task_options"), ("task",)),
}
SOURCES = {"stdlib", "text", "megatron", "synthetic"}.union(*KEYS_OF_SOURCES.values())


def reads(source: str, key: str) -> bool:
    """Return whether a source reads a key of data, without its section."""
    return source in KEYS_OF_SOURCES.get(key, SOURCES) or source not in SOURCES


# Values of ``trainer.accelerator`` that may take a GPU.
ON_GPU = ("auto", "gpu", "cuda")
# Modules that ``import_plugins`` has imported, for processes that are started.
IMPORTED_PLUGINS: list[str] = []

Keys = TypeVar("Keys")
to_dict = dataclasses.asdict
structured: Any = functools.cache(OmegaConf.structured)


def load(declared: type[Keys], path: Any = None, overrides: Iterable[str] = (), command: str | None = None) -> Keys:
    """Build a dataclass from its defaults, a YAML file for ``command`` and ``key=value`` overrides.

    Raises ConfigError.
    """
    return resolve(declared, read_layers(path, overrides, command))


load_config = functools.partial(load, Config, command="train")


def read_layers(path: Any, overrides: Iterable[str], command: str | None = None) -> list[tuple[DictConfig, str]]:
    """Read a file and overrides, each with its name in errors.

    An override that lists names of a mapping's entries selects them: ``arms=[single,padded]``.
    """
    file = OmegaConf.create() if path is None else read_yaml(path, command)
    layers = [(parse_override(override), f"'{override}'") for override in overrides]
    for layer, origin in layers:
        for key in map(str, list(layer)):
            entries = file.get(key)
            names = layer.get(key)
            if isinstance(entries, DictConfig) and isinstance(names, ListConfig):
                for name in names:
                    choices = f"some of {', '.join(map(str, entries))}"
                    need(name in entries, key, choices, f"'{name}' in {origin}")
                layer[key] = {name: entries[name] for name in names}
                file.pop(key)
    return [(file, str(path)), *layers]


def resolve(declared: type[Keys], layers: Iterable[tuple[Any, str]]) -> Keys:
    """Merge layers, each with its name in errors, over the defaults of a dataclass; validate.

    Layers are mappings or dataclasses; NumPy's scalars count as Python's. Raises ConfigError.
    """
    config = copy.deepcopy(structured(declared))
    required: set[str] = set()  # ??? in a file: another layer must have it
    for layer, origin in layers:
        plain = tree_map(lambda value: value.tolist() if hasattr(value, "tolist") else value, layer)
        update: Any = OmegaConf.create(plain, flags={"allow_objects": True})
        values = flatten(OmegaConf.to_container(update, resolve=False))
        required |= {name for name, value in values.items() if value == "???"}
        if isinstance(update.get("model"), str) and isinstance(config.get("model"), DictConfig):
            update = OmegaConf.merge(update, {"model": _model_size(update.model, origin)})
        try:
            config = OmegaConf.unsafe_merge(config, update)
        except ConfigKeyError as error:
            raise _unknown_key(str(error.full_key), origin, declared) from None
        except (OmegaConfBaseException, TypeError) as error:
            raise _wrong_type(error, update, origin) from None
    for name in sorted(required):
        need(OmegaConf.select(config, name) is not None, name, "a value", f"??? in a file; set {name}=...")
    if declared is Config:
        # Before interpolations, such as a tokenizer of the same folder.
        for name in ("model.pretrained", "trainer.init_from"):
            OmegaConf.update(config, name, newest_run(OmegaConf.select(config, name)))
    try:
        return validate(OmegaConf.to_object(config))  # type: ignore[return-value]
    except OmegaConfBaseException as error:  # an interpolation ${...}
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _model_size(name: str, origin: str) -> DictConfig:
    """Read the keys of a named size, as in ``model=130m``."""
    sizes = {path.stem: path for path in sorted((CONFIGS / "model").glob("*.yaml"))}
    need(name in sizes, "model", "a size", f"'{name}' in {origin}{suggest(name, sizes)}")
    return read_yaml(sizes[name])


def _unknown_key(key: str, origin: str, declared: type) -> ConfigError:
    """Explain an unknown key.

    By what replaces it, its other section or the nearest name.
    """
    section, _, name = key.rpartition(".")
    keys = [other.rpartition(".") for other, *_ in keys_of(declared())]
    same_name = ["".join(other) for other in keys if other[2] == name]
    same_section = ["".join(other) for other in keys if other[0] == section]
    hint = suggest(key, same_name, cutoff=0) if same_name else suggest(key, same_section)
    return ConfigError(f"unknown key '{key}' in {origin}{hint}")


def _wrong_type(error: Exception, update: DictConfig, origin: str) -> ConfigError:
    """Explain a value of a wrong type, in words of ours."""
    key = getattr(error, "full_key", None)
    if not key:  # OmegaConf does not say which: a list where keys belong, most often
        lists = [name for name in update if isinstance(update._get_node(name), ListConfig)]
        key = [*lists, *update][0]
    message = str(error).splitlines()[0]
    expected = next(kind for word, kind in EXPECTED_BY_WORD.items() if word in message)
    value = OmegaConf.select(update, key)
    is_whole = isinstance(value, float) and value.is_integer()
    hint = f"; write {int(value)}" if expected == "an integer" and is_whole else ""
    return ConfigError(f"{key}: expected {expected}, got {shown(value)} in {origin}{hint}")


def validate(config: Keys) -> Keys:
    """Import plugins, check each key's limits, then rules between keys; return the configuration.

    Raises ConfigError.
    """
    import_plugins(getattr(config, "plugins", ()))
    for name, field, value in keys_of(config):
        _check(name, value, **field.metadata.get("limits", {}))
    if isinstance(config, Config):
        _check_rules(config)
    return config


def newest_run(name: Any) -> Any:
    """Return the newest run of a name, or the name if there is none.

    Of runs/mine it is one such as runs/mine-seed0-1f2e3d4c5b.
    """
    if name is None or os.path.exists(name):
        return name
    runs = glob.glob(f"{glob.escape(name)}-seed*-*/{CONFIGURATION}")
    return os.path.dirname(max(runs, key=os.path.getmtime)) if runs else name


def keys_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key's whole name, its field and its value; inner dataclasses come first."""
    keys = [(prefix + field.name, field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    for name, _, value in keys:
        entries = value.items() if isinstance(value, dict) else ()
        # Where a section may be: the value itself, or an entry of a mapping.
        places = [(name, value)] + [(f"{name}.{entry}", part) for entry, part in entries]
        for place, section in places:
            if dataclasses.is_dataclass(section):
                yield from keys_of(section, f"{place}.")
    yield from keys


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Map ``{"a": {"b": 1}}`` to ``{"a.b": 1}``, however deep."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _check(name: str, value: Any, choices: Any = (), check: Any = None, null: str = "", **bounds: Any) -> None:
    """Check a key's value against its limits; ``schema.key`` explains them."""
    if value is None:
        return
    known = registry(choices)
    for element in value if isinstance(value, list) else [value]:
        if choices and element not in known:
            hint = suggest(element, known).partition("; known")[0]
            names = ", ".join(map(str, known))
            raise ConfigError(f"{name}: expected one of {names}, got {shown(element)}{hint}")
        if bounds:
            within = all(BOUNDS[bound][1](element, limit) for bound, limit in bounds.items())
            expected = " and ".join(f"{BOUNDS[bound][0]} {bounds[bound]}" for bound in bounds)
            remedy = f"; set null: {null}" if null else ""
            need(within and element < float("inf"), name, expected, shown(element) + remedy)
    if check is not None:
        description, holds = check
        need(holds(value), name, description, shown(value))


def _check_rules(config: Config) -> None:
    """Check rules between keys, of a configuration whose single keys are right."""
    data = config.data
    strategy = registry(schema.STRATEGIES)[data.strategy]
    need(hasattr(strategy, "splits_documents"), "data.strategy", "a packing.Strategy(function)", repr(strategy))
    boundary = registry(schema.BOUNDARIES)[config.trainer.boundary]
    registry("packmamba.data.sources:parts_of")(data)  # checks data.sources
    rule = functools.partial(_rule, config)
    _check_option_names(config, boundary)
    _check_keys_in_use(config, strategy, boundary)
    rule(data.row_length or not strategy.needs_row_length, "data.row_length", f"an integer with {data.strategy}")
    longest = data.cut_documents or float("inf")
    fits = strategy.splits_documents or longest <= (data.row_length or longest)
    unknown = "truncate or split with data.streaming, in which the longest document is not known"
    rule(fits or data.overlong != "error" or not data.streaming, "data.overlong", unknown)
    # Pieces longer than a row would lose their ends, which follow in no row.
    at_most = "at most data.row_length with data.overlong=truncate"
    rule(fits or data.overlong != "truncate" or not data.cut_documents, "data.cut_documents", at_most)
    has_kernels = config.ops.backend != "mamba_ssm" or config.model.mixer not in ("mamba2", "mamba3")
    rule(has_kernels, "ops.backend", f"auto, reference, cpu or cuda with model.mixer={config.model.mixer}")
    if boundary.continues:
        _check_carry(config, strategy, boundary)
    if config.trainer.strategy == "fsdp2":
        rule(boundary.sharded, "trainer.strategy", f"ddp with trainer.boundary={config.trainer.boundary}")
        is_float32 = config.trainer.precision in ("32-true", "bf16-mixed")
        rule(is_float32, "trainer.precision", "32-true or bf16-mixed with fsdp2")
        rule(config.optimizer.name != "muon", "optimizer.name", "adamw with fsdp2, since Muon needs whole matrices")


def _rule(config: Config, holds: object, name: str, expected: str) -> None:
    """Raise ConfigError with the key's value unless it holds."""
    need(holds, name, expected, shown(attrgetter(name)(config)))


def _check_option_names(config: Config, boundary: Any) -> None:
    """Check names in keys that hold arguments of a function or class."""
    mixer = options(registry(schema.MIXERS)[config.model.mixer])
    own_keys = {*schema.MIXER_KEYS, "recompute", "backend"}  # of the sections model and ops
    allowed_names: dict[str, Iterable[str]] = {
        "model.mixer_options": {*mixer} - own_keys,
        "optimizer.options": options(registry(schema.OPTIMIZERS)[config.optimizer.name]),
        "trainer.boundary_options": options(boundary),
        "evaluation_options": config.evaluations,
    }
    for key, allowed in allowed_names.items():
        for name in attrgetter(key)(config):
            if name not in allowed:
                raise ConfigError(f"unknown key '{key}.{name}'{suggest(name, sorted(allowed))}")
    are_mappings = all(isinstance(value, dict) for value in config.evaluation_options.values())
    _rule(config, are_mappings, "evaluation_options", "keys and values of each evaluation")


def _check_keys_in_use(config: Config, strategy: Any, boundary: Any) -> None:
    """Refuse keys that are not at their default where they have no effect."""
    data = config.data
    trainer = config.trainer
    is_stream = data.batching == "stream"
    sharded = trainer.strategy == "fsdp2"
    shuffles = is_stream and strategy.pads and data.row_length and not boundary.continues
    mixer_class = registry(schema.MIXERS)[config.model.mixer]
    mixer = options(mixer_class)
    shares_rows = trainer.devices * trainer.num_nodes % trainer.context_parallel == 0 and trainer.boundary == "reset"
    shares_rows &= getattr(mixer_class, "SHARES_ROWS", False) and trainer.mean_over == "targets"
    one_device = trainer.devices * trainer.num_nodes == 1 and trainer.strategy == "auto"
    without_loss_scale = trainer.precision in ("32-true", "bf16-mixed", "bf16-true")
    kernels = config.ops.backend in ("auto", "cuda")
    graphs_work = one_device and trainer.accelerator in ON_GPU and without_loss_scale and kernels
    graphs = "on one GPU, in 32-true or bfloat16, with ops.backend auto or cuda"
    shared = "on multiples of as many devices, with reset and a mixer that shares rows"
    used: dict[str, tuple[Any, str]] = {
        "data.path": (not data.sources, "data.sources is empty"),
        "data.streaming": (not data.sources, "data.sources is empty"),
        "data.streams": (strategy.splits_documents, "data.strategy=concat_split"),
        "data.stagger": (is_stream and strategy.splits_documents, "in streams of concat_split"),
        "data.shuffle_steps": (shuffles, "batching=stream without carry"),
        "optimizer.decay_fraction": (config.optimizer.schedule == "wsd", "optimizer.schedule=wsd"),
        "trainer.evaluate_every": (config.evaluations and not sharded, "with evaluations, without fsdp2"),
        "trainer.samples": (not sharded, "without fsdp2"),
        "trainer.cuda_graphs": (graphs_work, graphs),
        "trainer.context_parallel": (shares_rows, shared),
        **{f"model.{name}": (name in mixer, "with another mixer") for name in schema.MIXER_KEYS},
    }
    for name, sources in KEYS_OF_SOURCES.items():
        used[f"data.{name}"] = (data.sources or reads(data.source, name), f"data.source={' or '.join(sources)}")
    if config.model.pretrained is not None:
        decided = vars(config.model).keys() - {"pretrained", "compile", "recompute"}
        used |= {f"model.{name}": (False, "model.pretrained is null") for name in sorted(decided)}
    defaults = Config()
    for name, (is_used, where) in used.items():
        default = attrgetter(name)(defaults)
        _rule(config, is_used or attrgetter(name)(config) == default, name, f"{shown(default)}, unless {where}")


def _check_carry(config: Config, strategy: Any, boundary: Any) -> None:
    """Check that every row of a batch can continue the row of the batch before it."""
    data = config.data
    devices = config.trainer.devices * config.trainer.num_nodes
    rule = functools.partial(_rule, config)
    scheme = f"with {config.trainer.boundary}"
    rule(strategy.splits_documents, "data.strategy", f"concat_split {scheme}")
    rule(data.streams % devices == 0, "data.streams", f"a multiple of the {devices} devices {scheme}")
    rows = data.batch_rows if data.takes_turns else data.streams // devices
    rule(rows >= boundary.least_rows, "data.streams", f"at least {boundary.least_rows} rows a batch {scheme}")
    if data.batching == "stream":
        tokens = (data.row_length or 1) * (1 if data.takes_turns else data.streams)
        rule(data.tokens_per_step % tokens == 0, "data.tokens_per_step", f"a multiple of {tokens}")
    if data.takes_turns:
        rule(data.streams % data.step_rows == 0, "data.streams", f"a multiple of a step's {data.step_rows} rows")
        equal_batches = data.step_rows % (data.batch_rows * devices) == 0
        rule(equal_batches, "data.max_tokens_per_batch", f"equal batches of a step's {data.step_rows} rows")


def shown(value: Any) -> str:
    """Write a value as YAML and JSON do: null, true, quoted text."""
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return json.dumps(plain, default=str)


def import_plugins(plugins: Iterable[str]) -> None:
    """Import modules, found in the current folder too. Raises ConfigError."""
    for plugin in plugins:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        with refusing(ImportError, SyntaxError, prefix=f"plugins: cannot import '{plugin}' (", suffix=")"):
            importlib.import_module(plugin)
            IMPORTED_PLUGINS.append(plugin)


def read_yaml(path: str | Path, command: str | None = None) -> DictConfig:
    """Read a YAML file for a command; a shipped one (``configs/...``) from any folder.

    Raises ConfigError that names the file.
    """
    file = Path(path) if Path(path).exists() else CONFIGS.parent / path
    need(file.is_file(), str(path), "a YAML file", "a folder" if file.is_dir() else "none; see configs/")
    try:
        loaded: Any = OmegaConf.load(file)
    except Exception as error:
        begins_with_tab = "\n\t" in "\n" + file.read_text(errors="replace")
        hint = "; indent by spaces, not tabs" if begins_with_tab else ""
        raise ConfigError(f"{path}: expected a YAML file, got {error}{hint}") from None
    got = "a list" if loaded else "an empty file"
    need(loaded and isinstance(loaded, DictConfig), str(path), "keys and values", got)
    kind = next((kind for key, kind in KINDS.items() if key in loaded), "train")
    got = f"one for {kind}; run {COMMAND} {kind} {path}"
    need(command in (None, kind), str(path), f"a file for {command}", got)
    return loaded


def parse_override(override: str) -> DictConfig:
    """Parse ``key=value``, with a YAML value. Raises ConfigError."""
    key = override.partition("=")[0].strip(" .")
    if key and "=" in override:
        with suppress(Exception):
            return OmegaConf.from_dotlist([override])
    raise ConfigError(f"expected key=value with a YAML value, got '{override}'")
