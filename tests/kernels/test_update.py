"""AdamW on chunks has the bits of the plain kernels on each segment, and the checksums of the xxhash library."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import xxhash

from ratel_cli import _native
from tests.kernels.oracle import ISAS, scalars

LAYOUTS = {
    "bfloat16": (torch.bfloat16, torch.int16, torch.float32, torch.float32),
    "float32": (torch.float32, torch.float32, torch.float32),
    "float16": (torch.float16, torch.float32, torch.float32, torch.float32),
}
PLAIN = {
    "bfloat16": _native.adamw_bfloat16,
    "float32": _native.adamw_float32,
    "float16": _native.adamw_float16,
}
UPDATE = {
    "bfloat16": _native.update_bfloat16,
    "float32": _native.update_float32,
    "float16": _native.update_float16,
}
LARGEST_SEED = 2**64 - 1
ONE = _native.AdamWScalars(**scalars(1))
Segments = list[tuple[int, int, bool]]


def arrays_of(layout: str, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The record's fields, then a gradient. One gradient is infinite."""
    found = []
    for dtype in (*LAYOUTS[layout], random.Random(count).choice([torch.bfloat16, torch.float32])):
        if dtype is torch.int16:
            found.append(torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=dtype))
        else:
            found.append(torch.randn(count, generator=generator).abs().to(dtype))
    if count > 5:
        found[-1][5] = torch.inf
    return found


def segments_of(choice: random.Random, count: int) -> Segments:
    """Random segments: some are adjacent, some are empty, some elements are in none."""
    edges = sorted(choice.randint(0, count) for _ in range(2 * choice.randint(0, 5)))
    found = [(first, last, choice.random() < 0.5) for first, last in zip(edges[::2], edges[1::2], strict=True)]
    return found or [(0, count, True)]


def digests_of(fields: Sequence[torch.Tensor], chunk_elements: int, seeds: Sequence[int | None]) -> list[int | None]:
    """Checksums by the library of every field of every chunk."""
    chunks = [
        field[first : first + chunk_elements] for first in range(0, len(fields[0]), chunk_elements) for field in fields
    ]
    return [
        None if seed is None else xxhash.xxh3_64_intdigest(chunk.contiguous().view(torch.uint8).numpy(), seed=seed)
        for chunk, seed in zip(chunks, seeds, strict=True)
    ]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(25))
def test_it_is_the_plain_kernel_on_each_segment_and_the_library_s_checksums(layout: str, isa: str, seed: int) -> None:
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = 512 * choice.choice([1, 2, 3, 4, 5, 8, 9, 64, 65, choice.randint(1, 300)])
    chunk_elements = 512 * choice.choice([1, 2, 3, 4, 64, 1000])
    found = arrays_of(layout, count, generator)
    expected = [array.clone() for array in found]
    segments, numbers = segments_of(choice, count), scalars(3, weight_decay=0.1)
    num_seeds = -(-count // chunk_elements) * len(LAYOUTS[layout])
    before, after = (
        [choice.choice([None, 0, 1, LARGEST_SEED, choice.randint(0, LARGEST_SEED)]) for _ in range(num_seeds)]
        for _ in range(2)
    )
    digests_before = digests_of(expected[:-1], chunk_elements, before)
    for first, last, decays in segments:
        plain = _native.AdamWScalars(**{**numbers, "decay_factor": numbers["decay_factor"] if decays else 1.0})
        PLAIN[layout](*(array[first:last] for array in expected), isa=isa, scalars=plain)
    digests = UPDATE[layout](
        *found,
        segments=segments,
        chunk_elements=chunk_elements,
        seeds_before=before,
        seeds_after=after,
        isa=isa,
        scalars=_native.AdamWScalars(**numbers),
    )
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert digests == (digests_before, digests_of(expected[:-1], chunk_elements, after))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 511, 513, 2049, 5000])
def test_without_checksums_arrays_may_have_any_length(layout: str, count: int) -> None:
    found = arrays_of(layout, count, torch.Generator().manual_seed(count))
    expected = [array.clone() for array in found]
    PLAIN[layout](*expected, scalars=ONE)
    digests = UPDATE[layout](
        *found, segments=[(0, count, False)], chunk_elements=512, seeds_before=[], seeds_after=[], scalars=ONE
    )
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert all(digest is None for of_pass in digests for digest in of_pass)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_flipped_bit_changes_the_checksum(layout: str) -> None:
    choice = random.Random(1)
    for _ in range(50):
        arrays = arrays_of(layout, 2048, torch.Generator().manual_seed(2))
        seeds: list[int | None] = [7] * len(LAYOUTS[layout])
        right = digests_of(arrays[:-1], 2048, seeds)
        damaged = choice.randrange(len(seeds))
        octets = arrays[damaged].view(torch.uint8)
        octets[choice.randrange(len(octets))] ^= 1 << choice.randrange(8)
        found, _ = UPDATE[layout](
            *arrays, segments=[(0, 2048, True)], chunk_elements=2048, seeds_before=seeds, seeds_after=[], scalars=ONE
        )
        assert [a == b for a, b in zip(found, right, strict=True)] == [
            number != damaged for number in range(len(seeds))
        ]


@pytest.mark.parametrize(
    ("count", "segments", "chunk_elements", "seeds", "message"),
    [
        (1024, [(0, 1025, True)], 512, [], "segments: must lie in order within the arrays"),
        (1024, [(5, 4, True)], 512, [], "segments: must lie in order"),
        (1024, [(0, 10, True), (9, 20, True)], 512, [], r"segments: must lie in order .*\[9, 20\) does not"),
        (1024, [(0, 1024, True)], 0, [], "chunk_elements: must be a multiple of 512, is 0"),
        (1024, [(0, 1024, True)], 100, [], "chunk_elements: must be a multiple of 512, is 100"),
        (1024, [(0, 1024, True)], 512, [1] * 7, "must have one for each field of each chunk, 8, has 7"),
        (1000, [(0, 1000, True)], 512, [1] * 8, "must have a multiple of 512 elements, have 1000"),
    ],
)
@pytest.mark.parametrize("when", ["seeds_before", "seeds_after"])
def test_invalid_arguments_are_rejected_and_change_nothing(
    count: int, segments: Segments, chunk_elements: int, seeds: list[int | None], message: str, when: str
) -> None:
    arrays = arrays_of("bfloat16", count, torch.Generator().manual_seed(3))
    before = [array.clone() for array in arrays]
    both: dict[str, list[int | None]] = {"seeds_before": [], "seeds_after": [], when: seeds}
    with pytest.raises(ValueError, match=message):
        _native.update_bfloat16(
            *arrays,
            segments=segments,
            chunk_elements=chunk_elements,
            seeds_before=both["seeds_before"],
            seeds_after=both["seeds_after"],
            scalars=ONE,
        )
    assert all(same(a, b) for a, b in zip(arrays, before, strict=True))
