"""Names of the files that data becomes, also for those who only look for them: nothing heavy is imported."""

from __future__ import annotations

from typing import Final

REJECTS_NAME: Final = "rejects.jsonl"
"""The rows of `datasets` that are not used: in a token cache, and in the directory of a run."""
TEST_REJECTS_NAME: Final = f"test-{REJECTS_NAME}"
"""The rows of `test_datasets` that are not used, in the directory of a run."""
TOKEN_IDS_NAME: Final = "tokens.bin"
LENGTHS_NAME: Final = "lengths.npy"
META_NAME: Final = "meta.json"
CACHE_FILE_NAMES: Final = (TOKEN_IDS_NAME, LENGTHS_NAME, REJECTS_NAME, META_NAME)
"""All files of a token cache. The last one makes it complete."""
