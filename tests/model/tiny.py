"""Tiny random models of many families, and what the tests of import and export do with them.

Weights are drawn anew (norms and biases too), so that no two parameters are equal and a mix-up shows.
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
from ratel_cli.model.blocks import find_blocks
from ratel_cli.model.checkpoint import CheckpointSource, persistent_buffers
from ratel_cli.model.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.import_weights import WeightSource, import_weights
from ratel_cli.model.skeleton import build_skeleton, read_model_config
from ratel_cli.model.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.layout import record_layout
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
}  # fmt: skip


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """The configuration of a model of some 50k parameters."""
    return AutoConfig.for_model(family, **(FAMILIES[family] | changes))


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """An in-memory model with weights that are nowhere constant, in fp32."""
    config = tiny_config(family, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            tensor.normal_(generator=generator)
    return model


def save_tiny(family: str, directory: Path, **changes: object) -> PreTrainedModel:
    """Save a tiny model the way transformers does, in several shards."""
    model = tiny_model(family, **changes)
    model.save_pretrained(directory, max_shard_size="60KB")
    return model


def skeleton_of(directory: Path) -> tuple[PreTrainedModel, ModelSpec]:
    """As `cli.finetune` makes them; the compute dtype must not matter."""
    skeleton = build_skeleton(read_model_config(directory), dtype="bfloat16", attn_implementation="eager")
    return skeleton, find_blocks(skeleton, name="tiny").spec


def read_all(source: WeightSource, spec: ModelSpec, *, piece: int = 1000) -> Tensors:
    """Every parameter, read in pieces as the import does."""
    read: Tensors = {}
    for parameter in (parameter for block in spec.blocks for parameter in block.parameters):
        pieces = [
            source.read(parameter.name, start, min(start + piece, parameter.num_elements))
            for start in range(0, parameter.num_elements, piece)
        ]
        read[parameter.name] = torch.cat(pieces).reshape(parameter.shape)
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
    """All tensors of a saved model, which are then removed from it."""
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (directory / INDEX_NAME).unlink(missing_ok=True)
    return tensors


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Edit a saved model's tensors in place; it is one file afterwards."""
    tensors = gather(directory)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})


def refusal(directory: Path) -> str:
    with pytest.raises(BadInput) as raised:
        import_all(directory)
    assert raised.value.message.isprintable()
    return raised.value.message


@contextmanager
def imported_store(
    directory: Path, spec: ModelSpec, source: WeightSource, dtype: DtypeName, *, group_elements: int = 4096
) -> Iterator[tuple[Store, BufferPool]]:
    """A store on disk that holds what `source` gives, as after an import."""
    identity = StoreIdentity(model_hash="m", config_hash="c", data_hash="d", seed=1, software="s")
    with (
        BufferPool(None) as pool,
        open_queue("threads", notice=lambda message: None) as queue,
        Store.create(
            [directory],
            identity=identity,
            layout=record_layout(dtype),
            block_elements=[block.num_elements for block in spec.blocks],
            num_slots=2,
            queue=queue,
            chunk_elements=2048,
        ) as store,
    ):
        import_weights(spec, source, store, pool, progress=lambda count: None, group_elements=group_elements)
        store.commit_import(Progress(step=0, updates=3, loss_scale=1.0, good_steps=0, tokens=0))
        yield store, pool


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writes beyond it fail with EFBIG, as they would with ENOSPC on a full disk: short first, then not at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
