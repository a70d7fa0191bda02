"""`ratel finetune` on latents: a diffusion transformer has the weights of plain PyTorch, and every command after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file

from ratel_cli.config.load import load_config
from ratel_cli.run.ask import generate_images
from tests.e2e.conftest import MakeConfig
from tests.e2e.latents import (
    NUM_CLASSES,
    SHAPE,
    TOKENS,
    denoised_by_pytorch,
    exported_denoiser,
    latents_of,
    save_denoiser,
    write_latents,
)
from tests.e2e.runs import (
    DTYPES,
    SHORT_RUN,
    assert_rejected,
    ratel,
    works,
)
from tests.tiers import rotating, sample, thinned

KEYS: dict[str, object] = {
    **SHORT_RUN,
    "sequence_len": None,
    "sample_packing": None,
    "micro_batch_size": 3,
    "learning_rate": 4e-3,
}


@pytest.fixture(scope="session")
def denoiser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_denoiser(tmp_path_factory.mktemp("models") / "dit")


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latents(tmp_path_factory.mktemp("data") / "latents.safetensors")


def _datasets(path: Path, **keys: object) -> dict[str, object]:
    return {"datasets": [{"path": str(path), "type": "latents", **keys}]}


@pytest.mark.parametrize(("dtype", "clip"), rotating(["float32", "bfloat16"], [0.5, None], every=2, full_rotation=True))
def test_it_trains_as_plain_pytorch_does(
    make_config: MakeConfig, denoiser: Path, latents: Path, dtype: str, clip: float | None
) -> None:
    config = make_config(base=denoiser, **{**KEYS, "dtype": dtype, "max_grad_norm": clip}, **_datasets(latents))
    config.succeed()
    before = {name: each.float() for name, each in load_file(denoiser / "diffusion_pytorch_model.safetensors").items()}
    data = latents_of(config)
    steps = [data.step(number) for number in range(5)]
    wanted = denoised_by_pytorch(denoiser, before, steps, config.recipe)
    assert [line["loss"] for line in config.metrics] == pytest.approx(list(wanted.losses), rel=1e-6)
    assert [line["grad_norm"] for line in config.metrics] == list(wanted.norms)
    found = exported_denoiser(config.output)
    assert found.keys() == before.keys()
    for name, values in found.items():
        assert torch.equal(values, wanted.weights[name].to(DTYPES[dtype])), name
        assert not torch.equal(values, before[name].to(DTYPES[dtype])), name
    loaded: Any = DiTTransformer2DModel.from_pretrained(config.output, torch_dtype=DTYPES[dtype])
    assert all(torch.equal(each, found[name]) for name, each in loaded.named_parameters())


@pytest.mark.full
def test_latents_in_parquet_are_the_same_latents(
    make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path
) -> None:
    """And so are losses and weights."""
    tensors = load_file(latents)
    rows = pyarrow.table({"latents": tensors["latents"].tolist(), "labels": tensors["labels"].numpy()})
    types = pyarrow.schema([("latents", rows.schema.field("latents").type), ("labels", pyarrow.int16())])
    pyarrow.parquet.write_table(rows.cast(types), tmp_path / "latents.parquet", row_group_size=7)
    keys = {**KEYS, "val_set_size": 4}
    one = make_config("safetensors", base=denoiser, **keys, **_datasets(latents))
    other = make_config("parquet", base=denoiser, **keys, **_datasets(tmp_path / "latents.parquet"))
    for config in (one, other):
        config.succeed()
    assert one.curve == other.curve
    assert one.metrics[-1]["eval_loss"] == other.metrics[-1]["eval_loss"]
    found, wanted = exported_denoiser(other.output), exported_denoiser(one.output)
    assert all(torch.equal(values, found[name]) for name, values in wanted.items())


def test_every_command_after_it(make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path) -> None:
    config = make_config(base=denoiser, **{**KEYS, "val_set_size": 4, "save_steps": 2}, **_datasets(latents))
    assert f"{26 * TOKENS} tokens" in (stderr := config.succeed()) and "load it with diffusers'" in stderr
    assert config.metrics[-1]["eval_loss"] > 0
    verified = works("verify", config.output)
    assert all(
        words in verified.stdout + verified.stderr for words in ("every value finite", "loads: DiTTransformer2D")
    )
    assert "predictions" in verified.stdout + verified.stderr
    works("verify", config.output, "--json")
    works("export", config.output, "-o", tmp_path / "again")
    again, first = exported_denoiser(tmp_path / "again"), exported_denoiser(config.output)
    assert all(torch.equal(values, again[name]) for name, values in first.items())
    works("verify", tmp_path / "again")
    card = (config.output / "README.md").read_text()
    assert "library_name: diffusers" in card and "DiTTransformer2DModel.from_pretrained" in card
    assert "sequence_len" not in card and "pipeline_tag" not in card
    for command in (("plan", config), ("status", config.output), ("report", config.output)):
        works(*command)
    for command in (("data", config), ("eval", config.output, latents), ("generate", config.output, "a dog")):
        assert_rejected(ratel(*command), 2, "language model")


@pytest.mark.parametrize("kill_at", thinned(["commit.written:3", "commit.published:3"], every=2))
def test_after_a_kill_it_has_the_bits_of_an_undisturbed_run(
    make_config: MakeConfig, denoiser: Path, latents: Path, kill_at: str
) -> None:
    keys = {**KEYS, **_datasets(latents)}
    undisturbed, killed = (make_config(name, base=denoiser, **keys) for name in ("undisturbed", "killed"))
    undisturbed.succeed()
    killed.run_until_killed(kill_at=kill_at)
    killed.succeed()
    assert undisturbed.curve == killed.curve
    found, wanted = exported_denoiser(killed.output), exported_denoiser(undisturbed.output)
    assert all(torch.equal(values, found[name]) for name, values in wanted.items())


def test_weights_may_be_drawn(make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path) -> None:
    """From a configuration alone; what the module's own parts draw has their size."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(denoiser / "config.json", bare)
    config = make_config(base=bare, **{**KEYS, "random_init": True, "learning_rate": 0.0}, **_datasets(latents))
    config.succeed()
    found = exported_denoiser(config.output)
    before = load_file(denoiser / "diffusion_pytorch_model.safetensors")
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in before.items()}
    for name, values in found.items():
        assert float(values.float().std()) == pytest.approx(float(before[name].std()), rel=0.5), name


def test_a_scheduler_beside_the_model_adds_the_noise(make_config: MakeConfig, latents: Path, tmp_path: Path) -> None:
    """One that asks for velocities, of the pipeline that the model belongs to; the export has it, too."""
    base = save_denoiser(tmp_path / "pipeline" / "transformer", out_channels=4)
    scheduler: Any = DDPMScheduler(num_train_timesteps=50, prediction_type="v_prediction")  # type: ignore[no-untyped-call]
    scheduler.save_pretrained(tmp_path / "pipeline" / "scheduler")
    config = make_config(base=base, **KEYS, **_datasets(latents))
    data = latents_of(config)
    assert int(max(batch.inputs["timestep"].max() for step in range(5) for batch in data.step(step))) < 50
    config.succeed()
    before = load_file(base / "diffusion_pytorch_model.safetensors")
    steps = [data.step(number) for number in range(5)]
    wanted = denoised_by_pytorch(base, before, steps, config.recipe)
    dtype = DTYPES[load_config(config).config.dtype]
    for name, values in exported_denoiser(config.output).items():
        assert torch.equal(values, wanted.weights[name].to(dtype)), name
    saved = json.loads((config.output / "scheduler_config.json").read_text())
    assert (saved["num_train_timesteps"], saved["prediction_type"]) == (50, "v_prediction")


def _made_by_diffusers(
    directory: Path, *, classes: list[int], num_steps: int, guidance: float = 1.0, seed: int = 42
) -> torch.Tensor:
    """Latents of these classes, by the model in a directory."""
    model: Any = DiTTransformer2DModel.from_pretrained(directory, torch_dtype=torch.float32)
    model.eval()
    scheduler: Any = DDPMScheduler()  # type: ignore[no-untyped-call]
    scheduler.set_timesteps(num_steps)
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn((len(classes), *SHAPE), generator=generator)
    labels = torch.tensor([*classes, *[NUM_CLASSES] * len(classes)] if guidance != 1 else classes)
    for timestep in scheduler.timesteps:
        given = made.repeat(len(labels) // len(classes), 1, 1, 1)
        with torch.no_grad():
            found = model(given, timestep=timestep.expand(len(given)), class_labels=labels).sample[:, : SHAPE[0]]
        if guidance != 1:
            wanted, without = found.chunk(2)
            found = without + guidance * (wanted - without)
        made = scheduler.step(found, timestep, made, generator=generator).prev_sample
    return made


@pytest.mark.parametrize("guidance", thinned([1.0, 3.0], every=2, offset=1))
def test_images_are_what_diffusers_makes_of_the_export(
    make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path, guidance: float
) -> None:
    """Latents bit for bit, of several classes, and pictures of their first three channels."""
    config = make_config(base=denoiser, **KEYS, **_datasets(latents))
    config.succeed()
    options = ("--class", 4, "--class", 0, "--denoising-steps", 6, "--guidance", guidance)
    works("generate", config.output, *options, "-o", tmp_path / "images")
    wanted = _made_by_diffusers(config.output, classes=[4, 0], num_steps=6, guidance=guidance)
    found = load_file(tmp_path / "images" / "latents.safetensors")
    assert torch.equal(found["latents"], wanted) and found["labels"].tolist() == [4, 0]
    with Image.open(tmp_path / "images" / "class-0-1.png") as image:
        shown = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(shown, ((wanted[1, :3].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8))
    again = ratel("generate", config.output, *options, "-o", tmp_path / "images")
    assert_rejected(again, 2, "class-4-0.png: the file exists")


def _images(path: Path, output: Path, *options: object) -> dict[str, torch.Tensor]:
    """The latents that are made, and their labels."""
    works("generate", path, "--class", 4, "--class", 0, "--denoising-steps", 3, *options, "-o", output)
    return load_file(output / "latents.safetensors")


@pytest.mark.parametrize("dtype", sample(["float32", "bfloat16"], every=2, offset=1))
def test_images_of_a_directory_are_those_of_the_run(
    make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path, dtype: str
) -> None:
    """Of an export in the data type of its files, and of the run's export once its store is gone."""
    config = make_config(base=denoiser, **{**KEYS, "dtype": dtype}, **_datasets(latents))
    config.succeed()
    of_run = _images(config.output, tmp_path / "run", "--guidance", 2)
    works("export", config.output, "-o", tmp_path / "exported")
    assert torch.equal(
        _images(tmp_path / "exported", tmp_path / "export", "--guidance", 2)["latents"], of_run["latents"]
    )
    shutil.rmtree(load_config(config).config.storage.paths[0])
    ended = works("generate", config, "--class", 4, "--class", 0, "--denoising-steps", 3, "--guidance", 2,
                  "-o", tmp_path / "again")  # fmt: skip
    assert "using the exported model in" in ended.stderr
    assert torch.equal(load_file(tmp_path / "again" / "latents.safetensors")["latents"], of_run["latents"])


def test_images_of_a_base_model_are_what_diffusers_makes(denoiser: Path, tmp_path: Path) -> None:
    found = _images(denoiser, tmp_path / "images")["latents"]
    assert torch.equal(found, _made_by_diffusers(denoiser, classes=[4, 0], num_steps=3))
    other_seed = _images(denoiser, tmp_path / "other", "seed=7")["latents"]
    assert torch.equal(other_seed, _made_by_diffusers(denoiser, classes=[4, 0], num_steps=3, seed=7))
    assert not torch.equal(_images(denoiser, tmp_path / "bf16", "dtype=bfloat16")["latents"], found)


@pytest.mark.parametrize("guidance", sample([1.0, 2.0], every=2, offset=1))
def test_images_in_batches_are_those_of_one_batch(
    denoiser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guidance: float
) -> None:
    """Where memory is only enough for one or two. What is drawn belongs to the image's place among all."""
    classes = [each for number in (4, 0, 1, 1, 2) for each in ("--class", number)]
    found = []
    for size in (5, 1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(generate_images, "largest_batch", lambda most, fit, size=size: (size, fit(size)))
            output = tmp_path / str(size)
            ended = ratel("generate", denoiser, *classes, "--denoising-steps", 3, "--guidance", guidance, "-o", output)
        assert ended.code == 0, ended.stderr
        found.append(load_file(output / "latents.safetensors")["latents"])
    assert all(torch.allclose(each, found[0], rtol=1e-4, atol=1e-5) for each in found[1:])


def test_images_that_do_not_fit(denoiser: Path, tmp_path: Path) -> None:
    """It is known before anything is made or written. So is a number of steps that no scheduler has."""
    options = ("--class", 4, "--denoising-steps", 2, "-o", tmp_path / "images")
    for more, words in (((), ""), (("--guidance", 2), ", or leave out --guidance")):
        ended = ratel("generate", denoiser, *options, *more, "limits.host_memory=300MiB")
        assert_rejected(ended, 3, "RAM: denoising 1 image needs", "short by")
        assert f"hint: raise limits.host_memory{words}\n" in ended.stderr
    assert not (tmp_path / "images").exists()
    ended = ratel("generate", denoiser, *options, "--denoising-steps", 1001)
    assert_rejected(ended, 2, "--denoising-steps 1001: the model's scheduler has 1000 timesteps")
    works("generate", denoiser, *options, "limits.host_memory=20GiB")


def test_a_diffusion_transformer_is_no_language_model(denoiser: Path, tmp_path: Path) -> None:
    """And what else it is, is said."""
    part = f"{denoiser} has no language model: its config.json is that of a DiTTransformer2DModel of diffusers"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    for command in (
        ("generate", denoiser, "a dog"), ("eval", denoiser, tmp_path / "rows.jsonl"),
        ("init", denoiser, "-o", tmp_path / "run.yaml"),
    ):  # fmt: skip
        ended = ratel(*command)
        assert_rejected(ended, 2, part)
        assert f"`ratel generate {denoiser} --class N -o IMAGES` shows what it makes" in ended.stderr
    other = Path(shutil.copytree(denoiser, tmp_path / "unet"))
    _change(other, _class_name="UNet2DModel")
    assert_rejected(ratel("generate", other, "a dog"), 2, "that of a UNet2DModel of diffusers")


def test_what_makes_no_images_is_rejected(
    make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path
) -> None:
    config, text = make_config("latents", base=denoiser, **KEYS, **_datasets(latents)), make_config("text", max_steps=1)
    for run in (config, text):
        run.succeed()
    images = ("-o", tmp_path / "images")
    bare, pipeline = tmp_path / "bare", tmp_path / "pipeline"
    for each, name in ((bare, "config.json"), (pipeline, "model_index.json")):
        each.mkdir()
        shutil.copy(denoiser / "config.json", each / name)
    for path, arguments, part in (
        (config.output, ("--class", 5, *images), "--class 5: the model's classes are 0 to 4"),
        (config.output, ("--class", -1, *images), "--class -1"),
        (config.output, ("--class", 1), "--class needs -o DIR"),
        (config.output, ("a dog", "--class", 1, *images), "a model makes texts or images"),
        (text.output, ("--class", 1, *images), "LlamaForCausalLM makes no images"),
        (config.output, ("--class", 1, *images, "--json"), "option '--json' is for texts"),
        (config.output, ("--class", 1, *images, "--temperature", 0.5), "option '--temperature' is for texts"),
        (text.output, ("a dog", *images), "option '-o' is for images"),
        (text.output, ("a dog", "--guidance", 2), "option '--guidance' is for images"),
        (tmp_path / "missing", ("--class", 1, *images), "missing"),
        (denoiser, ("--class", 1, *images, "--step", 1), "has no saved steps"),
        (denoiser, ("--class", 5, *images), "--class 5: the model's classes are 0 to 4"),
        (load_config(text).config.base_model, ("--class", 1, *images), "makes no images: it has no model of diffusers"),
        (bare, ("--class", 1, *images), "no weights"),
        (pipeline, ("--class", 1, *images), "a diffusion pipeline, which has several models"),
    ):
        assert_rejected(ratel("generate", path, *arguments), 2, part)
    assert not (tmp_path / "images").exists()


def _change(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"_class_name": "UNet2DModel"}, ("UNet2DModel of diffusers", "train a DiTTransformer2DModel")),
        ({"_class_name": None}, ("no model of diffusers",)),
        ({"patch_size": 3}, ("sample_size 8 is no multiple of patch_size 3",)),
        ({"in_channels": 0}, ("in_channels is 0",)),
        ({"num_layers": 4}, ("tensor transformer_blocks.3.", "is missing")),
        ({"num_layers": 2}, ("tensor transformer_blocks.2.", "does not belong to the model")),
        ({"attention_head_dim": 8}, ("is [", "but the config's model has")),
        ({"norm_type": "layer_norm"}, ("diffusers cannot build",)),
    ],
)
def test_a_model_that_cannot_be_used_is_rejected(
    make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path, changes: dict[str, object], parts: list[str]
) -> None:
    base = Path(shutil.copytree(denoiser, tmp_path / "changed"))
    _change(base, **changes)
    ended = make_config(base=base, **KEYS, **_datasets(latents)).finetune()
    assert_rejected(ended, 2, *parts)


def test_a_pipeline_is_not_its_transformer(
    make_config: MakeConfig, denoiser: Path, latents: Path, tmp_path: Path
) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    ended = make_config(base=tmp_path / "pipeline", **KEYS, **_datasets(latents)).finetune()
    assert_rejected(ended, 2, "a diffusion pipeline; only its transformer can be trained")
    assert "transformer" in ended.stderr.split("hint:")[1]


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"latents": torch.zeros(3, *SHAPE)}, "no tensor labels"),
        ({"latents": torch.zeros(3, 4, 4, 4), "labels": torch.zeros(3).long()}, "the model's are [samples, 4, 8, 8]"),
        ({"latents": torch.zeros(3, *SHAPE), "labels": torch.zeros(2).long()}, "one a latent"),
        ({"latents": torch.zeros(3, *SHAPE), "labels": torch.zeros(3)}, "one a latent"),
        ({"latents": torch.zeros(3, *SHAPE), "labels": torch.tensor([0, 5, 1])}, "label 5, but the"),
        ({"latents": torch.zeros(0, *SHAPE), "labels": torch.zeros(0).long()}, "the datasets have no latents"),
        (None, "not a safetensors file"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_rejected(
    make_config: MakeConfig, denoiser: Path, tmp_path: Path, tensors: dict[str, torch.Tensor] | None, part: str
) -> None:
    path = tmp_path / "wrong.safetensors"
    if tensors is None:
        path.write_bytes(b"{}")
    else:
        save_file(tensors, path)
    assert_rejected(make_config(base=denoiser, **KEYS, **_datasets(path)).finetune(), 2, part)


def test_files_that_are_missing_are_named(make_config: MakeConfig, denoiser: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing.safetensors", tmp_path / "empty"):
        config = make_config(path.stem, base=denoiser, **KEYS, **_datasets(path))
        assert_rejected(config.finetune(), 2, "no safetensors or parquet file")
