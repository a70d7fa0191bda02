"""Rows of the embedding's matrix: gathered, laid out in the whole matrix, and spread out for an update."""

from __future__ import annotations

import pytest
import torch

from ratel_cli.engine.device.device import HostDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import view
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from tests.planning.shapes import gpt

VOCAB = 50
WIDTH = 129
"""Rows are no multiple of anything."""


class Apart(HostDevice):
    """Like a GPU, with memory of its own."""

    is_host = False


DEVICE = Apart(Timeline())


def block_of(others: list[tuple[int, ...]]) -> BlockSpec:
    parameters = [("matrix", (VOCAB, WIDTH), True), *((f"other{i}", shape, True) for i, shape in enumerate(others))]
    return lay_out_block(dtype="bfloat16", index=0, name="embedding", parameters=parameters, is_looked_up=True)


def spec_of(block: BlockSpec) -> ModelSpec:
    return ModelSpec(
        name="x",
        architecture="X",
        blocks=(block,),
        segment_names=("embedding",),
        dtype="bfloat16",
        hidden_size=WIDTH,
        vocab_size=VOCAB,
    )


def rows_of(block: BlockSpec, *ids: list[int]) -> EmbeddingRows:
    tensors = [torch.tensor([each]) for each in ids]
    rows = EmbeddingRows.of(spec_of(block), tensors, DEVICE.torch_device, most_rows=VOCAB)
    assert rows is not None
    return rows


@pytest.mark.parametrize("others", [[], [(20, WIDTH)], [(WIDTH,), (3, 3)]])
@pytest.mark.parametrize("ids", [[0], [49], [3, 3, 3], [0, 1, 2, 49], [48, 7, 30, 7, 8, 9]])
def test_elements_are_those_of_the_whole_block(ids: list[int], others: list[tuple[int, ...]]) -> None:
    """Every piece of a block, wherever it begins and ends, against the block written out."""
    block = block_of(others)
    rows = rows_of(block, ids)
    torch.manual_seed(0)
    packed = torch.randn(rows.packed.num_elements)
    whole = torch.zeros(block.num_elements)
    for place, row in enumerate(sorted(set(ids))):
        whole[row * WIDTH : (row + 1) * WIDTH] = packed[place * WIDTH : (place + 1) * WIDTH]
    for own, parameter in zip(rows.packed.parameters[1:], block.parameters[1:], strict=True):
        whole[parameter.start : parameter.stop] = packed[own.start : own.stop]
    edges = {0, 1, WIDTH - 1, WIDTH, WIDTH + 1, 48 * WIDTH, VOCAB * WIDTH - 1, VOCAB * WIDTH, block.num_elements}
    edges |= {2048 * number for number in range(block.num_elements // 2048)}
    edges |= {edge for each in block.parameters[1:] for edge in (each.start, each.start + 1, each.stop)}
    for start in sorted(edges):
        for stop in sorted(edge for edge in edges if edge > start):
            out = torch.full((stop - start,), 5.0)
            rows.spread(packed, start, out)
            assert torch.equal(out, whole[start:stop]), (start, stop)


def test_gathered_rows_are_in_the_order_of_their_tokens() -> None:
    block = block_of([])
    rows = rows_of(block, [9, 2, 9], [30, 2])
    matrix = torch.randn(VOCAB, WIDTH).bfloat16()
    gathered = torch.zeros(3, WIDTH).bfloat16()
    rows.gather(matrix.view(-1), gathered.view(-1))
    assert torch.equal(gathered, matrix[[2, 9, 30]])
    wanted = torch.zeros(VOCAB, WIDTH).bfloat16()
    wanted[[2, 9, 30]] = gathered
    assert torch.equal(rows.whole(gathered.view(-1)), wanted.view(-1))
    assert rows.packed.parameters[0].shape == (5, WIDTH)


@pytest.mark.parametrize("window_elements", [0, 1, 5 * WIDTH, 6 * WIDTH, 1 << 20])
def test_what_goes_ahead_is_whole_parameters(window_elements: int) -> None:
    """The window has space for as many rows as there are tokens, or none go ahead."""
    rows = rows_of(block_of([(WIDTH,)]), [1, 1, 2, 2, 2])
    size = rows.block.dtype_bytes
    found = rows.parts_ahead(size * window_elements)
    behind = rows.block.num_elements - rows.others_start
    assert found == (
        (0, 0)
        if window_elements < rows.packed.parameters[1].start
        else (size * 2 * WIDTH, size * behind if window_elements >= rows.packed.num_elements else 0)
    )


def test_the_matrix_itself_goes_up_where_rows_do_not_pay() -> None:
    spec, ids = gpt(vocab_size=40), [torch.arange(20).view(1, 20), torch.arange(20).view(1, 20)]
    assert EmbeddingRows.of(spec, [ids[0], ids[1][:, :19]], DEVICE.torch_device, most_rows=40) is not None
    assert EmbeddingRows.of(spec, ids, DEVICE.torch_device, most_rows=40) is None, "as many tokens as rows"
    assert EmbeddingRows.of(spec, ids[:1], DEVICE.torch_device, most_rows=19) is None, "more than was planned"
    assert EmbeddingRows.of(spec, ids[:1], DEVICE.torch_device, most_rows=None) is None


@pytest.mark.parametrize("num_contributions", [1, 3])
def test_a_gradient_of_rows_is_one_of_the_block(num_contributions: int) -> None:
    """Held as rows; every row has a gradient, and the norm is that of the whole matrix."""
    block = block_of([(WIDTH,)])
    rows = rows_of(block, [4, 20, 20, 6])
    torch.manual_seed(1)
    parts = [torch.randn(3, WIDTH).bfloat16() for _ in range(num_contributions)]
    other = torch.randn(WIDTH).bfloat16()
    with BufferPool(None) as pool:
        total = gradient_sum(block, pool, DEVICE, single=num_contributions == 1, rows=rows)
        for number, part in enumerate(parts):
            total.add([part, None if number else other])
        gradient = total.finish()
        gradient.fetch(pool)
        wanted = torch.zeros(VOCAB, WIDTH)
        for part in parts:
            wanted[[4, 6, 20]] += part.float()
        with gradient.elements(0, block.num_elements, pool) as memory:
            found = view(memory, torch.bfloat16)
            assert torch.equal(found[: VOCAB * WIDTH].view(VOCAB, WIDTH), wanted.bfloat16())
            start = block.parameters[1].start
            assert torch.equal(found[start : start + WIDTH], other)
        assert gradient.block is block and gradient.present == (True, True)
        assert gradient.num_bytes == 2 * rows.packed.num_elements < 2 * block.num_elements
        assert torch.equal(
            torch.as_tensor(gradient.norms["matrix"]), torch.linalg.vector_norm(wanted.bfloat16().float().view(-1))
        )
        gradient.release()
        assert pool.leased_bytes == 0
