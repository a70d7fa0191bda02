"""Trackers, projects and repositories by other trainers' names: nothing is sent unless the user asks for it."""

from __future__ import annotations

import pytest

from tests.config.config_loading import MINIMAL, Load

ELSEWHERE = "`report_to` names the trackers, and the environment has their settings, such as WANDB_ENTITY"
UNKNOWN = "Ratel does not know this tracker; the metrics of every step are in run/metrics.jsonl"


@pytest.mark.parametrize(
    ("lines", "trackers", "project", "name"),
    [
        ("report_to: wandb\nwandb_project: p\nwandb_name: n", ("wandb",), "p", "n"),
        ("report_to: mlflow\nmlflow_experiment_name: p\nmlflow_run_name: n", ("mlflow",), "p", "n"),
        ("report_to: [trackio]\ntrackio_project_name: p\nrun_name: n", ("trackio",), "p", "n"),
        ("report_to: wandb\nproject: huggingface\nrun_name: n", ("wandb",), "huggingface", "n"),
        ("report_to: wandb\nwandb_project: p\nproject: q", ("wandb",), "q", None),
        ("report_to: wandb\nwandb_project: p\nproject:", ("wandb",), "p", None),
        ("report_to: wandb\nwandb_project:\nwandb_name: ''", ("wandb",), None, None),
        ("report_to: tensorboard\nwandb_project: p\nwandb_name: n", ("tensorboard",), None, None),
        ("wandb_project: p\nwandb_name: n\nuse_wandb: true\nmlflow_tracking_uri: http://x", ("wandb",), "p", "n"),
        ("wandb_project: p\nwandb_entity: team", ("wandb",), "p", None),
        ("wandb_project: p\nreport_to:", ("wandb",), "p", None),
        ("wandb_project: p\nuse_wandb: false", (), None, None),
        ("wandb_project: p\nwandb_mode: disabled", (), None, None),
        ("wandb_entity: team\nwandb_name: n", (), None, None),
        ("use_wandb: true", ("wandb",), None, None),
        ("use_tensorboard: true\nuse_comet: true\ncomet_project_name: c", ("tensorboard",), None, None),
        ("mlflow_experiment_name: e\nmlflow_run_name: r", ("mlflow",), "e", "r"),
        ("trackio_project_name: t", ("trackio",), "t", None),
        ("use_swanlab: true\nswanlab_project: s", (), None, None),
        ("report_to: none\nwandb_project: p", (), None, None),
        ("report_to: wandb\nwandb_mode: online", ("wandb",), None, None),
        ("report_to: [wandb, tensorboard]\nwandb_mode: offline", ("tensorboard",), None, None),
        ("report_to: wandb\nwandb_mode: disabled", (), None, None),
    ],
)
def test_trackers(load: Load, lines: str, trackers: tuple[str, ...], project: str | None, name: str | None) -> None:
    config = load(MINIMAL + lines + "\n").config
    assert (config.report_to, config.project, config.run_name) == (trackers, project, name)


def test_plugins_that_only_shard_are_noted(load: Load) -> None:
    plugins = "[axolotl.integrations.expert_parallel.ExpertParallelPlugin, axolotl.integrations.liger.LigerPlugin]"
    reason = "Ratel streams the model through one device and needs no sharding"
    assert load(MINIMAL + f"plugins: {plugins}\n").notices == (
        f"run.yaml:3:1: `plugins` is ignored: ExpertParallelPlugin: {reason}",
    )
    liger = load(MINIMAL + "plugins: [axolotl.integrations.liger.LigerPlugin]\n").notices
    assert liger == ("run.yaml:3:1: `plugins` has no effect here",)


def test_what_is_left_out_is_said(load: Load) -> None:
    assert load(MINIMAL + "report_to: [wandb, comet_ml]\nwandb_entity: team\n").notices == (
        f"run.yaml:3:1: `report_to` is ignored: {UNKNOWN}. `wandb_entity` is ignored: {ELSEWHERE}",
    )
    assert load(MINIMAL + "report_to: wandb\nwandb_mode: offline\n").notices[0] == (
        "run.yaml:3:1: `report_to` is ignored: `wandb_mode` turns it off; to use it without a network, set WANDB_MODE "
        f"in the environment instead. `wandb_mode` is ignored: {ELSEWHERE}"
    )
    assert load(MINIMAL + "wandb_project: p\n").notices == (
        "run.yaml:3:1: `wandb_project: p` is read as `report_to: wandb`, `wandb_project: p` as `project: p`",
    )
    assert load(MINIMAL + "report_to: wandb\nwandb_project: p\n").notices == (
        "run.yaml:4:1: `wandb_project: p` is read as `project: p`",
    )


@pytest.mark.parametrize(
    ("lines", "repository"),
    [
        ("hub_model_id: a/b", "a/b"),
        ("hub_model_id: b", "b"),
        ("hub_model_id:", None),
        ("hub_model_id: a/b\npush_to_hub: true", "a/b"),
        ("hub_model_id: a/b\npush_to_hub: false", None),
        ("hub_model_id: a/b\npush_to_hub:", "a/b"),
        ("push_to_hub: true\nhub_strategy: every_save\nhub_token: secret", None),
    ],
)
def test_the_hub(load: Load, lines: str, repository: str | None) -> None:
    loaded = load(MINIMAL + lines + "\n")
    assert loaded.config.hub_model_id == repository
    assert "secret" not in str(loaded)
