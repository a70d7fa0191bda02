"""The words of `ratel profile`: rows about a machine, and about a model."""

from __future__ import annotations

from dataclasses import replace

from ratel_cli.planning.profile.placement import Workload
from ratel_cli.report.words.profile import hardware_rows, model_rows, operator_lines
from ratel_cli.units import GIB
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU
from tests.planning.profiles import estimated
from tests.planning.shapes import gpt


def test_a_machine_with_a_gpu_and_two_drives() -> None:
    assert hardware_rows(WITH_GPU, dtype="bfloat16") == [
        ("compute", "a GPU: 164 TFLOP/s in bfloat16"),
        ("GPU memory", "24.0 GiB; 1.01 TB/s read and written"),
        ("link", "22.6 GB/s to the GPU, 24.1 GB/s from it, 38.2 GB/s both at once"),
        ("memory", "128 GiB, 100 GiB of it available; 76.8 GB/s read and written by 16 cores"),
        ("AdamW", "1.25B parameters/s on one thread"),
        (
            "NVMe",
            "6.00 GB/s read  2.00 GB/s written  3.25 GB/s both at once  together: 2 drives, 1.00 TiB free",
        ),
        ("", "1.50 GB/s read  0.50 GB/s written  0.75 GB/s both at once  /mnt/a alone"),
        ("", "6.50 GB/s read  3.40 GB/s written  4.40 GB/s both at once  /mnt/b alone"),
    ]


def test_a_machine_without_a_gpu() -> None:
    assert hardware_rows(WITHOUT_GPU, dtype="float32") == [
        ("compute", "a CPU: 500 GFLOP/s in float32"),
        ("memory", "4.00 TiB, 8.00 GiB of it available"),
        ("AdamW", "500M parameters/s on one thread"),
        ("NVMe", "2.00 GB/s read  1.00 GB/s written  1.50 GB/s both at once  /mnt/a, 1 drive, 64.0 GiB free"),
    ]


def test_a_machine_that_is_only_described() -> None:
    nvme = replace(WITH_GPU.nvme, paths=(), shares=(), alone=(), num_devices=12)
    rows = hardware_rows(replace(WITH_GPU, nvme=nvme), dtype="float16")
    assert rows[-1] == (
        "NVMe",
        "6.00 GB/s read  2.00 GB/s written  3.25 GB/s both at once  12 drives, 1.00 TiB free",
    )


def test_a_gpu_whose_memory_was_not_measured() -> None:
    gpu = replace(WITH_GPU.gpu, memory_bytes_per_second=None)
    assert dict(hardware_rows(replace(WITH_GPU, gpu=gpu), dtype="float16"))["GPU memory"] == "24.0 GiB"


def test_one_core() -> None:
    host = replace(WITH_GPU.host, num_cores=1)
    rows = dict(hardware_rows(replace(WITH_GPU, host=host), dtype="float32"))
    assert rows["memory"].endswith("; 76.8 GB/s read and written by 1 core")


def test_a_model() -> None:
    spec = gpt(num_layers=6, hidden_size=1024, vocab_size=1000)
    profile = estimated(spec, Workload(micro_batch_size=2, num_micro_batches=3, sequence_len=64))
    profile = replace(profile, embedding_seconds=0.002)
    assert model_rows(profile, available_bytes=GIB) == [
        ("micro-batch", "128 tokens; forward 19.8 GFLOP"),
        ("layers", "6 layers of 1 kind: forward 0.00 ms, recomputation 0.00 ms, backward 0.00 ms"),
        ("other blocks", "embedding 2.00 ms, head and loss unknown"),
        ("activations", "37.6 MiB in all, including 1.50 MiB of layers' inputs"),
        ("available", "1.00 GiB of RAM for activations in a run"),
    ]
    assert operator_lines(profile) == [
        "operators worth offloading in 6 of 6 layers, for one layer and micro-batch:",
        "operator     output       saves  time",
        "qkv mm      768 KiB   805 MFLOP  unknown",
        "out mm      256 KiB   268 MFLOP  unknown",
        "up mm      1.00 MiB  1.07 GFLOP  unknown",
        "attention   258 KiB  33.6 MFLOP  unknown",
    ]
