"""The config: what is refused and in which words, and that it survives the wire unchanged.

Compared with: TOML texts and the message that a person must get. Run alone:
pytest tests/loco/test_config.py
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from loco.config import (
    PRESETS,
    Config,
    check_site_name,
    config_from_json,
    load_config,
    parse_config,
    preset_text,
)
from loco.errors import ConfigError

HEAD = "[outer.own_fragments.head]\ntensors = ['lm_head.weight']"


def refused(text: str) -> str:
    """The message for a config that is not accepted."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="run.toml")
    message = str(caught.value)
    assert message.startswith("run.toml")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nround = 3", "unknown key 'run.round' (did you mean 'rounds'?)"),
        ("[runn]\nrounds = 3", "unknown key 'runn' (did you mean 'run'?)"),
        (f"{HEAD}\nks = 3", "'outer.own_fragments.head.ks' (did you mean 'k'?)"),
        ("[codec]\nzzz = 1", "unknown key 'codec.zzz' (known keys: bits, k, k_start, k_ramp_round"),
        ("rounds = 3", "unknown key 'rounds'"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(text: str, told: str) -> None:
    assert told in refused(text)


@pytest.mark.parametrize(
    ("text", "key", "value", "allowed"),
    [
        ("[run]\nrounds = -1", "run.rounds", "-1", "greater than or equal to 0"),
        ("[inner]\nlr = 0.0", "inner.lr", "0.0", "greater than 0"),
        ("[inner]\nlr = inf", "inner.lr", "inf", "finite"),
        ("[inner]\nlr = nan", "inner.lr", "nan", "finite"),
        ("[inner]\nbetas = [0.9, 1.0]", "inner.betas.1", "1.0", "less than 1"),
        ("[inner]\noptimizer = 'adam'", "inner.optimizer", "'adam'", "'adamw'"),
        ("[codec]\nbits = 4", "codec.bits", "4", "1, 2 or 32"),
        ("[codec]\nk = 4097", "codec.k", "4097", "less than or equal to 4096"),
        ("[codec]\nk = 0", "codec.k", "0", "greater than or equal to 1"),
        ("[codec]\nk_sites = 0", "codec.k_sites", "0", "greater than or equal to 1"),
        ("[outer]\nfragments = 0", "outer.fragments", "0", "greater than or equal to 1"),
        (f"{HEAD}\nk = 0", "outer.own_fragments.head.k", "0", "greater than or equal to 1"),
        (f"{HEAD}\nbits = 32", "outer.own_fragments.head.bits", "32", "1 or 2"),
        (
            f"{HEAD}\naggregation = 'nesterov'",
            "outer.own_fragments.head.aggregation",
            "'nesterov'",
            "'mean_contributors' or 'mean'",
        ),
        (
            "[outer.own_fragments.a]\ntensors = []",
            "outer.own_fragments.a.tensors",
            "[]",
            "at least 1",
        ),
        (
            HEAD.replace(".head", ".Head"),
            "outer.own_fragments.Head.[key]",
            "'Head'",
            "pattern",
        ),
        ("[outer]\naggregation = 'median'", "outer.aggregation", "'median'", "'mean'"),
        ("[outer]\nbeta = 1.0", "outer.beta", "1.0", "less than 1"),
        ("[quorum]\nmin_sites = 0", "quorum.min_sites", "0", "greater than or equal to 1"),
        ("[quorum]\ngrace_seconds = 0", "quorum.grace_seconds", "0", "greater than 0"),
        ("[run]\nname = 'A b'", "run.name", "'A b'", "pattern"),
        ("[data]\ncorpus = ''", "data.corpus", "''", "at least 1 character"),
    ],
)
def test_an_impossible_value_names_key_value_and_what_is_allowed(
    text: str, key: str, value: str, allowed: str
) -> None:
    message = refused(text)
    assert f"{key} = {value}" in message
    assert allowed in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[run]\nrounds = "40"', "run.rounds"),
        ("[run]\nrounds = 40.0", "run.rounds"),
        ("[run]\nrounds = true", "run.rounds"),
        ("[inner]\nlr = '0.1'", "inner.lr"),
        ("[inner]\nbetas = 0.9", "inner.betas"),
        ("[inner]\nbetas = [0.9, 0.9, 0.9]", "inner.betas"),
        ("[model]\ntie_embeddings = 1", "model.tie_embeddings"),
        ("[data]\nsites = ['paris']", "data.sites"),
        ("[data.sites]\nparis = 3", "data.sites.paris"),
        ("run = 3", "run"),
    ],
)
def test_a_wrong_type_is_refused_and_never_converted(text: str, key: str) -> None:
    assert re.search(rf"{re.escape(key)}\S* = ", refused(text))


def test_a_whole_number_is_welcome_where_a_fraction_may_stand() -> None:
    assert parse_config("[outer]\nalpha = 1", source="x").outer.alpha == 1.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[model]\ndim = 100\nnum_heads = 3", "dim = 100 must be num_heads = 3 times"),
        ("[model]\nnum_heads = 4\nnum_kv_heads = 3", "num_kv_heads = 3 must divide num_heads = 4"),
        ("[codec]\nk_start = 128", "k_start and k_ramp_rounds belong together"),
        ("[outer]\nfragments = 2\n[codec]\nbits = 32", "fragments = 2 needs sparse contributions"),
        (f"{HEAD}\n[codec]\nbits = 32", "own_fragments.head needs sparse contributions"),
        (
            f"{HEAD}\n[outer.own_fragments.b]\ntensors = ['w', 'lm_head.weight']",
            "own_fragments.b.tensors: 'lm_head.weight' is in 'head' already",
        ),
        ("[codec]\nk_ramp_rounds = 4", "k_start and k_ramp_rounds belong together"),
        ("[codec]\nk_end = 2048", "k_end and k_end_rounds belong together"),
        ("[codec]\nk_end_rounds = 3", "k_end and k_end_rounds belong together"),
        (
            "[codec]\nk_end = 2048\nk_end_rounds = 3",
            "codec.k_end = 2048 needs outer.unsent = 'replica'",
        ),
        (
            "[outer]\nbeta = 0.0\nunsent = 'replica'\nfragments = 4\n"
            "[codec]\nk_end = 2048\nk_end_rounds = 3",
            "codec.k_end_rounds = 3 must be at least 4, the rounds in which every chunk is",
        ),
        ("[outer]\naggregation = 'nesterov'", "codec.bits = 32, not 2"),
        ("[outer]\nunsent = 'replica'", "needs beta = 0, not 0.95"),
        ("[inner]\nexclude_in_flight = true", "exclude_in_flight = true needs inner.delay = 1"),
        (
            "[quorum]\ndead_after_seconds = 3.0\nheartbeat_seconds = 2.0",
            "dead_after_seconds = 3.0 must be at least twice heartbeat_seconds = 2.0",
        ),
        (
            "[state]\nsnapshot_every_rounds = 10\nkeep_updates = 9",
            "keep_updates = 9 must be at least snapshot_every_rounds = 10",
        ),
        ("[data.sites]\n'Paris!' = 'sotu'", "site name 'Paris!' is not allowed"),
    ],
)
def test_values_that_contradict_each_other_are_named_together(text: str, told: str) -> None:
    assert told in refused(text)


def test_several_faults_are_told_at_once() -> None:
    message = refused("[run]\nround = 3\n[codec]\nbits = 4")
    assert "run.round" in message
    assert "codec.bits" in message


def test_a_schedule_of_alpha_is_read_from_toml_and_survives_the_wire() -> None:
    text = "[outer]\nalpha = 1.0\nalpha_steps = { 100 = 0.65, 500 = 0.4 }\n"
    config = parse_config(text, source="run.toml")
    assert config.outer.alpha_steps == {100: 0.65, 500: 0.4}
    assert config_from_json(config.to_json()) == config


def test_own_fragments_are_read_from_toml_and_survive_the_wire() -> None:
    config = parse_config(f"{HEAD}\nk = 256\nbits = 1\naggregation = 'mean'", source="run.toml")
    head = config.outer.own_fragments["head"]
    assert (head.tensors, head.k, head.bits) == (("lm_head.weight",), 256, 1)
    assert config_from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("{ soon = 0.5 }", "outer.alpha_steps.soon"),
        ("{ 0 = 0.5 }", "outer.alpha_steps.0"),
        ("{ 9 = 99.0 }", "outer.alpha_steps.9 = 99.0"),
    ],
)
def test_an_impossible_schedule_names_the_step(steps: str, told: str) -> None:
    assert told in refused(f"[outer]\nalpha_steps = {steps}\n")


def test_text_that_is_not_toml_says_where() -> None:
    assert "line 2" in refused("[run]\nrounds = x\n")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_config(path)


def test_json_brings_every_value_back_and_the_same_hash() -> None:
    config = parse_config(
        "[inner]\nlr = 0.1\nbetas = [0.8, 0.99]\n[codec]\nk_start = 9\nk_ramp_rounds = 2\n"
        "[data.sites]\nparis = 'sotu'",
        source="x",
    )
    back = config_from_json(config.to_json())
    assert back == config
    assert back.hash() == config.hash()


def test_the_hash_tells_configs_apart() -> None:
    hashes = {parse_config(f"[run]\nseed = {seed}", source="x").hash() for seed in range(5)}
    assert len(hashes) == 5


def test_json_with_an_unknown_key_is_refused_by_name() -> None:
    """A site of an older version must say what it does not know."""
    text = Config().to_json().replace('"rounds"', '"roundz"')
    with pytest.raises(ConfigError, match=r"config of the coordinator.*'run\.roundz'"):
        config_from_json(text)


@pytest.mark.parametrize("name", ["paris", "a", "0-9_z", "x" * 32])
def test_site_names_that_are_allowed(name: str) -> None:
    assert check_site_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * 33, "Paris", "-a", "_a", "a b", "a/b", "..", "a\n", "zürich", "a.b", "a\x00"]
)
def test_site_names_that_are_not(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 32 of a-z, 0-9") as caught:
        check_site_name(name)
    assert repr(name) in str(caught.value)


# --- presets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_config(name: str) -> None:
    assert parse_config(preset_text(name), source=name).run.rounds > 0


def test_an_unknown_preset_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'7b'; there are tiny, 125m, 1b"):
        preset_text("7b")


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{name}.")
        else:
            yield prefix + name


def set_keys(raw: dict[str, Any]) -> Iterator[str]:
    for section, values in raw.items():
        yield from (f"{section}.{key}" for key in values)


def test_every_key_of_a_preset_exists() -> None:
    """`parse_config` would refuse it; this names it."""
    known = set(keys(Config))
    assert "codec.k_ramp_rounds" in known
    for name in PRESETS:
        assert set(set_keys(tomllib.loads(preset_text(name)))) <= known


# --- every key is read ---------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
SECTION_OF = {
    field.annotation.__name__: name
    for name, field in Config.model_fields.items()
    if field.annotation is not None
} | {  # protocols of loco.outer, which imports no config
    "Density": "codec", "Coded": "codec", "Alpha": "outer", "Fragmented": "outer",
}  # fmt: skip

FOR_PEOPLE = {  # to show a value is not to obey it
    "coordinator/monitor.py", "loco/demo/report.py", "loco/doctor/run.py", "loco/plan_view.py",
}  # fmt: skip


def section_of(node: ast.expr, known: dict[str, str]) -> str | None:
    """The section that an expression stands for: `config.inner`, or a name that holds it."""
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr in Config.model_fields else known.get(node.attr)
    return known.get(node.id) if isinstance(node, ast.Name) else None


def names_of_sections(tree: ast.AST) -> dict[str, str]:
    """Arguments, variables and attributes of a file that hold a section of the config."""
    known: dict[str, str] = {}
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.Name(id=kind)) if kind in SECTION_OF:
                known[name] = SECTION_OF[kind]
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs += zip(targets, values, strict=True)
            case ast.Assign(targets=[target], value=value):
                pairs.append((target, value))
    for _ in range(2):  # a name that was given to another name
        for to, given in pairs:
            section = section_of(given, known)
            if section and isinstance(to, ast.Name | ast.Attribute):
                known[to.id if isinstance(to, ast.Name) else to.attr] = section
    return known


def keys_read(code: str) -> set[str]:
    """`section.key` of every read of the config in a file."""
    tree = ast.parse(code)
    known = names_of_sections(tree)
    return {
        f"{section}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (section := section_of(node.value, known))
    }


def test_every_key_is_read_by_the_code() -> None:
    """A key that is accepted and changes nothing is a lie to whoever sets it."""
    read: set[str] = set()
    for package in ("loco", "coordinator", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            if str(path.relative_to(ROOT)) not in FOR_PEOPLE | {"loco/config.py"}:
                read |= keys_read(path.read_text(encoding="utf-8"))
    assert set(keys(Config)) - read == set()


def test_the_search_knows_a_key_that_is_read_from_one_that_is_not() -> None:
    code = """
def f(config: InnerConfig):
    self._limits, steps = run.limits, 3
    limits = self._limits
    return config.lr, limits.connections
"""
    assert keys_read(code) >= {"inner.lr", "limits.connections"}
    assert not keys_read("lr = it.lr; steps = 3; connections = 4") & set(keys(Config))
