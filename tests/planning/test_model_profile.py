"""A model's profile as JSON: what was written is read, and nothing else is."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from ratel_cli.planning.profile.model_profile import ModelProfile
from tests.planning.profiles import by_chance, candidate, layer, model

TIMED = replace(
    model(replace(layer(candidate(key="aten.mm.default#3", seconds=0.25)), forward_seconds=1.5)),
    source="recorded",
    head_seconds=2.0,
)
BY_CHANCE = by_chance(random.Random(1), num_layers=5)


@pytest.mark.parametrize("profile", [TIMED, BY_CHANCE], ids=["timed", "by chance"])
def test_it_comes_back_as_it_went(profile: ModelProfile) -> None:
    assert ModelProfile.from_json(json.loads(json.dumps(profile.to_json(), allow_nan=False))) == profile
    assert ModelProfile.from_json({"made_for": "a key of somebody else's", **profile.to_json()}) == profile


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format_version": 2}, "another version"),
        ({"source": "guessed"}, "source is 'guessed'"),
        ({"source": None}, "source is not text"),
        ({"layers": [0, 1]}, "layers without a profile"),
        ({"layers": [-1]}, "layers without a profile"),
        ({"layers": ["0"]}, "layers is not a whole number"),
        ({"layers": 0}, "layers is not a list"),
        ({"profiles": [3]}, "expected an object"),
        ({"profiles": [{}]}, "input_bytes is missing"),
        ({"sequence_len": 1.5}, "sequence_len is not a whole number"),
        ({"head_seconds": "2"}, "head_seconds is not a number"),
    ],
)
def test_what_is_no_profile_is_rejected(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelProfile.from_json(TIMED.to_json() | changed)


@pytest.mark.parametrize("content", [None, [], "profile"])
def test_what_is_no_object_is_rejected(content: object) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        ModelProfile.from_json(content)


def test_a_candidate_is_read_as_strictly() -> None:
    content = json.loads(json.dumps(TIMED.to_json()))
    content["profiles"][0]["candidates"][0]["num_bytes"] = None
    with pytest.raises(ValueError, match="num_bytes is not a whole number"):
        ModelProfile.from_json(content)
