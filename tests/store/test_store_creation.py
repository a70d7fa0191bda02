"""Making a store: what is checked first, what is replaced, and what is left unchanged."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure, RatelError
from ratel_cli.io.files import SpaceNeed, check_space, use_direct_io
from ratel_cli.io.queue import IoQueue
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.store import Store
from tests.fakes import Fault, FaultyQueue
from tests.store.stores import (
    IDENTITY,
    check_generation,
    create_store,
    import_all,
    open_store,
    progress_of,
    run_step,
)

NOBODY = 65534
FAR_TOO_MANY = (1 << 45,)
MANY = (1 << 20,)
TIB = 1 << 40


@pytest.fixture
def store_of_step_2(tmp_path: Path, plain_queue: IoQueue) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    with import_all(create_store(paths, plain_queue)) as store:
        run_step(store)
        run_step(store)
    return paths


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def open_to_read_only() -> Iterator[Path]:
    """A directory that an unprivileged process may read but not write."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@contextmanager
def unprivileged() -> Iterator[None]:
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def contents_of(paths: list[Path]) -> list[bytes]:
    return [(path / DATA_FILE_NAME).read_bytes() for path in paths]


def test_missing_directories_are_made(tmp_path: Path, plain_queue: IoQueue) -> None:
    with import_all(create_store([tmp_path / "x" / "y"], plain_queue)) as store:
        check_generation(store, 0)


def test_too_little_space_creates_nothing(tmp_path: Path, plain_queue: IoQueue) -> None:
    with pytest.raises(EnvironmentFailure, match=rf"needs 769 TiB on {tmp_path}/new, .* available \(short by .*\)"):
        create_store([tmp_path / "new"], plain_queue, block_elements=FAR_TOO_MANY)
    assert list(tmp_path.iterdir()) == []


def test_directories_on_one_drive_share_its_space(tmp_path: Path, plain_queue: IoQueue) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    elements = int(free_bytes * 0.75) // 12 // 2048 * 2048
    with pytest.raises(EnvironmentFailure, match="need"):  # each file alone would fit
        create_store([tmp_path / "a", tmp_path / "b"], plain_queue, block_elements=(elements,))


def test_an_existing_store_is_not_replaced_without_overwrite(store_of_step_2: list[Path], plain_queue: IoQueue) -> None:
    before = contents_of(store_of_step_2)
    for paths in (store_of_step_2, store_of_step_2[:1], store_of_step_2[1:], store_of_step_2[::-1]):
        with pytest.raises(BadInput) as raised:
            create_store(paths, plain_queue)
        assert "--resume" in (raised.value.hint or "")
    with open_store(store_of_step_2, plain_queue), pytest.raises(EnvironmentFailure, match=r"in use by process \d+"):
        create_store(store_of_step_2, plain_queue)  # as a run that another one of the same moment was faster than
    assert contents_of(store_of_step_2) == before


@pytest.mark.parametrize("failure", ["space", "reservation", "lock", "manifest"])
def test_an_existing_store_survives_every_failed_check(
    store_of_step_2: list[Path], plain_queue: IoQueue, failure: str
) -> None:
    before = contents_of(store_of_step_2)
    if failure == "space":
        with pytest.raises(EnvironmentFailure, match="needs 769 TiB"):
            create_store(store_of_step_2, plain_queue, overwrite=True, block_elements=FAR_TOO_MANY)
    elif failure == "reservation":
        with files_no_larger_than(1 << 20), pytest.raises(EnvironmentFailure, match=r"needs .*File too large"):
            create_store(store_of_step_2, plain_queue, overwrite=True, block_elements=MANY)
    elif failure == "lock":
        with open_store(store_of_step_2, plain_queue), pytest.raises(EnvironmentFailure, match="in use"):
            create_store(store_of_step_2, plain_queue, overwrite=True)
    else:
        with pytest.raises(EnvironmentFailure, match="manifest needs"):
            create_store(store_of_step_2, plain_queue, overwrite=True, num_slots=500)
    assert contents_of(store_of_step_2) == before
    with open_store(store_of_step_2, plain_queue) as store:
        check_generation(store, 2)


def test_a_failed_reservation_leaves_no_files(tmp_path: Path, plain_queue: IoQueue) -> None:
    with files_no_larger_than(1 << 20), pytest.raises(EnvironmentFailure, match="need"):
        create_store([tmp_path / "a"], plain_queue, block_elements=MANY)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("block_elements", [(2048,), (8192, 32768)])
def test_overwriting_makes_a_new_store(
    store_of_step_2: list[Path], plain_queue: IoQueue, block_elements: tuple[int, ...]
) -> None:
    identity = replace(IDENTITY, seed=7)
    with create_store(
        store_of_step_2, plain_queue, overwrite=True, block_elements=block_elements, identity=identity
    ) as store:
        assert not Store.exists(store_of_step_2)
        import_all(store)
        run_step(store)
        assert sum(map(len, contents_of(store_of_step_2))) == store.nvme_bytes
    with open_store(store_of_step_2, plain_queue, identity=identity) as store:
        check_generation(store, 1)


def test_overwriting_with_other_directories(store_of_step_2: list[Path], tmp_path: Path, plain_queue: IoQueue) -> None:
    turned = [*store_of_step_2[::-1], tmp_path / "c"]
    with import_all(create_store(turned, plain_queue, overwrite=True)) as store:
        run_step(store)
    with open_store(turned, plain_queue) as store:
        check_generation(store, 1)
    with pytest.raises(BadInput, match=r"storage\.paths"):
        open_store(store_of_step_2, plain_queue)


def test_space_that_an_old_store_holds_counts(tmp_path: Path) -> None:
    need = SpaceNeed(directory=tmp_path / "new", num_bytes=shutil.disk_usage(tmp_path).free + TIB)
    with pytest.raises(EnvironmentFailure, match="need"):
        check_space([need])
    check_space([replace(need, held_bytes=2 * TIB)])
    with pytest.raises(EnvironmentFailure, match="need"):  # space that one file holds is not free for another
        check_space([need, SpaceNeed(directory=tmp_path, num_bytes=0, held_bytes=2 * TIB)])


def test_replacing_a_store_needs_no_more_space(tmp_path: Path, plain_queue: IoQueue) -> None:
    create_store([tmp_path], plain_queue, block_elements=MANY).close()
    held_bytes = (tmp_path / DATA_FILE_NAME).stat().st_blocks
    create_store([tmp_path], plain_queue, block_elements=MANY).close()
    assert (tmp_path / DATA_FILE_NAME).stat().st_blocks == held_bytes


def test_an_unfinished_import_is_replaced_without_overwrite(tmp_path: Path, plain_queue: IoQueue) -> None:
    for _ in range(2):
        create_store([tmp_path / "a", tmp_path / "b"], plain_queue).close()
        with pytest.raises(BadInput, match="incomplete: its import or restore never finished"):
            open_store([tmp_path / "a", tmp_path / "b"], plain_queue)
    import_all(create_store([tmp_path / "a", tmp_path / "b"], plain_queue)).close()


def test_a_file_of_a_store_elsewhere_is_not_replaced(tmp_path: Path, plain_queue: IoQueue) -> None:
    create_store([tmp_path / "a", tmp_path / "b"], plain_queue).close()
    with pytest.raises(BadInput, match=r"first directory is not in storage\.paths"):
        create_store([tmp_path / "c", tmp_path / "b"], plain_queue)
    assert not (tmp_path / "c").exists()
    create_store([tmp_path / "c", tmp_path / "b"], plain_queue, overwrite=True).close()


@pytest.mark.parametrize("text", [b"mine", b"mine" * 5000, b"\0" * 4096 + b"mine"])
def test_a_foreign_file_is_not_replaced(tmp_path: Path, plain_queue: IoQueue, text: bytes) -> None:
    (tmp_path / DATA_FILE_NAME).write_bytes(text)
    assert Store.exists([tmp_path])
    with pytest.raises(BadInput, match="is not a data file of Ratel"):
        create_store([tmp_path], plain_queue)
    assert (tmp_path / DATA_FILE_NAME).read_bytes() == text
    with pytest.raises(RatelError):
        open_store([tmp_path], plain_queue)


def test_every_failing_write_leaves_an_incomplete_store(tmp_path: Path) -> None:
    """Each call of making and importing a store fails in turn. Each time there is no store afterwards."""

    def make(directory: Path, queue: FaultyQueue) -> None:
        with create_store([directory], queue) as store:
            import_all(store)

    with FaultyQueue(request_bytes=64 << 10) as sound:
        make(tmp_path / "sound", sound)
    assert len(sound.calls) > 30
    for call in range(len(sound.calls)):
        faults = {call: Fault(error_number=errno.EIO)}
        with FaultyQueue(faults, request_bytes=64 << 10) as faulty, pytest.raises(IntegrityFailure):
            make(tmp_path, faulty)
        assert not Store.exists([tmp_path])
    with FaultyQueue() as sound, import_all(create_store([tmp_path], sound)) as store:
        check_generation(store, 0)


def test_an_interruption_leaves_an_incomplete_store(tmp_path: Path, plain_queue: IoQueue) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_store([tmp_path], plain_queue, progress=interrupt)
    assert not Store.exists([tmp_path])
    import_all(create_store([tmp_path], plain_queue)).close()  # and the lock is free


def test_read_only_directories_are_an_error(open_to_read_only: Path, plain_queue: IoQueue) -> None:
    open_to_read_only.chmod(0o555)
    with unprivileged():
        with pytest.raises(EnvironmentFailure, match="cannot be opened for writing: Permission denied"):
            create_store([open_to_read_only], plain_queue)
        with pytest.raises(EnvironmentFailure, match="cannot be created: Permission denied"):
            create_store([open_to_read_only / "new"], plain_queue)
    assert list(open_to_read_only.iterdir()) == []


def test_a_read_only_store_is_an_error(open_to_read_only: Path, plain_queue: IoQueue) -> None:
    import_all(create_store([open_to_read_only], plain_queue)).close()
    (open_to_read_only / DATA_FILE_NAME).chmod(0o444)
    with unprivileged(), pytest.raises(EnvironmentFailure, match="cannot be opened for writing: Permission denied"):
        open_store([open_to_read_only], plain_queue)
    (open_to_read_only / DATA_FILE_NAME).chmod(0o000)
    with unprivileged(), pytest.raises(EnvironmentFailure, match="cannot be read: Permission denied"):
        Store.exists([open_to_read_only])


def test_one_notice_says_where_direct_io_is_not_available(tmp_path: Path) -> None:
    fd = os.open("/proc/self/status", os.O_RDONLY)  # on a file system without O_DIRECT, wherever the tests run
    notices: list[str] = []
    try:
        use_direct_io([fd, fd], [tmp_path / "a" / "x", tmp_path / "b" / "x"], notices.append)
    finally:
        os.close(fd)
    assert len(notices) == 1
    assert "direct I/O is not available" in notices[0]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
def test_a_store_works_without_direct_io(plain_queue: IoQueue) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        with import_all(create_store([Path(directory)], plain_queue)) as store:
            run_step(store)
        with open_store([Path(directory)], plain_queue) as store:
            check_generation(store, 1)
            assert store.progress == progress_of(1)
