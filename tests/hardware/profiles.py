"""Machines as values, for tests."""

from __future__ import annotations

from ratel_cli.hardware.spec import ComputeDevice, DriveRates, HardwareProfile, Host, Link, Nvme
from ratel_cli.units import GIB

SLOW = DriveRates(read_bytes_per_second=1.5e9, write_bytes_per_second=0.5e9, mixed_bytes_per_second=0.75e9)
FAST = DriveRates(read_bytes_per_second=6.5e9, write_bytes_per_second=3.4e9, mixed_bytes_per_second=4.4e9)
WITH_GPU = HardwareProfile(
    gpu=ComputeDevice(name="a GPU", memory_bytes=24 * GIB, flops_per_second=164e12, memory_bytes_per_second=1008e9),
    link=Link(to_gpu_bytes_per_second=22.6e9, from_gpu_bytes_per_second=24.1e9, both_bytes_per_second=38.25e9),
    nvme=Nvme(
        paths=("/mnt/a", "/mnt/b"),
        num_devices=2,
        read_bytes_per_second=6e9,
        write_bytes_per_second=2e9,
        mixed_bytes_per_second=3.25e9,
        shares=(1, 4),
        free_bytes=1024 * GIB,
        endurance_tb_written=7000.0,
        alone=(SLOW, FAST),
    ),
    host=Host(
        memory_bytes=128 * GIB,
        available_bytes=100 * GIB,
        adam_parameters_per_second=1.25e9,
        memory_bytes_per_second=76.8e9,
        num_cores=16,
    ),
)
WITHOUT_GPU = HardwareProfile(
    gpu=ComputeDevice(name="a CPU", memory_bytes=4096 * GIB, flops_per_second=0.5e12),
    nvme=Nvme(
        paths=("/mnt/a",),
        read_bytes_per_second=2e9,
        write_bytes_per_second=1e9,
        mixed_bytes_per_second=1.5e9,
        shares=(1,),
        free_bytes=64 * GIB,
        alone=(DriveRates(read_bytes_per_second=2e9, write_bytes_per_second=1e9, mixed_bytes_per_second=1.5e9),),
    ),
    host=Host(memory_bytes=4096 * GIB, available_bytes=8 * GIB, adam_parameters_per_second=0.5e9),
)
