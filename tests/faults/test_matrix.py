"""Every fault, in every store, for every third request, and always: what was promised is what comes."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import objects as shards
from tests.faults.expectations import (
    COLUMNS,
    ERROR,
    FAULTS,
    HEALED,
    MODES,
    UNSEEN,
    VERIFIED,
    VERIFIED_MODES,
    expected,
    verified,
)
from tests.faults.reading import (
    ATTEMPTS,
    BUDGET_PARTS,
    CONNECTIONS,
    NO_STALL_S,
    RENEWALS,
    STALL_S,
    Reading,
    check,
    check_place,
    read,
)
from tests.faults.script import write
from tests.faults.worlds import Setting, world
from tests.servers import Tls
from tests.servers.behaviour import Sent
from tests.servers.moto import remember_models

_CLEANED = ("AWS_", "BOTO_", "GOOGLE_", "GCE_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST", "AZURE_", "AIS_", "USE_AIS_FOR",
            "WDS_", "GOPEN_", "FSSPEC_", "NETRC")  # fmt: skip

_AFTER_ATTEMPTS = ("AccessDenied", "FetchTimeout", "TransferError")

_ONCE_TOO = ("http", "aiohttp")
"""Columns that have each fault once, too. Elsewhere every third request has it, which is once and again; only a storm
that ends is something else: several requests in a row."""
CELLS = [
    (column, fault, mode)
    for column in COLUMNS
    for fault in FAULTS
    for mode in MODES
    if mode != "once" or column in _ONCE_TOO or fault == "storm"
]


@pytest.fixture(scope="module")
def clients() -> None:
    """The stores' clients are imported, which takes seconds, before a reader counts those that it waits for them."""
    for name in ("s3fs", "gcsfs", "adlfs", "aistore"):
        importlib.import_module(name)
    remember_models()


@pytest.fixture
def setting(clients: None, tls: Tls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Setting:
    """No setting of this machine's own, and certificates."""
    for name in list(os.environ):
        if name.startswith(_CLEANED) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    return Setting(monkeypatch.setenv, tmp_path, tls)


@pytest.mark.parametrize(("column", "fault", "mode"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_cell(column: str, fault: str, mode: str, setting: Setting) -> None:
    promised, slow = expected(column, fault, mode), FAULTS[fault].slow
    objects, stall_s = (shards.small(), STALL_S) if slow else (shards.large(), NO_STALL_S)
    if fault == "trickle" and not COLUMNS[column].direct:
        stall_s = NO_STALL_S  # it is no stall there, and a busy machine must not make it one
    with world(column, objects, setting) as store:
        script = write(store, objects, fault, mode)
        reading = read(store, impatient=promised.kind == ERROR, stall_s=stall_s)
    check(reading, promised, objects, script)
    if fault == "corrupt_header":
        check_place(reading, script)
    sent = [one for one in store.data.sent if store.is_data(one.request)]
    hit = [one for one in sent if one.behaviour is script.behaviour]
    assert hit, "the fault never came"
    direct = COLUMNS[column].direct
    retold = CONNECTIONS if fault == "refused" else 1  # those that were on their way break with it
    if fault in ("forbidden", "missing") and not direct:
        retold = 2  # what is refused is opened anew, which asks for one byte, for the size
    most = objects.parts + len(hit) * retold + 2 * CONNECTIONS + (0 if direct else len(objects.contents))
    assert len(sent) <= most, f"{len(sent)} requests, {len(hit)} of them hit; {most} would do"
    if promised.error in _AFTER_ATTEMPTS:
        attempts = 1 + RENEWALS if fault == "expiring_signature" else ATTEMPTS
        ways = 2 * len(objects.contents) if fault == "bad_chunk" else 0  # by range, in order, and by aiohttp
        # Each may ask a second time, on a new connection or anew; and as many parts as the budget holds may have failed
        # before a consumer that had to wait for a core sees the first.
        assert len(hit) <= 2 * attempts * BUDGET_PARTS + ways + 1
    if promised.kind in (HEALED, UNSEEN):
        again = len(hit) * _lost_bytes(fault, objects, direct=direct)
        again += 0 if direct else len(objects.contents) + len(hit)  # others are asked for one byte first, for the size
        _check_bytes(sent, reading, objects.total_bytes, objects.total_bytes + again)


DAMAGED = [(c, f, m) for c in VERIFIED for f in ("corrupt_byte", "corrupt_header") for m in VERIFIED_MODES]


@pytest.mark.parametrize(("column", "fault", "mode"), DAMAGED, ids=["-".join(cell) for cell in DAMAGED])
def test_cell_verified(column: str, fault: str, mode: str, setting: Setting) -> None:
    promised, objects = verified(fault, mode), shards.large()
    with world(column, objects, replace(setting, checksums=True)) as store:
        script = write(store, objects, fault, mode)
        reading = read(store, impatient=promised.kind == ERROR, stall_s=NO_STALL_S, verify="always")
    check(reading, promised, objects, script)
    if promised.kind != HEALED:
        assert reading.samples == []  # nothing of a shard that is not good
    else:
        assert reading.stats.verified_shards == len(objects.contents)
        sent = [one for one in store.data.sent if store.is_data(one.request)]
        again = len({name for name, _ in script.flipped}) * -(-objects.largest // shards.PART_BYTES)
        sizes = 0 if COLUMNS[column].direct else 2 * len(objects.contents)  # asked for by each of the readings
        assert len(sent) <= objects.parts + again + 2 * CONNECTIONS + sizes  # a shard is read once more, as a whole


def _check_bytes(sent: list[Sent], reading: Reading, least: int, most: int) -> None:
    """No byte came twice that was good, by our own count and by the server's."""
    assert reading.stats.bytes == least
    assert least <= reading.stats.wire_bytes <= most
    served = sum(one.body_bytes for one in sent if one.status in (200, 206))
    assert served <= most, f"{served - most} bytes too many were sent"


def _lost_bytes(fault: str, objects: shards.Objects, *, direct: bool) -> int:
    """The bytes that one hit makes worthless, at most: none where the answer broke, all where it was the wrong one."""
    if fault in ("ignored_range", "bad_chunk", "no_length_cut"):
        return 3 * objects.largest  # the answer, the whole once more in order, and the parts that were on their way
    if fault == "trickle":
        return 4 << 10  # what was on its way when it was broken off
    if fault == "refused":
        return CONNECTIONS * shards.PART_BYTES
    if fault in ("length_above", "length_below", "shifted_range"):
        return shards.PART_BYTES
    if not direct and fault in ("reset_mid_body", "fin_mid_body", "stall", "expiring_signature"):
        return shards.PART_BYTES  # what others read is taken whole or not at all
    return 0
