"""Keys: a sentence and rules beside each; rules between them; what is refused, in which words, and before which imports."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Optional

import pytest

from packmamba.config import (
    Config,
    ConfigError,
    DataConfig,
    above,
    at_least,
    between,
    check,
    chosen,
    each,
    key,
    load,
    load_config,
    named,
    one_of,
    some,
    unique,
)
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS
from packmamba.training.sweep import SweepConfig


@dataclass
class Toy:
    rounds: int = key(3, "How often.", at_least(1))
    most: Optional[float] = key(None, "At most; null for no limit.", above(0))
    share: float = key(0.5, "A share.", between(0, 1))
    kind: str = key("plain", "Which.", one_of("plain", "bold"), old_name="type")
    names: list[str] = key(["a"], "Each once.", some("name"), unique)
    sizes: list[int] = key([1], "Rows.", each(at_least(1)))
    options: dict[str, Any] = key({}, "Further ones.")
    grid: dict[str, list[Any]] = key({}, "For each its values.")
    lengths: str = key("short", "A distribution.", named("packmamba.data.lengths:LENGTH_DISTRIBUTIONS"))

    def problems(self) -> Iterator[str]:
        if self.kind == "bold" and self.rounds < 2:
            yield f"rounds: expected at least 2 with kind=bold, got {self.rounds}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds=0", "rounds: expected at least 1, got 0"),
        ("most=.inf", "most: expected above 0 and finite or null, got inf"),
        ("share=.nan", "share: expected 0 to 1, got nan"),
        ("kind=bald", "kind: expected one of plain, bold, got 'bald'; did you mean 'bold'?"),
        ("names=[]", "names: expected at least one name, got none"),
        ("names=[a,b,a]", "names: duplicate 'a'"),
        ("sizes=[3,0]", "sizes: expected at least 1, got 0"),
        ("lengths=shirt", "lengths: expected one of documents-2k, short, heavy, got 'shirt'; did you mean 'short'?"),
        ("rounds=many", "rounds in 'rounds=many': Value 'many' of type 'str' could not be converted to Integer"),
        ("sizes=3", "sizes in 'sizes=3': expected a list, such as [a,b]"),
        ("sizes={a: 3}", "sizes in 'sizes={a: 3}': expected a list, such as [a,b]"),
        ("kind=[bold]", "kind in 'kind=[bold]': expected one value, got a list"),
        ("kind={a: b}", "kind in 'kind={a: b}': expected one value, got keys and values"),
        ("options=3", "options in 'options=3': expected keys and their values"),
        ("options=[3]", "options in 'options=[3]': expected keys and their values"),
        ("names=null", "names in 'names=null': expected a value, got null"),
        ("share=null", "share in 'share=null': expected a value, got null"),
        ("grid={a: 3}", "grid.a in 'grid={a: 3}': expected a list, such as [a,b]"),
        ("grid=[a]", "grid in 'grid=[a]': expected keys and their values"),
        ("round=3", "unknown key 'round' in 'round=3'; did you mean 'rounds'?"),
        ("rounds", "expected key=value, got 'rounds'"),
    ],
)
def test_a_wrong_value_is_one_sentence(override, message):
    with pytest.raises(ConfigError) as caught:
        load(Toy, overrides=[override])
    assert str(caught.value) == message


def test_rules_between_keys_come_after_those_of_keys():
    with pytest.raises(ConfigError, match="^rounds: expected at least 2 with kind=bold, got 1$"):
        load(Toy, overrides=["kind=bold", "rounds=1"])
    with pytest.raises(ConfigError, match="^rounds: expected at least 1, got 0$"):
        load(Toy, overrides=["kind=bold", "rounds=0"])


def test_null_is_right_where_the_type_says_so():
    assert load(Toy, overrides=["most=null"]).most is None
    with pytest.raises(ConfigError, match="^rounds in 'rounds=null'"):
        load(Toy, overrides=["rounds=null"])
    with pytest.raises(ConfigError, match="^rounds: expected at least 1, got None$"):
        check(Toy(rounds=None))


def test_a_key_s_old_name_is_read(tmp_path):
    (tmp_path / "toy.yaml").write_text("type: bold\n")
    assert load(Toy, tmp_path / "toy.yaml").kind == "bold"
    assert load(Toy, tmp_path / "toy.yaml", ["type=plain"]).kind == "plain"


def test_defaults_are_not_shared():
    Toy().names.append("b")
    assert Toy().names == ["a"]


def test_a_name_registered_later_is_known(monkeypatch):
    monkeypatch.setitem(LENGTH_DISTRIBUTIONS, "mine", "anything")
    assert chosen(load(Toy, overrides=["lengths=mine"]), "lengths") == "anything"
    with pytest.raises(ConfigError, match="^lengths: expected one of .*, mine, got 'yours'"):
        chosen(Toy(lengths="yours"), "lengths")


def schemas(schema):
    yield schema
    for field in fields(schema):
        if is_dataclass(value := getattr(schema(), field.name)):
            yield from schemas(type(value))


@pytest.mark.parametrize("schema", [*schemas(Config), SweepConfig], ids=lambda s: s.__name__)
def test_every_key_has_a_sentence(schema):
    for field in fields(schema):
        if not is_dataclass(getattr(schema(), field.name)):
            assert field.metadata["sentence"].endswith("."), field.name


def test_defaults_keep_their_rules():
    check(Config())


def test_a_section_alone_names_its_keys():
    with pytest.raises(ConfigError, match="^data.num_documents: expected at least 1, got 0$"):
        check(DataConfig(num_documents=0), "data.")


@pytest.mark.parametrize("override", ["trainer.max_steps=0", "data.strategy=best-fit", "model.d_conv=5", "a=1"])
def test_what_can_be_is_refused_before_torch_is_imported(override):
    code = (
        "import sys; from packmamba.config import ConfigError, load_config\n"
        f"try: load_config(None, [{override!r}])\n"
        "except ConfigError: sys.exit('torch' in sys.modules)\n"
        "sys.exit('accepted')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_size_is_a_name_and_no_way_to_another_file():
    with pytest.raises(ConfigError, match=r"model '\.\./train' in 'model=\.\./train' is unknown; known sizes: 1\.4b, "):
        load_config(None, ["model=../train"])
