"""Relations of keys: what one asks of others is told once, beside it, and is read by all who say or check it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ratel_cli.config.describe import explain
from ratel_cli.config.json_schema import schema_text
from ratel_cli.config.keys import key_groups
from ratel_cli.config.keys.base import Contradiction, Section
from ratel_cli.config.keys.relation import (
    Beyond,
    Relation,
    broken,
    doubt,
    doubtful_keys,
    excludes,
    has,
    ignored_with,
    needs,
    only_if,
    relations_of,
    unless,
    words_of_relations,
)
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import examine_text
from ratel_cli.config.others.aliases import SECTIONS
from scripts.write_config_docs import DESTINATION
from tests.config.test_rejections import REJECTIONS, WARNINGS, blocks
from tests.tiers import examples

OF_TWO = re.compile("are both set|is not for")
OF_SEVERAL = re.compile(f"{OF_TWO.pattern}|` needs (datasets of )?`")
WITH_RELATIONS = [name for name, section in SECTIONS.items() if relations_of(section)]


@pytest.mark.parametrize("corpus", [REJECTIONS, WARNINGS], ids=lambda path: path.stem)
def test_every_relation_has_a_line(monkeypatch: pytest.MonkeyPatch, corpus: Path) -> None:
    """An error one in `rejections.txt`, a warning one in `warnings.txt`; other tests hold that these messages come."""
    shown: set[tuple[str, int]] = set()
    lines: list[str] = []
    find = Relation.found

    def recorded(relation: Relation, key: str, config: Section) -> Contradiction | None:
        found = find(relation, key, config)
        if found is not None and any(found.message in line for line in lines):
            shown.add((key, id(relation)))
        return found

    monkeypatch.setattr(Relation, "found", recorded)
    every = [
        (key, each)
        for name in WITH_RELATIONS
        for key, several in relations_of(SECTIONS[name]).items()
        for each in several
        if each.is_error == (corpus == REJECTIONS)
    ]
    for text, messages in blocks(corpus):
        lines = messages
        if corpus == WARNINGS or OF_SEVERAL.search("".join(messages)):
            examine_text(text, Path("run.yaml"))
    assert [f"{key} {each.words()}" for key, each in every if (key, id(each)) not in shown] == []


@pytest.mark.parametrize("name", WITH_RELATIONS)
def test_every_relation_is_in_the_docs_in_the_schema_and_in_explain(name: str) -> None:
    section = SECTIONS[name]
    schema = json.loads(schema_text())
    properties = (schema if not name else schema["$defs"][section.__name__])["properties"]
    page = DESTINATION.read_text()
    for key in section.model_fields:
        dotted = f"{name}.{key}".lstrip(".")
        _, _, part = page.partition(f"\n### `{dotted}`\n")
        entry = re.split("\n##", part)[0]
        printed = "\n".join(line.text for line in explain(dotted))
        for relation in relations_of(section).get(key, ()):
            words = relation.words()
            assert words in words_of_relations(section, key)
            assert words in entry and words in properties[key]["description"]
            assert words.replace("`", "") in printed


def test_both_keys_say_that_they_exclude_each_other() -> None:
    for key, several in relations_of(RunConfig).items():
        for relation in several if key != "rl" else ():
            for other in (each.key for each in relation.others if relation.kind == "excludes"):
                assert "." in other or any(f"`{key}" in words for words in words_of_relations(RunConfig, other))


class Toy(Section):
    """A section whose keys have one relation of each kind."""

    engine: Literal["steam", "sail"] = "sail"
    wheels: Annotated[int, needs("rails", "road", why="they roll", hint="lay some")] = 0
    rails: Annotated[
        bool, excludes("road", at=("road",)), excludes(has("engine", "sail"), of=(True,), why="wind turns")
    ] = False
    road: bool = False
    coal: Annotated[
        float | None, only_if(has("engine", "steam")), needs("rails", of=(0, 7), when=((has("road"),),))
    ] = None
    sails: Annotated[str, ignored_with("rails"), excludes("coal", of=("s*",), why="soot")] = ""
    speed: Annotated[
        int, doubt(Beyond("speed", 9), "it is fast"), doubt(Beyond("speed", "wheels", is_below=True), "slow", "push")
    ] = 5
    bell: Annotated[
        bool, ignored_with("road", of=(True,), why="nobody hears it"), needs("rails", when=((unless("road"),),))
    ] = True


@pytest.mark.parametrize(
    ("given", "errors", "warnings"),
    [
        ({"bell": False}, [], []),
        ({"bell": False, "wheels": 4}, ["`wheels` needs `rails` or `road`: they roll"], []),
        (
            {"rails": True, "road": True},
            ["`road` and `rails` are both set", "`rails: true` is not for `engine: sail`: wind turns"],
            [],
        ),
        ({"road": True, "bell": True}, [], ["`bell` is ignored: nobody hears it"]),
        ({"road": True}, [], []),  # the bell is there by default
        ({"bell": True}, ["`bell` needs `rails`"], []),
        # Where nothing is the default, zero is a value.
        ({"road": True, "coal": 0.0}, ["`coal: 0` needs `rails`"], ["`coal` is ignored: `engine` is sail"]),
        ({"engine": "steam", "coal": 3.0, "road": True}, [], []),
        (
            {"engine": "steam", "coal": 0.0, "road": True, "sails": "square"},
            ["`coal: 0` needs `rails`", "`coal` and `sails: square` are both set: soot"],
            [],
        ),
        ({"engine": "steam", "coal": 1.0, "road": True, "sails": "two"}, [], []),
        ({"engine": "steam", "rails": True, "sails": "two", "bell": False}, [], ["`sails` is ignored: `rails` is set"]),
        ({"road": True, "speed": 10}, [], ["`speed` is 10: it is fast"]),
        ({"road": True, "speed": 3, "wheels": 4}, [], ["`speed` is 3, but `wheels` is 4: slow"]),
    ],
)
def test_what_is_wrong_and_what_is_doubtful(given: dict[str, object], errors: list[str], warnings: list[str]) -> None:
    config = Toy.model_validate(given)
    assert [each.message for each in broken(config)] == errors
    assert [each.message for each in doubtful_keys(config)] == warnings


def test_an_error_names_the_keys_it_is_about() -> None:
    """The first of these that the user wrote is its place; one whose value is wrong by itself hides it."""
    [found] = broken(Toy(wheels=4, bell=False))
    assert (found.keys, found.hint) == (("wheels", "rails", "road"), "lay some")
    [excluded] = broken(Toy(rails=True, road=True, engine="steam"))
    assert (excluded.keys, excluded.hint) == (("road", "rails"), "remove one of them")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("engine", ["`sail` excludes `rails: true`: wind turns."]),
        ("wheels", ["Needs `rails` or `road`: they roll."]),
        ("road", ["Excludes `rails`."]),
        (
            "coal",
            [
                "Ignored without `engine: steam`.",
                "With `road`, `0` or `7` needs `rails`.",
                "Excludes `sails: s…`: soot.",
            ],
        ),
        ("sails", ["Ignored with `rails`.", "`s…` excludes `coal`: soot."]),
        ("speed", ["`speed` above 9 gets a warning: it is fast.", "`speed` below `wheels` gets a warning: slow."]),
        ("bell", ["`true` is ignored with `road`: nobody hears it.", "Without `road`, it needs `rails`."]),
    ],
)
def test_the_words_of_a_relation(key: str, words: list[str]) -> None:
    assert words_of_relations(Toy, key) == words


def test_groups_follow_from_relations() -> None:
    """They decide what is trained and the identity of stores, so their order must not change unseen."""
    assert key_groups.OF_ADAPTER == (
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_target_parameters",
        "lora_layers_to_transform", "peft_use_rslora", "peft_use_dora", "lora_modules_to_save",
        "peft_ensure_weight_tying", "peft_init_lora_weights",
    )  # fmt: skip
    assert key_groups.OF_PREFERENCES == (
        "rl_beta", "simpo_gamma", "cpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "disable_dropout",
    )  # fmt: skip
    assert key_groups.OF_WARMUP == ("warmup_rounding", "max_warmup_steps")


VALUES: dict[str, list[object]] = {
    "adapter": ["lora"], "lora_target_modules": [["q_proj"], "q.*"], "lora_layers_to_transform": [[0]],
    "lora_target_parameters": [["experts"]], "peft_use_dora": [True], "load_in_4bit": [True], "load_in_8bit": [True],
    "quantize_moe_experts": [True], "base_storage": ["in_place"], "random_init": [True],
    "unfrozen_parameters": [["lm_head"]], "frozen_parameters": [["lm_head"]], "neftune_noise_alpha": [5],
    "model_shape": [{"num_layers": 1, "num_heads": 2, "hidden_size": 8}], "use_dft_loss": [True],
    "label_smoothing_factor": [0.1], "rl": ["dpo", "kto"], "streaming": [True], "tokens_per_step": [1024],
    "max_steps": [5], "val_set_size": [0.1], "bf16_master": ["stochastic"], "dtype": ["float32", "float16"],
    "gradient_dtype": ["float16"], "embedding_lr": [0, 1e-5], "embedding_lr_scale": [0.5], "warmup_steps": [9],
    "warmup_ratio": [0.1], "save_steps": [5], "saves_per_epoch": [1], "eval_steps": [2], "evals_per_epoch": [1],
    "load_best_model_at_end": [True], "metric_for_best_model": ["accuracy", "rewards/margins"],
    "chat_template": ["jinja", "chatml", "tokenizer_default"], "chat_template_jinja": ["{{ 1 }}"],
    "special_tokens": [{"pad_token": "x"}], "eot_tokens": [["x"]], "tokenizer_use_mistral_common": [True],
    "storage": [{"durability": "none"}, {"keep_generations": 0}], "optimizer": ["sgd", "lion"],
    "datasets": [[{"path": "a", "type": name}] for name in ("latents", "mlm", "classification", "seq2seq", "alpaca")],
    "test_datasets": [[{"path": "t"}], [{"path": "t", "type": "alpaca"}]],
}  # fmt: skip


def errors_of(values: dict[str, object]) -> set[str]:
    """The messages about several keys of a config with these values."""
    try:
        RunConfig.model_validate({"base_model": "m", "datasets": [{"path": "x"}], **values})
    except ValidationError as error:
        return {found.message for each in error.errors() for found in each["ctx"]["found"]}
    return set()


@given(values=st.sets(st.sampled_from(sorted(VALUES)), min_size=2, max_size=7).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.sampled_from(VALUES[key]) for key in sorted(keys)})
))  # fmt: skip
@examples(1000)
def test_what_two_keys_exclude_is_found_beside_all_other_errors(values: dict[str, object]) -> None:
    """No error hides another one: what is wrong about two keys alone is reported whatever else is wrong."""
    found = errors_of(values)
    for pair in itertools.combinations(values, 2):
        alone = errors_of({key: values[key] for key in pair})
        assert {message for message in alone if OF_TWO.search(message)} <= found
