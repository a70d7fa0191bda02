"""The model card: front matter that the hub accepts, and text that names stay text in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from ratel_cli.model.export.card import Card, DataSource, LossRow, card_text, plain_card
from ratel_cli.model.values.spec import ModelSpec
from tests.model.tiny import save_tiny, skeleton_of

CARD = Card(
    name="my-run",
    repository=None,
    base_model="org/base",
    is_random=False,
    origin=None,
    datasets=(
        DataSource(name="org/chats", is_on_hub=True, details=("default", "split train")),
        DataSource(name="train.jsonl", is_on_hub=False),
        DataSource(name="org/chats", is_on_hub=True, details=("split extra", "weight 0.5")),
    ),
    test_datasets=(DataSource(name="test.jsonl", is_on_hub=False),),
    settings={"max_steps": 20, "learning_rate": 2e-5, "lr_scheduler_kwargs": {"min_lr": 1e-6}, "shuffle": True},
    losses=(LossRow(step=10, loss=2.5, eval_loss=2.25), LossRow(step=20, loss=None, eval_loss=2.0)),
    software="ratel 0.1.0, torch 2.13.0",
    picture=b"png",
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    directory = tmp_path_factory.mktemp("card") / "base"
    save_tiny("llama", directory)
    return skeleton_of(directory)[1]


def text_of(card: Card, spec: ModelSpec) -> str:
    return card_text(card, spec, dtype="bfloat16", num_updates=20)


def test_the_front_matter_is_what_the_hub_reads(spec: ModelSpec) -> None:
    data = ModelCard(text_of(CARD, spec)).data
    assert data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "datasets": ["org/chats"],
        "tags": ["ratel"],
    }


def test_a_model_of_this_machine_has_no_ids_of_the_hub(spec: ModelSpec) -> None:
    data = ModelCard(text_of(replace(CARD, base_model=None, datasets=CARD.datasets[1:2]), spec)).data.to_dict()
    assert data.keys() == {"library_name", "pipeline_tag", "tags"}


def test_random_weights_are_no_fine_tuning(spec: ModelSpec) -> None:
    text = text_of(replace(CARD, is_random=True), spec)
    assert "base_model_relation" not in ModelCard(text).data.to_dict()
    assert "trained from random weights in the shape of [org/base]" in text and "fine-tuned" not in text


def test_what_it_says(spec: ModelSpec) -> None:
    text = text_of(CARD, spec)
    for part in (
        "# my-run\n",
        "LlamaForCausalLM with ",
        (
            "in bfloat16, fine-tuned from [org/base](https://huggingface.co/org/base) with Ratel: all parameters, "
            "20 optimizer updates.\n"
        ),
        "* [org/chats](https://huggingface.co/datasets/org/chats), default, split train\n* `train.jsonl`\n",
        "* `test.jsonl`, for evaluation\n",
        (
            "| Step | Training loss | Evaluation loss |\n| ---: | ---: | ---: |\n"
            "| 10 | 2.5000 | 2.2500 |\n| 20 |  | 2.0000 |\n"
        ),
        "](curves.png)\n",
        "* ratel 0.1.0\n* torch 2.13.0\n",
    ):
        assert part in text, part
    settings = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(settings) == CARD.settings, "they can be copied into a config"
    assert 'AutoModelForCausalLM.from_pretrained(".")' in text
    uploaded = text_of(replace(CARD, repository="me/model"), spec)
    assert 'AutoModelForCausalLM.from_pretrained("me/model")' in uploaded
    assert "The run started from step 4 of the run other." in text_of(
        replace(CARD, origin="step 4 of the run other"), spec
    )


def test_no_column_and_no_section_without_content(spec: ModelSpec) -> None:
    losses = (LossRow(step=1, loss=2.0, eval_loss=None),)
    text = text_of(replace(CARD, losses=losses, picture=None), spec)
    assert "| Step | Training loss |\n| ---: | ---: |\n| 1 | 2.0000 |\n" in text and "png" not in text
    bare = card_text(plain_card(spec), spec, dtype="float32", num_updates=1)
    assert "##" not in bare and "1 optimizer update." in bare and Path(spec.name).name in bare


def test_names_stay_text(spec: ModelSpec) -> None:
    sources = (DataSource(name="a`b\n---\ntags: [x]", is_on_hub=False, details=("split\n# head",)),)
    text = text_of(replace(CARD, name="run\n# head", datasets=sources, origin="step 1 of the run\n# head"), spec)
    assert "`` a`b\\n---\\ntags: [x] ``, split\\n# head" in text
    assert ModelCard(text).data.tags == ["ratel"]
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# run\\n# head"]
