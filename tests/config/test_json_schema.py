"""The JSON schema of a config: what loads follows it, and what an editor should mark does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from ratel_cli.cli.app import main
from ratel_cli.config.describe import whole_meaning_of
from ratel_cli.config.importing import import_config
from ratel_cli.config.json_schema import SCHEMA_FILE, config_schema, editor_line, schema_text
from ratel_cli.config.load import examine_text, load_config, to_yaml
from ratel_cli.config.others.aliases import ALIASES, SECTIONS, VALUE_ALIASES
from ratel_cli.config.yaml.yaml_marks import plain, read_text
from tests.config.config_loading import MINIMAL
from tests.config.test_rejections import WARNINGS, blocks

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "hardware")
SCHEMA = config_schema()


def found(text: str) -> list[str]:
    """What in a config's text does not follow the schema: each place, with the keyword that it breaks."""
    errors = Draft202012Validator(SCHEMA).iter_errors(plain(read_text(text, "run.yaml", [])))
    return [f"{each.json_path}: {each.validator}: {each.message}" for each in errors]


def keywords(schema: Mapping[str, object]) -> Iterator[str]:
    """All keywords of a schema and of those in it."""
    for keyword, rule in schema.items():
        yield keyword
        inner = rule.values() if keyword in ("properties", "$defs") else rule if isinstance(rule, list) else [rule]  # type: ignore[attr-defined]
        for each in inner:
            yield from keywords(each) if isinstance(each, dict) and keyword != "default" else ()


def test_every_keyword_is_one_of_the_standard() -> None:
    """Others would go unchecked."""
    words = {"$schema", "$defs", "title", "description", "default", "deprecated"}
    assert {*keywords(SCHEMA)} <= words | Draft202012Validator.VALIDATORS.keys()
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_follow_it(path: Path) -> None:
    assert found(path.read_text()) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_name_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(.+)", first)
    assert match is not None, "begin with the line that tells an editor where the schema is"
    assert (path.parent / match[1]).resolve() == SCHEMA_FILE


def test_what_a_run_writes_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    assert found(to_yaml(load_config(path).config)) == []


LOADS = [text for text, _ in blocks(WARNINGS)] + [
    f"{MINIMAL}{line}\n"
    for line in (
        "test_datasets: {path: b.jsonl, roles: {user: [human]}, roles_to_train: [assistant]}",
        "storage:",
        "storage: {paths: /mnt/a, snapshot: {path: /b, every: 3}}",
        "limits: {host_memory: 24GiB, gpu_memory: 24.5 gb}",
        "limits: {host_memory: 25769803776}",
        "head_chunk: auto",
        "head_chunk: 256MiB",
        "micro_batch_size: auto\ntokens_per_step: 4096",
        "warmup_steps: 0.1",
        "max_grad_norm:",
        "activations: 0.5",
        "lr_scheduler_type: cosine_with_warmup",
        "special_tokens: {eos_token: </s>}",
        "lr_scheduler: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
        "report_to: [tensorboard, mlflow]",
        "report_to:",
        "hub_model_id: org/name\nhub_private_repo: true",
    )
]


@pytest.mark.parametrize(
    "text", ["base_model: m\ndatasets: [a.jsonl, {path: b.jsonl, type: sharegpt}, {id: c}]\n", *LOADS]
)
def test_what_loads_follows_it(tmp_path: Path, text: str) -> None:
    assert examine_text(text, tmp_path / "run.yaml").findings == ()
    assert found(text) == []


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("learning_rte: 1e-5", "'learning_rte' was unexpected"),
        ("learning_rate: fast", ".learning_rate: type"),
        ("learning_rate: -1", ".learning_rate: minimum"),
        ("sequence_len: 1.5", ".sequence_len: type"),
        ("sample_packing: 1", ".sample_packing: type"),
        ("storage: {path: /a}", ".storage"),
        ("limits: {host_memory: 24}", ".limits"),
        ("limits: {host_memory: 24 gigs}", ".limits"),
        ("head_chunk: small", ".head_chunk"),
        ("save_steps: 0", ".save_steps"),
        ("lr_scheduler_kwargs: {min_rate: 1}", ".lr_scheduler_kwargs"),
        ("test_datasets: [{split: x}]", ".test_datasets"),
        ("test_datasets: [{path: x, type: alpacca}]", ".test_datasets"),
        ("special_tokens: {end: </s>}", ".special_tokens"),
        ("completion_only_loss: maybe", ".completion_only_loss: type"),
        ("model_shape: {num_layers: 2}", ".model_shape"),
    ],
)
def test_what_is_wrong_does_not(tmp_path: Path, line: str, part: str) -> None:
    text = f"{MINIMAL}{line}\n"
    assert examine_text(text, tmp_path / "run.yaml").findings
    wrong = found(text)
    assert any(part in each for each in wrong), wrong


def test_a_model_is_needed() -> None:
    assert found("datasets: train.jsonl\n") and not found("model: org/name\ndatasets: train.jsonl\n")
    assert found("model_shape: {num_layers: 2, num_heads: 2, hidden_size: 8}\n") == []


def test_what_is_wrong_about_single_keys_is_found() -> None:
    """Of the corpus of wrong configs: each with one error, about the name or the value of one key."""
    of_the_text = re.compile(
        r"not valid YAML|the file is empty|consists of|a key must be|torchtune|nested|more than 10000"
    )
    of_several = re.compile(
        r"both set|needs|twice|multiple|mean the same|`datasets` is|less than `|but `|does not use|"
        r"is not for|is not read"
    )
    # Numbers and paths that JSON cannot describe, and names of templates, of which other trainers have many.
    beyond = re.compile(r"1e3|1e999|\.nan|val_set_size|1\.5|~no-such-user|\\0|chat_template")
    checked = []
    for text, errors in blocks():
        if len(errors) == 1 and not any(each.search(errors[0]) for each in (of_the_text, of_several)):
            checked += [] if beyond.search(text) else [text]
    assert [text for text in checked if not found(text)] == []
    assert len(checked) > 50


def test_every_key_is_in_it_with_its_meaning() -> None:
    for name, section in SECTIONS.items():
        described = SCHEMA if not name else SCHEMA["$defs"][section.__name__]
        properties = described["properties"]
        assert properties.keys() == section.model_fields.keys() | ALIASES.get(name, {}).keys()
        assert all(properties[key]["description"] == whole_meaning_of(name, key) for key in section.model_fields)
        assert described["additionalProperties"] is False


@pytest.mark.parametrize("key", VALUE_ALIASES)
def test_other_names_of_values_are_in_it(key: str) -> None:
    for value in VALUE_ALIASES[key]:
        if key == "datasets.type":
            assert found(f"base_model: m\ndatasets: [{{path: a, type: {value}}}]\n") == []
        else:
            assert found(f"{MINIMAL}{key}: {value}\n") == []


def test_the_file_is_that_of_today() -> None:
    is_current = SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
    assert is_current, "run.schema.json is out of date; run: python -m scripts.write_config_docs"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    path = tmp_path / "ratel.schema.json"
    assert main(["schema", "-o", str(path)]) == 0
    assert "wrote" in capsys.readouterr().err and json.loads(path.read_text()) == SCHEMA
    path.write_text("mine")
    assert main(["schema", "-o", str(path)]) == 2
    assert path.read_text() == "mine" and "the file exists" in capsys.readouterr().err
    assert main(["schema", "-o", str(path), "--overwrite"]) == 0
    assert json.loads(path.read_text()) == SCHEMA
    assert main(["schema", "-o", str(tmp_path / "no" / "such.json")]) == 3


def test_an_imported_config_names_it(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("base_model: org/name\ndatasets: [{path: a.jsonl, type: alpaca}]\nstrict: false\n")
    first = import_config(theirs).text.splitlines()[0]
    assert first == editor_line()
    assert Path(first.split("file://")[1]) == SCHEMA_FILE
