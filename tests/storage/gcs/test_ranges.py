"""Ranges by gcsfs's session (under faults: `tests/storage/test_checked.py`)."""

from __future__ import annotations

from wds_async.storage.gcs.backend import pinned_by


def test_the_generation_pins_an_object() -> None:
    assert pinned_by({"etag": '"e"', "x-goog-generation": "7"}, 5) == 'etag "e", generation 7'
    assert pinned_by({"x-goog-generation": "7"}, 5) != pinned_by({"x-goog-generation": "8"}, 5)
    assert pinned_by({"etag": '"e"'}, 5) == 'etag "e"'
