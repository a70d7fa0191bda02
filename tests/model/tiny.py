"""Tiny random models of many families, and helpers for the tests of import and export.

All weights are random, norms and biases too, so that no two parameters are equal and no mix-up stays hidden.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource, persistent_buffers
from ratel_cli.model.files.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.files.import_weights import WeightSource, imported_weights
from ratel_cli.model.files.shards import TensorSpec
from ratel_cli.model.files.skeleton import build_skeleton, read_model_config
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.store.fill import fill
from ratel_cli.store.layout import Geometry
from ratel_cli.store.manifest import Progress, StoreIdentity
from ratel_cli.store.store import Store

Tensors = dict[str, torch.Tensor]

_LLAMA: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "head_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
_GLM: dict[str, object] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GPT: dict[str, object] = {
    "n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 96, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

FAMILIES: dict[str, dict[str, object]] = {
    "llama": _LLAMA,
    "gpt2": _GPT,
    "opt": {
        "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96},
    "gpt_neox": _LLAMA,
    "mixtral": _LLAMA | {"num_local_experts": 4},
    "qwen3_moe": _LLAMA | _MOE,
    "gemma2": _LLAMA,
    "phi3": _LLAMA,
    "glm4_moe": _LLAMA | _GLM,
    "falcon": {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96,
        "new_decoder_architecture": True, "num_kv_heads": 2,
    },
    "zamba2": _LLAMA | {  # two of its layers share weights
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1,
        "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 8,
        "attention_hidden_size": 64, "attention_head_dim": 16, "adapter_rank": 4,
    },
}  # fmt: skip


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """The configuration of a model with about 50,000 parameters."""
    return AutoConfig.for_model(family, **(FAMILIES[family] | changes))


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """An in-memory model in fp32. None of its parameters is constant."""
    config = tiny_config(family, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            tensor.normal_(generator=generator)
    return model


def save_tiny(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    """Save a tiny model as transformers does, in several shards."""
    model = tiny_model(family, **changes)
    model.save_pretrained(directory, max_shard_size="60KB")
    return model


def skeleton_of(directory: Path) -> tuple[PreTrainedModel, ModelSpec]:
    """Skeleton and spec of a saved model. The compute dtype must not matter."""
    skeleton = build_skeleton(read_model_config(directory), dtype="bfloat16", attn_implementation="eager")
    return skeleton, find_blocks(skeleton, name="tiny").spec


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    """Name, dtype and shape of each tensor."""
    return [TensorSpec(name=name, dtype=each.dtype, shape=tuple(each.shape)) for name, each in tensors.items()]


def read_all(source: WeightSource, spec: ModelSpec, *, num_elements: int = 1000) -> Tensors:
    """Every parameter, read `num_elements` at a time."""
    read: Tensors = {}
    for parameter in (parameter for block in spec.blocks for parameter in block.parameters):
        parts = [
            source.read(parameter.name, start, min(start + num_elements, parameter.num_elements))
            for start in range(0, parameter.num_elements, num_elements)
        ]
        read[parameter.name] = torch.cat(parts).reshape(parameter.shape)
    return read


def import_all(directory: Path) -> Tensors:
    skeleton, spec = skeleton_of(directory)
    with CheckpointSource(directory, skeleton, spec) as source:
        return read_all(source, spec)


def reference(directory: Path) -> Tensors:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), name


def gather(directory: Path) -> Tensors:
    """Remove all tensors from a saved model and return them."""
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (directory / INDEX_NAME).unlink(missing_ok=True)
    return tensors


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change a saved model's tensors. Afterwards they are in one file."""
    tensors = gather(directory)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})


def rejection(directory: Path) -> str:
    """The message of the BadInput that importing a directory raises."""
    with pytest.raises(BadInput) as raised:
        import_all(directory)
    assert raised.value.message.isprintable()
    return raised.value.message


@contextmanager
def imported_store(
    directory: Path, spec: ModelSpec, source: WeightSource, *, group_elements: int = 4096
) -> Iterator[tuple[Store, BufferPool]]:
    """A store with the weights of `source`, as an import leaves it."""
    identity = StoreIdentity(model_hash="m", config_hash="c", data_hash="d", seed=1, software="s")
    geometry = Geometry(blocks=spec.stored_blocks, num_slots=2, shares=(1,), chunk_elements=2048)
    with (
        BufferPool(None) as pool,
        open_queue("threads", notice=lambda message: None) as queue,
        Store.create([directory], geometry, identity=identity, queue=queue) as store,
    ):
        progress = Progress(step=0, updates=3, loss_scale=1.0, good_steps=0, tokens=0)
        weights = imported_weights(spec, source, progress, group_elements=group_elements)
        fill(store, weights, pool, progress=lambda num_bytes: None)
        yield store, pool


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """A context in which no file can grow beyond `num_bytes`.

    Writes fail with EFBIG as they would with ENOSPC on a full drive: the first is short, the next fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
