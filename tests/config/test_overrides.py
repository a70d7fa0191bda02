"""`key=value` arguments that override a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import SnapshotConfig
from tests.config.config_loading import MINIMAL, Complain, Load

NESTED = "base_model: m\ndatasets:\n- a.jsonl\n- {path: b.jsonl, split: dev}\nstorage: {engine: threads}\n"


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("learning_rate=1e-4", "learning_rate", 1e-4),
        ("learning_rate = 1e-4 ", "learning_rate", 1e-4),
        ("base_model=a=b", "base_model", "a=b"),
        ("base_model=a: b # c", "base_model", "a: b # c"),
        ("base_model='3'", "base_model", "3"),
        ('base_model="a\\tb"', "base_model", "a\tb"),
        ("output_dir=x y", "output_dir", Path("x y")),
        ("max_grad_norm=", "max_grad_norm", None),
        ("max_grad_norm=null", "max_grad_norm", None),
        ("shuffle=false", "shuffle", False),
    ],
)
def test_values_are_scalars_after_the_first_equals_sign(load: Load, argument: str, key: str, value: object) -> None:
    loaded = load(MINIMAL, argument)
    assert getattr(loaded.config, key) == value
    assert loaded.notices == ()


def test_dotted_keys(load: Load) -> None:
    config = load(
        NESTED,
        "storage.paths=[/a, /b]",
        "storage.engine=io_uring",
        "storage.snapshot.path=/c",
        "storage.snapshot.every=5",
        "limits.host_memory=2GiB",
        "datasets.0.max_samples=10",
        "datasets.1=c.jsonl",
    ).config
    assert config.storage.paths == (Path("/a"), Path("/b"))
    assert (config.storage.engine, config.limits.host_memory) == ("io_uring", 2 << 30)
    assert config.storage.snapshot == SnapshotConfig(path=Path("/c"), every=5)
    assert [(each.path, each.split, each.max_samples) for each in config.datasets] == [
        ("a.jsonl", "train", 10),
        ("c.jsonl", "train", None),
    ]


def test_a_section_may_be_empty_or_replaced(load: Load) -> None:
    assert load(MINIMAL + "storage:\n", "storage.engine=threads").config.storage.engine == "threads"
    assert load(MINIMAL + "storage:\n").config.storage.engine == "auto"
    assert load(MINIMAL + "storage:\n  snapshot:\n").config.storage.snapshot is None
    assert (
        load(MINIMAL + "storage: {snapshot: {path: s, every: 5}}\n", "storage.snapshot=null").config.storage.snapshot
        is None
    )
    assert load(NESTED, "storage={durability: none}").config.storage.engine == "auto"
    assert [each.path for each in load(NESTED, "datasets=x").config.datasets] == ["x"]
    assert [each.path for each in load(NESTED, "datasets=[x, {path: y}]").config.datasets] == ["x", "y"]


def test_a_later_argument_wins_and_an_alias_is_the_same_key(load: Load) -> None:
    loaded = load(MINIMAL + "learning_rate: 0.01\n", "lr=0.02", "learning_rate=0.03", "completion_only_loss=false")
    assert (loaded.config.learning_rate, loaded.config.train_on_inputs) == (0.03, True)
    assert loaded.notices == (
        "argument 'lr=0.02': `lr` is read as `learning_rate`",
        "argument 'completion_only_loss=false': `completion_only_loss: false` is read as `train_on_inputs: true`",
    )


def test_an_argument_replaces_the_key_that_decides_the_same(load: Load) -> None:
    loaded = load(MINIMAL + "warmup_ratio: 0.1\nnum_epochs: 3\n", "warmup_steps=5", "max_steps=9")
    assert (loaded.config.warmup_steps, loaded.config.warmup_ratio) == (5, 0.0)
    assert (loaded.config.max_steps, loaded.config.num_epochs) == (9, 1.0)
    assert loaded.notices == (
        "argument 'warmup_steps=5': replaces `warmup_ratio` in the file",
        "argument 'max_steps=9': replaces `num_epochs` in the file",
    )
    assert load(MINIMAL + "max_steps: 9\n", "num_epochs=2").config.max_steps is None
    assert load(MINIMAL + "num_epochs: 3\n", "max_steps=null").config.num_epochs == 3


ERRORS: list[tuple[str, str | None]] = [
    ("foo", "not a `key=value` argument | write key=value, for example learning_rate=1e-4"),
    ("=3", "not a `key=value` argument | write key=value, for example learning_rate=1e-4"),
    ("a..b=3", "not a `key=value` argument | write key=value, for example learning_rate=1e-4"),
    (".=3", "not a `key=value` argument | write key=value, for example learning_rate=1e-4"),
    ("sed=3", "unknown key `sed` | did you mean `seed`?"),
    ("sedd=3", "unknown key `sedd` | did you mean `seed`?"),
    ("x.y=3", "unknown key `x`"),
    ("seed.x=3", "`seed` has no keys"),
    ("storage.engine.x=3", "`storage.engine` has no keys"),
    ("storage.snapshot.path.x=3", "`storage.snapshot.path` has no keys"),
    ("storage.engin=threads", "unknown key `engin` in `storage` | did you mean `engine`?"),
    ("storage.engine=io", "`storage.engine` must be `auto`, `io_uring`, `liburing` or `threads`, not 'io'"),
    ("seed=x", "`seed` must be a whole number, not 'x'"),
    ("datasets.x=x", "`x` is not the number of a dataset | datasets are numbered from 0: datasets.0.path=a.jsonl"),
    ("datasets.2.path=x", "there is no dataset 2; the config has 2, numbered from 0"),
    ("datasets.99999999999.path=x", "there is no dataset 99999999999; the config has 2, numbered from 0"),
    ("datasets.0.path.x=x", "`datasets.0.path` has no keys"),
    ("datasets.0.max_samples=0", "`datasets.0.max_samples` must be at least 1, not 0"),
    ("datasets.0=3", "`datasets.0` must be a mapping (`key: value` lines), not 3"),
    ("seed=[1", "not valid YAML: the text ends too early | close every quote and bracket"),
    ("seed='a' b", "not valid YAML: expected '<document start>', but found '<scalar>'"),
    ("seed={a: 1, a: 2}", None),
    ("base_model=a\x1b", "the character U+001B is not allowed in YAML"),
    ("base_model=a\udc80", "the character U+DC80 is not allowed in YAML"),
]
"""Arguments for the config above, and what is wrong with each. None: what PyYAML says."""


@pytest.mark.parametrize(("argument", "error"), ERRORS)
def test_errors_name_the_argument(complain: Complain, argument: str, error: str | None) -> None:
    errors = complain(NESTED, argument)
    assert all(each.startswith(f"argument '{argument}': ") for each in errors)
    if error is not None:
        assert errors == [f"argument '{argument}': {error}"]


def test_two_exclusive_arguments_contradict(complain: Complain) -> None:
    assert complain(MINIMAL, "warmup_steps=5", "warmup_ratio=0.1") == [
        "argument 'warmup_ratio=0.1': `warmup_steps` and `warmup_ratio` are both set | remove one of them"
    ]


def test_a_long_argument_is_cut_in_messages(complain: Complain) -> None:
    [error] = complain(MINIMAL, "seed=" + "x" * 500)
    assert len(error) < 250
