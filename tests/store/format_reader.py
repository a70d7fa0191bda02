"""Reads a store by docs/store-format.md alone. An oracle for ratel_cli/store, with which it shares no code.

Offsets, sizes, names and numbers come from the tables of the document, as it is read. What the document says in prose
(which manifest counts, the rule of the stripes, the order of chunks, the two halves of the master) is written out here.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

DOCUMENT = Path(__file__).parents[2] / "docs" / "store-format.md"
INTEGERS = {"u16": "<H", "u32": "<I", "u64": "<Q"}


class FormatError(Exception):
    """The files are not what the document says."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise FormatError(reason)


class Format:
    """The numbers and names of the document."""

    def __init__(self, text: str) -> None:
        self._sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))

    def table(self, section: str, number: int = 0) -> list[dict[str, str]]:
        """The rows of a table by column name, with the code marks removed."""
        tables = re.findall(r"(?:^\|.*\n)+", self._sections[section], flags=re.MULTILINE)
        head, _, *rows = (
            [cell.strip() for cell in line.replace("`", "").strip("|").split("|")]
            for line in tables[number].splitlines()
        )
        return [dict(zip(head, row, strict=True)) for row in rows]

    def prose(self, section: str) -> str:
        return " ".join(line for line in self._sections[section].splitlines() if not line.startswith("|"))

    @cached_property
    def page_bytes(self) -> int:
        return int(self._number("Conventions", r"\*\*page\*\* is (\d+) bytes"))

    @cached_property
    def file_name(self) -> str:
        return self.table("Files")[0]["file"]

    @cached_property
    def parts(self) -> dict[str, int]:
        """Offset of each part of a data file."""
        return {row["content"]: int(row["offset"]) for row in self.table("A data file")}

    @cached_property
    def header_bytes(self) -> int:
        return self.parts["this file's stripes"]

    @cached_property
    def payload_keys(self) -> dict[str, str]:
        return {row["key"]: row["value"] for row in self.table("Manifest page", 1)}

    @cached_property
    def progress_keys(self) -> list[str]:
        return self._list(self.payload_keys["progress"])

    @cached_property
    def entry_keys(self) -> list[str]:
        return self._list(self.payload_keys["pins"])

    @cached_property
    def block_alignment(self) -> int:
        return int(self._number("Slots, blocks and records", r"multiple of (\d+) elements, so"))

    def keys_of(self, number: int, column: str) -> set[str]:
        return {key for row in self.table("Manifest page", number) for key in row[column].split(", ")}

    def fields(self, dtype: str, rule: str = "adamw") -> list[list[Any]]:
        """The fields of a rule's record for a dtype, as a manifest has them."""
        return [
            [row["field"], row["type"], int(row["per"])]
            for row in self.table("Fields", 1)
            if (row["rule"], row["dtype"]) == (rule, dtype)
        ]

    @cached_property
    def value_bytes(self) -> dict[str, int]:
        return {row["type"]: int(row["bytes"]) for row in self.table("Fields")}

    def decode_page(self, section: str, page: bytes) -> dict[str, Any] | None:
        """The named values of a page; None if its magic or CRC is wrong."""
        values: dict[str, Any] = {}
        for row in self.table(section):
            name, kind, content = row["name"], row["type"], row["content"]
            if not name:
                continue
            offset = int(row["offset"])
            num_bytes = values[row["bytes"]] if row["bytes"] in values else int(row["bytes"])
            data = page[offset : offset + num_bytes]
            if name == "crc":
                if zlib.crc32(page[: int(self._find(r"bytes 0 to (\d+)", content)) + 1]) != self._integer(kind, data):
                    return None
            elif name == "magic":
                if data != content.encode():
                    return None
            elif kind == "json":
                values[name] = json.loads(data)
                used = offset + num_bytes
                require(not any(page[used:-4]), "there is something behind the payload")
            else:
                values[name] = data if kind == "bytes" else self._integer(kind, data)
        return values

    def seed_bytes(self, **values: int | bytes) -> bytes:
        """What a chunk's seed is the hash of."""
        rows = self.table("Checksum table", 1)
        packed = bytearray(int(self._number("Checksum table", r"seed 0, of these (\d+) bytes")))
        require({row["name"] for row in rows} == set(values), "the seed has other parts")
        for row in rows:
            value, offset = values[row["name"]], int(row["offset"])
            data = value if isinstance(value, bytes) else struct.pack(INTEGERS[row["type"]], value)
            require(len(data) == int(row["bytes"]), f"{row['name']} has another size")
            packed[offset : offset + len(data)] = data
        return bytes(packed)

    def _integer(self, kind: str, data: bytes) -> int:
        [number] = struct.unpack(INTEGERS[kind], data)
        return int(number)

    def _list(self, value: str) -> list[str]:
        return self._find(r"\[([a-z_, ]+)\]", value).split(", ")

    def _number(self, section: str, pattern: str) -> str:
        return self._find(pattern, self.prose(section))

    def _find(self, pattern: str, text: str) -> str:
        found = re.search(pattern, text)
        require(found is not None, f"the document does not say {pattern}")
        assert found is not None
        return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlock:
    """What the manifest says of a block."""

    num_elements: int
    fields: list[list[Any]]
    """Name, type and elements of a value, and the number of values if it is fixed."""
    is_frozen: bool
    is_in_files: bool = False

    def field_bytes(self, position: int, num_elements: int, page: Format) -> int:
        _, kind, per, *fixed = self.fields[position]
        values = fixed[0] * (num_elements > 0) if fixed else -(-num_elements // per)
        return -(-values * page.value_bytes[kind] // page.page_bytes) * page.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGeneration:
    """What a manifest says of a generation."""

    slot: int
    progress: dict[str, int | float]
    root: str


class StoreReader:
    """The store in these directories, in their order. Raises FormatError for what the document does not allow."""

    def __init__(self, paths: Sequence[Path], document: str | None = None) -> None:
        self.format = Format(document if document is not None else DOCUMENT.read_text())
        self._files = [(path / self.format.file_name).read_bytes() for path in paths]
        identifications = [self._page("Identification page", file, "identification page") for file in self._files]
        require(None not in identifications, "a file is not identified")
        found = [values for values in identifications if values is not None]
        self.store_id: bytes = found[0]["store_id"]
        for index, values in enumerate(found):
            require(values["store_id"] == self.store_id, "a file of another store")
            require((values["file_index"], values["num_files"]) == (index, len(paths)), "another order of files")
        self.manifest, self.is_damaged = self._choose()
        self.payload: dict[str, Any] = self.manifest["payload"]
        self._check_payload()
        self.geometry: dict[str, Any] = self.payload["geometry"]
        runs = self.geometry["blocks"]
        kinds = [kind for count, kind in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]
        self.blocks = [self._block(*self.geometry["kinds"][kind]) for kind in kinds]
        require(all(block.num_elements % self.format.block_alignment == 0 for block in self.blocks), "a block's size")
        self._logical = self._assemble()

    @property
    def current(self) -> StoredGeneration:
        return StoredGeneration(
            slot=self.payload["slot"],
            progress=dict(zip(self.format.progress_keys, self.payload["progress"], strict=True)),
            root=self.payload["root_checksum"],
        )

    @property
    def pins(self) -> list[StoredGeneration]:
        return [self._entry(row) for row in self.payload["pins"]]

    @property
    def before(self) -> StoredGeneration | None:
        row = self.payload["before"]
        return None if row is None else self._entry(row)

    @property
    def frozen_bytes(self) -> int:
        if not any(block.is_frozen and block.num_elements for block in self.blocks):
            return 0
        return self._list_address + int(self.geometry["list_bytes"])

    @property
    def _list_address(self) -> int:
        return self._record_offset(len(self.blocks), is_frozen=True) + self._table_bytes(is_frozen=True)

    @cached_property
    def base_files(self) -> dict[str, Any]:
        """The list of the base model's files, as it is stored."""
        rows = self.format.table("Blocks in the base model's files")
        content = self._logical[self._list_address : self.frozen_bytes]
        require(content[:8] == rows[0]["content"].encode(), "the list has another magic")
        end = int(rows[2]["offset"]) + struct.unpack_from("<Q", content, int(rows[1]["offset"]))[0]
        require(struct.unpack_from("<I", content, end)[0] == zlib.crc32(content[:end]), "the list has another CRC")
        require(not any(content[end + 4 :]), "there is something behind the list")
        found: dict[str, Any] = json.loads(content[int(rows[2]["offset"]) : end])
        return found

    @property
    def slot_bytes(self) -> int:
        return self._record_offset(len(self.blocks), is_frozen=False) + self._table_bytes(is_frozen=False)

    def slot_address(self, number: int) -> int:
        return self.frozen_bytes + number * self.slot_bytes

    def read(self, generation: StoredGeneration) -> dict[tuple[int, str], bytes]:
        """Every field of every block, checked."""
        content = {
            (index, field[0]): self._field(generation, index, position)
            for index, block in enumerate(self.blocks)
            for position, field in enumerate(block.fields)
        }
        if self.geometry["chunk_elements"]:
            self._check(content, self.table(generation), is_frozen=False)
        else:
            require(generation.root == "", "a root without a table")
        if self.geometry["chunk_elements"] and self.frozen_bytes:
            entries = self.frozen_table()
            require(entries[0] == 2**64 - 1, "the frozen region has a step")
            self._check(content, entries, is_frozen=True)
        else:
            require(self.payload["frozen_checksum"] == "", "a root without frozen blocks")
        return content

    def table(self, generation: StoredGeneration) -> list[int]:
        """The entries of a generation's checksum table."""
        return self._table(self.slot_address(generation.slot), generation.root, is_frozen=False)

    def frozen_table(self) -> list[int]:
        """The entries of the frozen region's checksum table."""
        return self._table(0, self.payload["frozen_checksum"], is_frozen=True)

    def _block(self, num_elements: int, record: int, is_frozen: bool, is_in_files: bool) -> ReadBlock:
        require(isinstance(is_frozen, bool) and isinstance(is_in_files, bool), "a kind is frozen or not")
        require(is_frozen or not is_in_files, "a block that is trained is in files")
        return ReadBlock(
            num_elements=num_elements,
            fields=self.geometry["records"][record],
            is_frozen=is_frozen,
            is_in_files=is_in_files,
        )

    def _table(self, address: int, root: str, *, is_frozen: bool) -> list[int]:
        num_bytes = self._table_bytes(is_frozen=is_frozen)
        start = address + self._record_offset(len(self.blocks), is_frozen=is_frozen)
        content = self._logical[start : start + num_bytes]
        require(xxhash.xxh3_128_hexdigest(content) == root, "the table is not that of the manifest")
        entries = list(struct.unpack(f"<{num_bytes // 8}Q", content))
        num_entries = 1 + len(list(self._chunks(is_frozen=is_frozen)))
        require(not any(entries[num_entries:]), "there is something behind the table")
        return entries[:num_entries]

    def _page(self, section: str, file: bytes, part: str) -> dict[str, Any] | None:
        start = self.format.parts[part]
        return self.format.decode_page(section, file[start : start + self.format.page_bytes])

    def _choose(self) -> tuple[dict[str, Any], bool]:
        """Which manifest counts, and whether a page is damaged."""
        names = ("manifest page 0", "manifest page 1")
        starts = [self.format.parts[name] for name in names]
        pages = [self._files[0][start : start + self.format.page_bytes] for start in starts]
        for file in self._files[1:]:
            require(not any(file[: starts[1] + self.format.page_bytes]), "a manifest in another file than the first")
        decoded = [self.format.decode_page("Manifest page", page) if any(page) else None for page in pages]
        is_damaged = any(any(page) and values is None for page, values in zip(pages, decoded, strict=True))
        for number, values in enumerate(decoded):
            if values is not None:
                require(values["generation"] % 2 == number, "a manifest on the other's page")
                require(values["version"] == self._version(), "another version")
        valid = [values for values in decoded if values is not None]
        require(bool(valid), "no valid manifest")
        newest = max(valid, key=lambda values: values["generation"])
        if len(valid) == 2:
            [older] = [page for page, values in zip(pages, decoded, strict=True) if values is not newest]
            require(newest["previous_sha256"] == hashlib.sha256(older).digest(), "the manifests do not follow")
        require(newest["store_id"] == self.store_id, "a manifest of another store")
        if newest["generation"] == 1:
            require(not any(newest["previous_sha256"]), "a manifest before the first")
        return newest, is_damaged

    def _version(self) -> int:
        [row] = [row for row in self.format.table("Manifest page") if row["name"] == "version"]
        return int(row["content"])

    def _check_payload(self) -> None:
        page, wanted = self.format, self.payload
        require(set(wanted) == set(page.payload_keys), "other keys in the payload")
        require(set(wanted["identity"]) == page.keys_of(2, "key of identity"), "other keys in the identity")
        require(set(wanted["geometry"]) == page.keys_of(3, "key of geometry"), "other keys in the geometry")
        geometry = wanted["geometry"]
        require(len(geometry["shares"]) == len(self._files), "another number of files")
        require(geometry["in_place"] == (geometry["num_slots"] == 1), "in_place and num_slots")
        text = json.dumps(wanted, separators=(",", ":"))
        require(len(text) == self.manifest["payload_bytes"], "spaces in the payload")

    def _entry(self, row: list[Any]) -> StoredGeneration:
        values = dict(zip(self.format.entry_keys, row, strict=True))
        slot, root = values.pop("slot"), values.pop("root_checksum")
        return StoredGeneration(slot=slot, progress=values, root=root)

    def _assemble(self) -> bytes:
        """The logical bytes, stripe by stripe, by smooth weighted round-robin."""
        weights, stripe_bytes = self.geometry["shares"], self.geometry["stripe_bytes"]
        total = self.slot_address(self.geometry["num_slots"])
        balances, ends = [0] * len(weights), [self.format.header_bytes] * len(weights)
        logical = bytearray()
        while len(logical) < total:
            balances = [balance + weight for balance, weight in zip(balances, weights, strict=True)]
            file = balances.index(max(balances))
            balances[file] -= sum(weights)
            num_bytes = min(stripe_bytes, total - len(logical))
            require(ends[file] + num_bytes <= len(self._files[file]), "a file is too short")
            logical += self._files[file][ends[file] : ends[file] + num_bytes]
            ends[file] += num_bytes
        require(ends == [len(file) for file in self._files], "files of another size")
        return bytes(logical)

    def _record_offset(self, block: int, *, is_frozen: bool) -> int:
        """Where the record of a block begins in its region."""
        return sum(
            each.field_bytes(position, each.num_elements, self.format)
            for each in self.blocks[:block]
            if each.is_frozen is is_frozen and not each.is_in_files
            for position in range(len(each.fields))
        )

    def _table_bytes(self, *, is_frozen: bool) -> int:
        if not self.geometry["chunk_elements"]:
            return 0
        num_pages: int = -(-8 * (1 + len(list(self._chunks(is_frozen=is_frozen)))) // self.format.page_bytes)
        return num_pages * self.format.page_bytes

    def _field(self, generation: StoredGeneration, index: int, position: int) -> bytes:
        block = self.blocks[index]
        if block.is_in_files:
            return self._in_files(index, block.field_bytes(position, block.num_elements, self.format))
        start = 0 if block.is_frozen else self.slot_address(generation.slot)
        start += self._record_offset(index, is_frozen=block.is_frozen)
        start += sum(block.field_bytes(before, block.num_elements, self.format) for before in range(position))
        return self._logical[start : start + block.field_bytes(position, block.num_elements, self.format)]

    def _in_files(self, index: int, num_bytes: int) -> bytes:
        """A block's field from the base model's files."""
        field, end = bytearray(num_bytes), 0
        for block, start, length, file, offset in self.base_files["pieces"]:
            if block == index:
                require(start >= end and start + length <= num_bytes, "pieces in another order, or too many")
                path, size = self.base_files["files"][file]
                content = Path(path).read_bytes()
                require(len(content) == size, "a file of another size")
                field[start : start + length] = content[offset : offset + length]
                end = start + length
        return bytes(field)

    def _chunks(self, *, is_frozen: bool) -> Iterator[tuple[int, int, int]]:
        """(block, position of the field, first element) of each chunk, in the order of a region's table."""
        for index, block in enumerate(self.blocks):
            if block.is_frozen is is_frozen:
                for position, (_, _, _, *fixed) in enumerate(block.fields):
                    step = max(1, block.num_elements) if fixed else self.geometry["chunk_elements"]
                    for start in range(0, block.num_elements, step):
                        yield index, position, start

    def _check(self, content: dict[tuple[int, str], bytes], table: list[int], *, is_frozen: bool) -> None:
        step, *entries = table
        chunk_elements = self.geometry["chunk_elements"]
        for (index, position, start), entry in zip(self._chunks(is_frozen=is_frozen), entries, strict=True):
            block = self.blocks[index]
            name = block.fields[position][0]
            chunk_bytes = block.field_bytes(position, chunk_elements, self.format)
            first = start // chunk_elements * chunk_bytes
            part = content[index, name][first : first + chunk_bytes]
            place = {"block": index, "field": position, "chunk": start // chunk_elements}
            packed = self.format.seed_bytes(store_id=self.store_id, step=step, **place)
            seed = xxhash.xxh3_64_intdigest(packed, seed=0)
            require(xxhash.xxh3_64_intdigest(part, seed=seed) == entry, f"block {index}, {name}, element {start}")


def join_master(hi16: bytes, lo16: bytes, v32: bytes) -> tuple[list[int], list[int]]:
    """The bits of the fp32 masters and of the second moments."""
    masters, moments = [], []
    highs, lows = struct.unpack(f"<{len(hi16) // 2}H", hi16), struct.unpack(f"<{len(lo16) // 2}H", lo16)
    for high, low, moment in zip(highs, lows, struct.unpack(f"<{len(v32) // 4}I", v32), strict=True):
        rounded_up = low > 0x8000 or (low == 0x8000 and moment >> 31 == 1)
        masters.append((high - rounded_up) % 2**16 << 16 | low)
        moments.append(moment & 0x7FFFFFFF)
    return masters, moments


def split_master(masters: Sequence[int]) -> tuple[bytes, bytes, bytes]:
    """`hi16`, `lo16` and the sign bits that go to `v32`."""
    highs, lows, signs = [], [], []
    for master in masters:
        high, low = master >> 16, master & 0xFFFF
        rounds_up = low > 0x8000 or (low == 0x8000 and high % 2 == 1)
        highs.append((high + rounds_up) % 2**16)
        lows.append(low)
        signs.append((low == 0x8000 and rounds_up) << 31)
    number = len(masters)
    return struct.pack(f"<{number}H", *highs), struct.pack(f"<{number}H", *lows), struct.pack(f"<{number}I", *signs)
