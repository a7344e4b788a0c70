"""Whole shards that come at once are made durable together, and answered each for itself.

Compared with: the bytes that were sent, and the answer that each shard gets when it is alone. Run
alone: pytest tests/coordinator/test_finish.py
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

from coordinator import finish
from coordinator.events import ShardStored
from coordinator.finish import Finisher, Upload
from coordinator.inspection import PIECE_BYTES, Checked
from coordinator.monitor import Monitor
from coordinator.refused import RefusedRequest
from coordinator.store import Store
from loco.digest import bytes_digest
from loco.layout import Layout
from loco.wire.protocol import BLOCK_BYTES, INLINE_BYTES

CONFIG = config_of(quorum={"min_sites": 2}, run={"rounds": 3})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = create_store(tmp_path, CONFIG)
    yield store
    store.close()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose names were made durable, one entry a sync."""
    done: list[Path] = []
    real = finish.sync_directory

    def counted(path: Path) -> None:
        done.append(path)
        real(path)

    monkeypatch.setattr(finish, "sync_directory", counted)
    return done


def finisher_of(store: Store) -> Finisher:
    return Finisher(store, Monitor(store, keys=None, plaintext=False))


def upload(store: Store, site: str, body: bytes, *, sent: bytes | None = None) -> Upload:
    """A shard that declares `body`; `sent` is what came instead."""
    digest = bytes_digest(body)
    event = ShardStored(
        site=site, incarnation=1, round=0, fragment=0, shard=0, num_shards=1, size_bytes=len(body),
        digest=digest.hex(), tokens=10, inner_steps=5, data_cursor=5,
    )  # fmt: skip
    whole = finisher_of(store).begin(event, store.incoming(0, f"{site}.1.0.{digest.hex()}"), 0)
    whole.last, whole.whole = body if sent is None else sent, True
    return whole


def outcomes(store: Store, uploads: list[Upload]) -> list[Checked | BaseException]:
    """All at once, in one turn of the event loop."""

    async def together() -> list[Checked | BaseException]:
        finisher = finisher_of(store)
        return await asyncio.gather(*map(finisher.finish, uploads), return_exceptions=True)

    return asyncio.run(together())


def stored(store: Store) -> dict[str, bytes]:
    return {
        path.name.partition(".")[0]: path.read_bytes() for path in store.contributions(0).iterdir()
    }


def test_small_shards_share_the_sync_of_their_directory(store: Store, syncs: list[Path]) -> None:
    bodies = {f"site-{i}": shard_body(vector(LAYOUT, i), CONFIG) for i in range(8)}
    answers = outcomes(store, [upload(store, site, body) for site, body in bodies.items()])
    assert all(isinstance(answer, Checked) for answer in answers)
    assert stored(store) == bodies
    # One in each thread at once; the six that came meanwhile together.
    assert len(syncs) == finish.THREADS + 1


def test_each_is_answered_for_itself(store: Store) -> None:
    right = shard_body(vector(LAYOUT, 1), CONFIG)
    flipped = bytes([right[0] ^ 1]) + right[1:]
    uploads = [
        *(upload(store, f"good-{i}", right) for i in range(3)),
        upload(store, "corrupt", right, sent=flipped),
        upload(store, "malformed", flipped),
        upload(store, "short", right, sent=right[:-1]),
        *(upload(store, f"late-{i}", right) for i in range(3)),
    ]
    reasons = [a.reason if isinstance(a, RefusedRequest) else a for a in outcomes(store, uploads)]
    assert reasons[3:6] == ["corrupt", "payload", ""]
    assert all(isinstance(answer, Checked) for answer in reasons[:3] + reasons[6:])
    assert set(stored(store)) == {f"{kind}-{i}" for kind in ("good", "late") for i in range(3)}
    left = {path.name.partition(".")[0] for path in (store.directory / "incoming/0").iterdir()}
    assert left == {"short"}, "what can go on stays, what is refused goes"


def test_an_error_of_the_directory_is_everybodys(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is not durable must not be acknowledged."""

    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(finish, "sync_directory", broken)
    body = shard_body(vector(LAYOUT, 1), CONFIG)
    answers = outcomes(store, [upload(store, f"site-{i}", body) for i in range(4)])
    assert [type(answer) for answer in answers] == [OSError] * 4


def test_nobody_waits_for_a_large_shard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "THREADS", 1)
    batches: list[int] = []
    real = Finisher._finish

    def counted(self: Finisher, batch: list[finish._Waiting]) -> list[finish.Outcome]:
        batches.append(len(batch))
        return real(self, batch)

    monkeypatch.setattr(Finisher, "_finish", counted)
    body = shard_body(vector(LAYOUT, 1), CONFIG)
    large = upload(store, "large", bytes(INLINE_BYTES + 1))
    small = [upload(store, f"small-{i}", body) for i in range(3)]
    outcomes(store, [small[0], small[1], large, small[2]])
    assert batches == [1, 2], "the large one is in none of them"


def test_a_long_shard_is_checked_while_it_comes(tmp_path: Path) -> None:
    """After the last byte less than a piece is left to read."""
    layout, config = Layout.of([("a", (2500, 1024))]), config_of(codec={"bits": 32})
    with closing(create_store(tmp_path, config, layout=layout)) as store:
        check_while_it_comes(store, shard_body(vector(layout, 1), config, layout=layout))


def check_while_it_comes(store: Store, body: bytes) -> None:
    assert len(body) > 8 * PIECE_BYTES
    long = upload(store, "paris", body)
    long.last, long.whole = b"", False

    async def arrive() -> Checked:
        finisher = finisher_of(store)
        for start in range(0, len(body) - BLOCK_BYTES, BLOCK_BYTES):
            await finisher.write(long, body[start : start + BLOCK_BYTES])
            assert long.offset - long.inspection.read_bytes < PIECE_BYTES + BLOCK_BYTES
        long.last = body[long.offset :]
        return await finisher.finish(long)

    assert asyncio.run(arrive()).num_values == store.layout.num_elements
    assert stored(store) == {"paris": body}


def test_long_shards_wait_for_the_disk_side_by_side(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are checked at once: each sync returns when all have begun."""
    num_shards = finish.THREADS + 2
    all_here, real = threading.Barrier(num_shards, timeout=20), finish._sync

    def together(path: Path) -> None:
        all_here.wait()
        real(path)

    monkeypatch.setattr(finish, "_sync", together)
    body = shard_body(vector(LAYOUT, 1), CONFIG)
    monkeypatch.setattr(finish, "INLINE_BYTES", len(body) - 1)
    uploads = [upload(store, f"site-{i}", body) for i in range(num_shards)]
    assert all(isinstance(answer, Checked) for answer in outcomes(store, uploads))
    assert len(stored(store)) == num_shards
