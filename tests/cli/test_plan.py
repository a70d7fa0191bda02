"""`ratel plan`: what it says, with which exit code, how fast; and all that may be wrong with what it is given."""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.commands import install_extras
from ratel_cli.config.load import load_config, to_yaml
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import processor_name
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.files import device_of
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.run.files.hardware_file import load_hardware, to_text
from ratel_cli.run.files.profile_cache import cache_file, profile_target
from ratel_cli.run.files.run_directory import CachedProfile, stores_on_machine
from ratel_cli.run.inputs.filling import note_filling
from ratel_cli.run.inputs.model_description import describe_model
from ratel_cli.run.train import first_checks
from ratel_cli.sizes import Filling
from ratel_cli.training.facts import RunFacts
from ratel_cli.units import GIB
from tests.hardware.machines import Machine
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER_MACHINE = str(CONFIGS / "hardware" / "paper-4090-12ssd.yaml")
PAPER_13B = [str(CONFIGS / "models" / "gpt-13b.yaml"), "--hardware", PAPER_MACHINE, "cost_model=paper"]
WIDE = """
model_shape: {num_layers: 8, num_heads: 64, hidden_size: 8192}
sequence_len: 1024
micro_batch_size: 16
gradient_accumulation_steps: 4
max_grad_norm: null
limits: {host_memory: 48GiB, gpu_memory: 30GiB}
"""
"""Layers as wide as those of a 70B, with less memory than their activations take."""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    code: int
    out: str
    err: str

    def row(self, name: str) -> str:
        """What stands after this name in the table."""
        [found] = [line for line in self.out.splitlines() if line.split("  ")[0] == name]
        return found[len(name) :].strip()


Ask = Callable[..., PlanOutput]
LAPTOP = replace(WITHOUT_GPU, host=replace(WITHOUT_GPU.host, memory_bytes=16 * GIB))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def plan(*arguments: object) -> PlanOutput:
        code = main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return PlanOutput(code=code, out=captured.out, err=captured.err)

    return plan


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a cache of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def config(here: Path) -> Path:
    """Of a small Llama of which there is nothing but its config.json."""
    (here / "base").mkdir()
    (here / "base" / "config.json").write_text(json.dumps(LLAMA))
    path = here / "run.yaml"
    path.write_text("base_model: base\ndatasets: none.jsonl\nsequence_len: 128\n")
    return path


@pytest.fixture
def machine(here: Path) -> Path:
    """The hardware file of a machine without a GPU."""
    return hardware_file(here / "machine.json", LAPTOP)


def hardware_file(path: Path, hardware: HardwareProfile) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_text(hardware))
    return path


def test_the_paper_s_13b(ask: Ask) -> None:
    result = ask(*PAPER_13B, "micro_batch_size=32", "max_steps=100")
    assert (result.code, result.err) == (0, "")
    assert result.row("model") == "gpt-13b: 13.0B parameters in 40 blocks, computing in bfloat16"
    assert result.row("step") == "1 micro-batch of 32 x 1024 = 32768 tokens"
    assert result.row("machine").startswith(
        "NVIDIA GeForce RTX 4090, 164 TFLOP/s; 12 drives, 32.7 GB/s read, 24.5 GB/s"
    )
    assert result.row("estimate").startswith("analytic, by the paper's equations")
    assert result.row("GPU") == "needs 7.66 GiB, 24.0 GiB available"
    assert result.row("fits") == "yes"
    assert result.row("forward") == "5.30 s: compute 5.30 s, NVMe 2.10 s, download 1.41 s, upload 1.15 s"
    assert result.row("backward") == "14.0 s: NVMe 14.0 s, compute 14.0 s, upload 2.56 s, download 1.15 s"
    assert result.row("predicted").startswith(
        "19.3 s per step, mostly compute; 1701 tokens/s; 135 TFLOP/s of the model"
    )
    assert result.row("run") == "100 steps: 32 min 07 s, 21.4 TB written"
    assert result.row("offloaded").startswith("29.7 GiB of 212 GiB activations, 29.7 GiB of it on NVMe; 12.5 GiB are")
    assert result.row("offloaded").endswith("(case 3)")
    assert "  fc2       40 layers   12.5 GiB   275 TFLOP  20480 FLOP/B\n" in result.out
    assert "GiB offloaded; X: 29.7 GiB, as planned" in result.out
    assert "+17%  1983 tokens/s  micro_batch_size: 64 (twice the tokens per step: the result differs)\n" in result.out


@pytest.mark.parametrize("cost_model", [pytest.param("ratel", marks=pytest.mark.nightly), "paper"])
def test_the_plan_splits_the_step(ask: Ask, cost_model: str) -> None:
    """As fast as the best of the splits written out, whose advice names it."""
    arguments = [*PAPER_13B, f"cost_model={cost_model}", "limits.host_memory=512GiB"]
    if cost_model == "ratel":  # on a card on which 32 rows at once leave no memory to swap
        arguments.append("limits.gpu_memory=10GiB")
    found = json.loads(ask(*arguments, "tokens_per_step=32768", "--json").out)
    workload = found["workload"]
    size, number = workload["micro_batch_size"], workload["num_micro_batches"]
    assert (size * number, workload["sequence_len"], workload["is_split_planned"]) == (32, 1024, True)
    by_hand = {}
    for rows in (1, 2, 4, 8, 16, 32):
        each = ask(*arguments, "--json", f"micro_batch_size={rows}", f"gradient_accumulation_steps={32 // rows}")
        by_hand[rows] = json.loads(each.out)
        assert by_hand[rows]["workload"]["is_split_planned"] is False
    fitting = [each["throughput"]["tokens_per_second"] for each in by_hand.values() if each["memory"]["fits"]]
    assert found["throughput"] == by_hand[size]["throughput"]
    assert found["throughput"]["tokens_per_second"] >= 0.99 * max(fitting)
    table = ask(*arguments, "tokens_per_step=32768")
    micro_batches = f"{number} micro-batch{'es' if number > 1 else ''}"
    assert table.row("step") == f"{micro_batches} of {size} x 1024 = 32768 tokens, split by the plan"
    assert all("micro_batch_size" not in advice["change"] for advice in found["advice"])
    if cost_model == "ratel":
        key = f"micro_batch_size: {size}, gradient_accumulation_steps: {number} (the same tokens per step)"
        assert key in [advice["change"] for advice in by_hand[32]["advice"]]


@pytest.mark.full
def test_no_split_fits(ask: Ask) -> None:
    result = ask(*PAPER_13B, "cost_model=ratel", "tokens_per_step=8192", "limits.gpu_memory=1GiB")
    assert result.code == 3
    assert "raise limits.gpu_memory, or lower tokens_per_step or sequence_len" in result.row("GPU")
    assert "micro_batch_size" not in result.out + result.err


@pytest.mark.full
def test_a_llama_of_which_there_is_only_its_config(ask: Ask, config: Path, machine: Path) -> None:
    result = ask(config, "--hardware", machine, "max_steps=10", "gradient_accumulation_steps=2")
    assert (result.code, result.err) == (0, "")
    assert result.row("model").startswith("base: 3.41M parameters in 6 blocks")
    assert result.row("step") == "2 micro-batches of 1 x 128 = 256 tokens"
    assert result.row("estimate").startswith("analytic, from shapes alone")
    assert "GPU" not in result.out, "a CPU computes, and no limit was set"
    assert result.row("fits") == "yes"
    assert result.row("run").startswith("10 steps: ")
    assert ask(config, "--hardware", machine, "limits.gpu_memory=1GiB").row("GPU").endswith("1.00 GiB available")


def test_the_resource_that_bounds_a_step_is_named(ask: Ask) -> None:
    result = ask(*PAPER_13B, "micro_batch_size=1")
    assert " per step, mostly NVMe; " in result.row("predicted")
    assert re.fullmatch(r".* s: upload .* s, NVMe .* s, compute .* s, download .* ms", result.row("forward"))


@pytest.mark.full
def test_without_max_steps_the_run_is_not_known(ask: Ask, config: Path, machine: Path) -> None:
    """Without data only max_steps could say it."""
    result = ask(config, "--hardware", machine)
    reads = f"MB written per step; `ratel check {config}` reads the data and predicts the whole run"
    assert result.row("run").endswith(reads)
    shape = ask(*PAPER_13B).row("run")
    assert shape.endswith(" written per step; add max_steps=N to predict the whole run")


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ("learning_rate=1e-5", "41 steps: "),
        ("micro_batch_size=4 gradient_accumulation_steps=1", "41 steps: "),
        ("max_steps=7", "7 steps: "),
        ("num_epochs=2", None),
        ("micro_batch_size=4", None),
        ("sequence_len=64", None),
        ("datasets.0.max_samples=3", None),
        ("seed=3", None),
        ("attn_implementation=eager", None),
    ],
)
def test_the_steps_that_a_run_has_counted(
    ask: Ask, config: Path, machine: Path, change: str, steps: str | None
) -> None:
    """They hold for the data and the batch that the run counted them with, however the batch is split."""
    run_dir = config.parent / "out" / "run"
    run_dir.mkdir(parents=True)
    config.write_text(config.read_text() + "output_dir: out\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\n")
    (run_dir / "config.yaml").write_text(to_yaml(load_config(config).config))
    facts = RunFacts(num_steps=41, first_step=0, num_samples=9, num_tokens=9, software="", started="", pid=1)
    (run_dir / "run.json").write_text(json.dumps(facts.to_json()))
    row = ask(config, "--hardware", machine, *change.split()).row("run")
    reads = f"`ratel check {config} {change}` reads the data and predicts the whole run"
    assert row.startswith(steps) if steps else row.endswith(reads)


def test_what_the_reference_model_takes_before_the_first_step(ask: Ask, config: Path, machine: Path) -> None:
    """A forward for the answers of each step, where the loss compares the model with what it was."""
    arguments = (config, "--hardware", machine, "max_steps=7")
    words = ask(*arguments, "rl=dpo").row("reference")
    assert words.startswith("log-probabilities of 7 steps, computed before step 1: ")
    time = json.loads(ask(*arguments, "rl=dpo", "--json").out)["time"]
    assert time["reference_seconds"] == pytest.approx(7 * time["forward_seconds"])
    for other in (("rl=simpo",), ()):
        assert json.loads(ask(*arguments, *other, "--json").out)["time"]["reference_seconds"] is None
        assert "\nreference " not in ask(*arguments, *other).out
    unknown = ask(config, "--hardware", machine, "rl=dpo")
    assert "\nreference " not in unknown.out


@pytest.mark.full
def test_the_drives_rating_is_taken_into_account(ask: Ask, config: Path, here: Path) -> None:
    result = ask(config, "--hardware", hardware_file(here / "rated.json", WITH_GPU), "max_steps=100000")
    share = r"[0-9.]+ % of the drives' rated endurance, which lasts for .* of such steps$"
    assert re.search(share, result.row("run"))
    of_config = ask(config, "--hardware", here / "rated.json", "max_steps=100000", "storage.endurance_tb=1")
    assert of_config.row("run") != result.row("run")
    assert re.search(share, of_config.row("run"))


@pytest.mark.nightly
def test_what_the_rule_for_wear_holds_back_is_told_and_advised(ask: Ask, here: Path) -> None:
    """On a slow GPU, so that to spill much gains something, but not half as much, in percent, as it writes."""
    (here / "wide.yaml").write_text(WIDE)
    paper = load_hardware(CONFIGS / "hardware" / "paper-4090-2ssd.yaml")
    slow = replace(paper, gpu=replace(paper.gpu, flops_per_second=1e13))
    arguments = (here / "wide.yaml", "--hardware", hardware_file(here / "slow.json", slow))
    save, balanced, ignore = (ask(*arguments, f"storage.wear={rule}") for rule in ("save", "balanced", "ignore"))
    assert re.search("writes .* % more per step than with storage.wear: save, and is .* % faster", ignore.row("wear"))
    assert "storage.wear: ignore" not in ignore.out
    for result in (save, balanced):
        assert re.search("storage.wear: ignore would write .* % more per step, and be .* % faster", result.row("wear"))
        assert "storage.wear: ignore (more is written)" in result.out
    trade = json.loads(ask(*arguments, "--json").out)["wear"]["trade"]
    assert trade["policy"] == "balanced"
    assert trade["save"]["tb_written_per_step"] == trade["state_tb_per_step"]
    assert trade["ignore"]["tb_written_per_step"] > trade["state_tb_per_step"]


def test_what_does_not_fit_is_told_whole_and_ends_with_3(ask: Ask, config: Path, here: Path) -> None:
    short = replace(WITH_GPU, nvme=replace(WITH_GPU.nvme, free_bytes=1 << 20))
    result = ask(
        config,
        "--hardware",
        hardware_file(here / "a.json", short),
        "limits.host_memory=10MiB",
        "limits.gpu_memory=1MiB",
    )
    assert result.code == 3
    for tier, key in (("GPU", "limits.gpu_memory"), ("RAM", "limits.host_memory"), ("NVMe", "storage.paths")):
        assert " available (short by " in result.row(tier)
        assert key in result.row(tier)
    assert result.row("fits") == "no: not enough GPU, RAM, NVMe; the prediction is for a machine with enough"
    assert "tokens/s" in result.row("predicted")
    assert "what would help" not in result.out
    assert result.err.startswith("error: the run does not fit: GPU is short by ")
    assert "hint: raise limits.gpu_memory" in result.err


@pytest.mark.full
def test_an_adapter_is_advised_with_what_its_own_plan_has(ask: Ask, config: Path, here: Path) -> None:
    arguments = (config, "--hardware", PAPER_MACHINE, "--json", "lora_r=8")
    whole, adapted = (json.loads(ask(*arguments, *more).out) for more in ((), ("adapter=lora",)))
    [advice] = [each for each in whole["advice"] if each["change"].startswith("adapter: lora")]
    written = [each["traffic"]["nvme_written_bytes"] for each in (whole, adapted)]
    rates = [each["throughput"]["tokens_per_second"] for each in (whole, adapted)]
    assert advice["times_less_written"] == written[0] / written[1] > 5
    assert advice["tokens_per_second"] == pytest.approx(rates[1])
    assert advice["gain"] == pytest.approx(rates[1] / rates[0] - 1)
    assert advice["change"].startswith(f"adapter: lora (LoRA r=8: {written[0] / written[1]:.0f} x less written")
    assert all(each["times_less_written"] is None for each in whole["advice"] if each is not advice)
    assert not [each for each in adapted["advice"] if each["change"].startswith("adapter")]
    assert "x less written" in ask(*arguments[:3]).out.partition("what would help")[2]


def test_an_adapter_is_what_would_fit(ask: Ask, config: Path, here: Path) -> None:
    nvme = replace(LAPTOP.nvme, free_bytes=20 << 20)
    result = ask(config, "--hardware", hardware_file(here / "a.json", replace(LAPTOP, nvme=nvme)))
    assert result.code == 3 and result.row("fits").startswith("no: not enough NVMe")
    assert re.search(
        r"\n  +\d+ tokens/s  adapter: lora \(LoRA r=16: [0-9.]+ x less written; the result differs", result.out
    )
    assert "hint: set adapter: lora (LoRA r=16" in result.err
    shutil.rmtree(here / "base")
    (here / "base").mkdir()
    (here / "base" / "config.json").write_text(json.dumps(LLAMA))
    assert ask(config, "adapter=lora", "learning_rate=1e-4", "--hardware", here / "a.json").code == 0


@pytest.mark.parametrize("key", ["frozen_parameters=[lm_head]", "random_init=true"])
def test_no_adapter_is_advised_where_there_can_be_none(ask: Ask, config: Path, machine: Path, key: str) -> None:
    assert "adapter: lora" not in ask(config, "--hardware", machine, key).out


def test_a_model_that_can_have_no_adapter_is_looked_at_once(
    ask: Ask, config: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def reject(*arguments: object, **_options: object) -> None:
        asked.append(arguments)
        raise BadInput("it can have none")

    monkeypatch.setattr("ratel_cli.run.inputs.adapted_base.adapt", reject)
    for _ in range(2):
        result = ask(config, "--hardware", machine)
        assert result.code == 0 and "adapter" not in result.out
    assert len(asked) == 1
    assert "it can have none" in ask(config, "--hardware", machine, "adapter=lora").err


@pytest.mark.full
def test_the_learning_rate_of_an_adapter_for_all_weights_of_a_large_model(
    ask: Ask, config: Path, machine: Path, here: Path
) -> None:
    warning = "`learning_rate` is 0.0001, which suits an adapter; "
    assert warning not in ask(config, "--hardware", machine, "learning_rate=1e-4").err, "it is small"
    (here / "base" / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 4096, "intermediate_size": 16384}))
    found = ask(config, "--hardware", PAPER_MACHINE, "learning_rate=1e-4").err
    assert f"warning: {warning}1" in found and "B parameters are usually trained at 5e-6 to 5e-5" in found
    for other in ("learning_rate=9e-5", "learning_rate=1e-4 adapter=lora", "learning_rate=1e-4 random_init=true"):
        assert "suits an adapter" not in ask(config, "--hardware", PAPER_MACHINE, *other.split()).err


def test_json_has_the_contract_s_keys_and_plain_numbers(ask: Ask) -> None:
    result = ask(*PAPER_13B, "--json", "micro_batch_size=32", "max_steps=2")
    content = json.loads(result.out, parse_constant=pytest.fail)
    assert result.code == 0
    wanted = {
        "model": "name num_parameters num_blocks flops_forward",
        "hardware": "gpu link nvme host",
        "activations": "total_bytes inter_block_bytes swapped_bytes swapped_to_nvme_bytes swap_set recompute_flops",
        "time": "forward backward forward_seconds backward_seconds step_seconds bottleneck case",
        "traffic": "nvme_read_bytes nvme_written_bytes",
        "memory": "gpu_bytes host_bytes nvme_bytes fits shortfall_bytes",
        "throughput": "tokens_per_second tflops_model tflops_hardware",
        "wear": "tb_written_per_step tb_written_per_run",
    }
    for section, keys in wanted.items():
        assert set(keys.split()) <= content[section].keys(), section
    assert set(content["time"]["forward"]) >= {"compute", "up", "down", "nvme"}
    assert set(content["time"]["backward"]) >= {"compute", "up", "down", "nvme", "optimizer"}
    assert set(content["activations"]["swap_set"][0]) >= {"operator", "blocks", "bytes", "flops", "benefit"}
    assert set(content["curve"][0]) == {"swapped_bytes", "step_seconds"}
    assert content["cost_model"] == "paper"
    assert content["wear"]["tb_written_per_run"] == 2 * content["wear"]["tb_written_per_step"]
    assert content["advice"][0]["change"] == "micro_batch_size: 64 (twice the tokens per step: the result differs)"


def test_json_of_what_does_not_fit(ask: Ask, config: Path, machine: Path) -> None:
    result = ask(config, "--hardware", machine, "--json", "limits.host_memory=100MiB")
    memory = json.loads(result.out)["memory"]
    assert result.code == 3
    assert memory["fits"] is False
    assert memory["shortfall_bytes"] == memory["host_bytes"] - (100 << 20) > 0


@pytest.mark.full
def test_a_recorded_profile_of_the_run_is_used(ask: Ask, config: Path, machine: Path) -> None:
    keep_profile(config, WITHOUT_GPU)
    result = ask(config, "--hardware", machine)
    assert result.row("estimate") == "from a recorded step of this model on this machine"
    assert " s/GiB\n" in result.out, "measured times, and what a byte saves of them"
    assert " against MiB offloaded; X: " in result.out
    assert ask(config, "--hardware", machine, "sequence_len=64").row("estimate").startswith("analytic")


def keep_profile(config: Path, hardware: HardwareProfile) -> None:
    """As a run would that recorded its first step on this machine."""
    loaded = load_config(config).config
    model = describe_model(loaded, name="", log=RunLog())
    workload = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=128)
    estimate = analytic_profile(model.spec, workload, traits=model.traits)
    profile: ModelProfile = replace(
        estimate,
        source="recorded",
        profiles=tuple(
            replace(
                layer,
                forward_seconds=0.1,
                recomputed_seconds=0.1,
                backward_seconds=0.2,
                candidates=tuple(replace(each, seconds=0.1 / len(layer.candidates)) for each in layer.candidates),
            )
            for layer in estimate.profiles
        ),
        embedding_seconds=0.0,
        head_seconds=0.1,
    )
    kept = CachedProfile(loaded, model.spec, hardware)
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text(json.dumps(kept.content(model.spec, profile)))


@pytest.mark.full
def test_this_machine_as_its_run_or_its_profile_measured_it(ask: Ask, config: Path, here: Path) -> None:
    result = ask(config)
    assert result.code == 0 and result.row("machine").startswith(processor_name())
    assert f"this machine is measured briefly; `ratel profile {config}`" in result.err
    assert not cache_file(profile_target(load_config(config).config)).exists(), "a brief profile is not kept"
    hardware_file(cache_file(profile_target(load_config(config).config)), WITHOUT_GPU)
    result = ask(config)
    assert result.row("machine").startswith("a CPU, 500 GFLOP/s; 1 drive")
    assert "machine measured" in result.err
    hardware_file(here / "outputs" / "run" / "run" / "hardware.json", WITH_GPU)
    result = ask(config)
    assert result.row("machine").startswith("a GPU, 164 TFLOP/s; 2 drives")
    assert "planning for this machine, as the run in outputs/run measured it" in result.err


def test_space_that_the_run_s_store_takes_counts_as_there(ask: Ask, config: Path, here: Path) -> None:
    hardware_file(cache_file(profile_target(load_config(config).config)), WITHOUT_GPU)
    store = here / "outputs" / "run.store" / "ratel.store"
    before = json.loads(ask(config, "--json").out)["hardware"]["nvme"]["free_bytes"]
    store.parent.mkdir(parents=True)
    with store.open("wb") as file:
        file.truncate(1 << 40)
    after = json.loads(ask(config, "--json").out)["hardware"]["nvme"]["free_bytes"]
    assert after - before == pytest.approx(1 << 40, rel=1e-3)


def test_ranks_share_drives_that_are_the_same(ask: Ask, config: Path, here: Path) -> None:
    """Whatever the directories are called; what is stored there already is theirs."""
    paths = "storage.paths=['disk{rank}']"
    hardware_file(cache_file(profile_target(load_config(config, ["storage.paths=[disk0]"]).config)), WITHOUT_GPU)

    def available_bytes() -> int:
        result = ask(config, paths, "--ranks", "2", "--json")
        [nvme] = [tier for tier in json.loads(result.out)["memory"]["tiers"] if tier["name"] == "NVMe"]
        return int(nvme["have_bytes"])

    whole = json.loads(ask(config, "storage.paths=[disk0]", "--json").out)["hardware"]["nvme"]["free_bytes"]
    before = available_bytes()
    assert before == pytest.approx(whole / 2, rel=0.05)
    for store in stores_on_machine(config, [paths], 2):
        store[0].mkdir(parents=True)
        with (store[0] / "ratel.store").open("wb") as file:
            file.truncate(1 << 40)
    assert available_bytes() - before == pytest.approx(1 << 40, rel=0.01)
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        if device_of(other) == device_of(here):
            pytest.skip("there is one file system")
        shutil.rmtree(here / "disk1")
        (here / "disk1").symlink_to(other)
        assert available_bytes() == pytest.approx(whole + (1 << 40), rel=0.01)
    finally:
        shutil.rmtree(other)


def test_pictures(ask: Ask, config: Path, machine: Path, here: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("curve.svg", b"<?xml"), ("curve.png", b"\x89PNG")):
        result = ask(config, "--hardware", machine, "--plot", here / name)
        assert (result.code, result.err) == (0, f"wrote {here / name}\n")
        assert (here / name).read_bytes().startswith(start)


@pytest.mark.full
def test_a_picture_replaces_a_file_only_if_the_user_insists(ask: Ask, config: Path, machine: Path, here: Path) -> None:
    pytest.importorskip("matplotlib")
    (here / "mine.svg").write_text("mine")
    (here / "nowhere.svg").symlink_to(here / "none.svg")
    for name in ("mine.svg", "nowhere.svg"):
        result = ask(config, "--hardware", machine, "--plot", here / name)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"error: {here / name}: the file exists\n")
    assert (here / "mine.svg").read_text() == "mine" and not (here / "none.svg").exists()
    assert ask(config, "--hardware", machine, "--plot", here / "mine.svg", "--overwrite").code == 0
    assert (here / "mine.svg").read_text().startswith("<?xml")


@pytest.mark.full
def test_a_picture_that_cannot_be_drawn(
    ask: Ask, config: Path, machine: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ask(config, "--hardware", machine, "--plot", here / "curve.pdf")
    assert (result.code, "must end in .svg or .png" in result.err) == (2, True)
    result = ask(config, "--hardware", machine, "--plot", here / "none" / "curve.svg")
    assert (result.code, "cannot be written there" in result.err) == (2, True)
    (here / "full.svg").symlink_to("/dev/full")
    result = ask(config, "--hardware", machine, "--plot", here / "full.svg", "--overwrite")
    assert (result.code, "full.svg: cannot be written: No space left" in result.err) == (3, True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = ask(config, "--hardware", machine, "--plot", here / "curve.svg")
    assert (result.code, result.out) == (3, "")
    assert f"hint: {install_extras('plot')}\n" in result.err


@pytest.mark.parametrize("cost_model", [pytest.param("ratel", marks=pytest.mark.nightly), "paper"])
def test_other_strategies(ask: Ask, cost_model: str) -> None:
    pytest.importorskip("scipy")
    arguments = [*PAPER_13B, f"cost_model={cost_model}", "limits.host_memory=128GiB", "micro_batch_size=8"]
    result = ask(*arguments, "--compare")
    names = ["ratel", "static", "host-only", "capuchin", "checkmate", "fuyou", "g10", "zero-offload", "memferry"]
    start = result.out.index("other strategies")
    assert [line.split()[0] for line in result.out[start:].splitlines()[2:11]] == names
    assert "the model does not fit into RAM (short by " in result.out
    assert "FlashNeuron, whose states stay on the GPU: 1.61B parameters at most" in result.out
    compared = json.loads(ask(*arguments, "--compare", "--json").out)["compare"]["strategies"]
    assert [each["strategy"] for each in compared if "why_not" in each] == ["zero-offload", "memferry"]
    assert min(each["seconds"] for each in compared if "seconds" in each) == compared[0]["seconds"]


def test_a_plan_for_this_machine_says_that_it_is_slow_in_bf16(
    ask: Ask, config: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another machine it is not known."""
    monkeypatch.setattr(first_checks, "SystemFiles", lambda: Machine(here / "root").files)
    machine = hardware_file(here / "outputs" / "run" / "run" / "hardware.json", LAPTOP)
    words = "note: this processor has no bf16 instructions, so a step in bf16 takes 8 to 47 times"
    assert words in ask(config, "device=cpu", "dtype=bfloat16").err
    assert words not in ask(config, "device=cpu", "dtype=bfloat16", "--hardware", machine).err


def test_rates_say_whether_padding_counts(ask: Ask, config: Path, machine: Path) -> None:
    """Of rows whose lengths are known, the prediction counts the tokens of samples, and the questions full rows."""
    arguments = [config, "--hardware", machine, "--rok"]
    before = ask(*arguments).out
    assert "padding not counted" not in before and "; of full rows" not in before
    note_filling(load_config(config).config, Filling(micro_batches=1.0, computed=0.5, tokens=0.25))
    result = ask(*arguments)
    assert " tokens/s, padding not counted; " in result.row("predicted")
    assert "; of full rows, each of whose tokens counts\n" in result.out


def test_without_scipy_a_strategy_says_what_to_install(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    result = ask(*PAPER_13B, "--compare", "limits.host_memory=128GiB")
    assert f"its solver needs scipy: {install_extras('compare')}" in result.out
    compared = json.loads(ask(*PAPER_13B, "--compare", "--json", "limits.host_memory=128GiB").out)["compare"]
    assert compared["strategies"][4] == {
        "strategy": "checkmate",
        "why_not": f"its solver needs scipy: {install_extras('compare')}",
    }


def test_the_largest_model(ask: Ask, config: Path, machine: Path) -> None:
    result = ask(*PAPER_13B, "--largest")
    assert "of the papers' family, in their layout  276B\n" in result.out
    assert "of this model's width                   3.28T parameters in 10437 layers\n" in result.out
    result = ask(config, "--hardware", machine, "--largest", "--json", "limits.host_memory=100MiB")
    assert json.loads(result.out)["largest"]["depth"] is None
    assert "not even one layer" in ask(config, "--hardware", machine, "--largest", "limits.host_memory=100MiB").out


def test_prices(ask: Ask) -> None:
    result = ask(*PAPER_13B, "--prices", "--json", "micro_batch_size=32")
    prices = json.loads(result.out)["prices"]
    assert [each["num_ssds"] for each in prices] == [1, 2, 3, 6, 12]
    assert prices[-1]["dollars"] == 14_098 + 1_600 + 12 * 308
    assert prices[-1]["tokens_per_second_per_thousand_dollars"] == pytest.approx(1701 / 19.394, rel=1e-3)
    big = [str(CONFIGS / "models" / "gpt-276b.yaml"), *PAPER_13B[1:], "--prices"]
    result = ask(*big, "micro_batch_size=1")
    assert "  1     $16006            does not fit\n" in result.out
    assert {"num_ssds": 1, "dollars": 16006, "fits": False} in json.loads(ask(*big, "--json").out)["prices"]


def test_the_rok_curve(ask: Ask, here: Path) -> None:
    result = ask(*PAPER_13B, "--rok", "micro_batch_size=32", "limits.host_memory=64GiB")
    start = result.out.index("recompute, offload or keep")
    lines = result.out[start:].splitlines()[2:]
    assert (lines[0].split()[:2], lines[-2].split()[:2]) == (["recompute", "all"], ["offload", "all"])
    assert [line.split()[0] for line in lines].count("as") == 1
    assert "does not fit: short by " in lines[-1] and lines[-1].startswith("  keep all in memory")
    points = json.loads(ask(*PAPER_13B, "--rok", "--json").out)["rok"]
    assert [points[0]["strategy"], *(each["strategy"] for each in points[-2:])] == ["recompute", "offload", "keep"]
    assert points[0]["tokens_per_second"] == 1024 * 1 / points[0]["seconds"]
    pytest.importorskip("matplotlib")
    for options in ([], ["--rok"]):
        ask(*PAPER_13B, *options, "--plot", here / f"{len(options)}.svg")
    assert (here / "1.svg").read_bytes().startswith(b"<?xml")
    assert len((here / "1.svg").read_bytes()) != len((here / "0.svg").read_bytes())


@pytest.mark.full
def test_prices_belong_to_the_machine_whose_speed_is_told(ask: Ask, config: Path, machine: Path) -> None:
    """Without prices of that machine there is no answer, rather than the speed of one and the prices of another."""
    result = ask(config, "--hardware", machine, "--prices")
    assert (result.code, result.out) == (2, "")
    assert "error: argument '--prices': the prices of this machine's parts are not known" in result.err
    assert "hint: name a hardware file that has them under `prices`" in result.err
    priced = {**json.loads(machine.read_text()), "prices": {"server_dollars": 5000, "gpu_dollars": 0, "ssd_dollars": 1}}
    machine.write_text(json.dumps(priced))
    result = ask(config, "--hardware", machine, "--prices")
    assert "by the prices of the hardware file" in result.out
    assert "  12    $5012 " in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.yaml", "--hardware", "none.json"], "none.json: no such file"),
        (["run.yaml", "base_model=org/name"], "there is no directory org/name; `ratel plan` downloads nothing"),
        (["run.yaml", "base_model=empty"], "config.json: no such file"),
        (["run.yaml", "base_model=torn"], "config.json: cannot be parsed"),
        (["run.yaml", "base_model=list"], "config.json: must contain an object"),
        (["run.yaml", "base_model=typeless"], "`model_type` is missing"),
        (["run.yaml", "cost_model=paper"], "`cost_model: paper` needs `model_shape`"),
        (["shape.yaml", "cost_model=paper"], "`cost_model: paper` needs a machine with a GPU"),
        (["run.yaml", "learning_rte=1"], "learning_rte"),
        (["none.yaml"], "none.yaml: no such file"),
    ],
)
def test_wrong_input(ask: Ask, config: Path, machine: Path, here: Path, arguments: list[str], message: str) -> None:
    for name, content in (("torn", "{"), ("list", "[]"), ("typeless", "{}"), ("empty", None)):
        (here / name).mkdir()
        if content is not None:
            (here / name / "config.json").write_text(content)
    (here / "shape.yaml").write_text("model_shape: {num_layers: 2, num_heads: 2, hidden_size: 64}\n")
    given = arguments if "--hardware" in arguments else [*arguments, "--hardware", str(machine)]
    result = ask(*given)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_family_that_transformers_does_not_know_is_rejected(
    ask: Ask, config: Path, machine: Path, here: Path
) -> None:
    (here / "base" / "config.json").write_text(json.dumps(LLAMA | {"model_type": "brand_new"}))
    result = ask(config, "--hardware", machine)
    assert (result.code, result.out) == (2, "")
    assert "config.json: not a model configuration that transformers knows" in result.err


@pytest.mark.full
def test_a_model_of_70b_that_was_described_before_is_planned_without_torch(ask: Ask, config: Path, here: Path) -> None:
    """In seconds of the processor's time, which take longer while others use it; with torch it would be minutes."""
    (here / "base" / "config.json").write_text(json.dumps(LLAMA_70B))
    source = (
        "import sys; from ratel_cli.cli.app import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 9 * bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    arguments = [str(config), "--hardware", PAPER_MACHINE, "sequence_len=1024", "limits.host_memory=128GiB"]
    first = ask(*arguments)
    assert first.code == 0, first.err
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", source, "plan", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "base: 70.6B parameters in 82 blocks" in result.stdout
    assert result.stdout == first.out
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30


@pytest.mark.full
def test_a_limit_that_this_machine_does_not_have(ask: Ask, config: Path, machine: Path) -> None:
    """Another machine may have it."""
    warning = "warning: limits.host_memory is 400 TiB, but this machine has "
    assert warning in ask(config, "limits.host_memory=400TiB").err
    assert warning not in ask(config, "limits.host_memory=400TiB", "--hardware", machine).err


def test_characters_that_the_output_cannot_show_are_replaced(
    config: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="ascii"))
    there = config.with_name("\u00e9.yaml")
    config.rename(there)
    assert main(["plan", str(there), "--hardware", str(machine)]) == 0
    sys.stderr.flush()
    sys.stdout.flush()
    shown = raw.getvalue().decode("ascii")
    assert "curve" in shown and "?.yaml'` reads the data" in shown, "all of it is there"


@pytest.mark.full
def test_the_hint_measures_what_was_cached(ask: Ask, config: Path, here: Path) -> None:
    cached = cache_file(profile_target(load_config(config).config))
    hardware_file(cached, LAPTOP)
    assert f"; `ratel profile {config} --refresh` measures again" in ask(config).err
