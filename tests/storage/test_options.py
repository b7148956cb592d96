"""What a program says to the stores' clients, by scheme."""

from __future__ import annotations

import pickle

import pytest

from wds_async.errors import ConfigError
from wds_async.storage.options import NO_OPTIONS, NOTHING_GIVEN, Options, StorageOptions
from wds_async.storage.registry import locate


def test_options_by_scheme_and_its_aliases() -> None:
    given = StorageOptions({"s3": {"key": "k"}, "gcs": {"token": "anon"}, "https": {"token": "t"}})
    assert given.of("s3://b/x") == given.of("S3A://b/x") == Options({"key": "k"})
    assert given.of("gs://b/x") == Options({"token": "anon"})
    assert given.of("http://h/x") == given.of("https://h/x") == Options({"token": "t"})
    assert given.of("az://c/x") is NO_OPTIONS
    assert given.of("/a/path") is NO_OPTIONS


def test_one_stores_options_are_those_of_every_url() -> None:
    given = StorageOptions({"key": "k", "client_kwargs": {"verify": False}})
    assert given.of("s3://b/x") == given.of("memory://x") == Options({"key": "k", "client_kwargs": {"verify": False}})
    # An option that has a lesser scheme's name, but no options in it, is an option.
    assert StorageOptions({"file": "x"}).of("s3://b") == Options({"file": "x"})


@pytest.mark.parametrize("given", [{"s3": {}, "gz": {}}, {"s3": "x"}, {"gs": {"token": "t"}, "key": "k"}, {"az": None}])
def test_what_is_half_by_scheme(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="storage_options: '"):
        StorageOptions(given)


def test_a_chain_gets_the_options_of_its_links() -> None:
    given = StorageOptions({"s3": {"key": "k"}, "simplecache": {"cache_storage": "/c"}})
    assert given.of("simplecache::s3://b/x") == Options({"s3": {"key": "k"}, "simplecache": {"cache_storage": "/c"}})
    assert given.of("zip://x.tar::gs://b/y.zip") == NO_OPTIONS


def test_another_endpoint_is_another_place() -> None:
    here, there = Options({"endpoint_url": "http://a"}), Options({"client_kwargs": {"endpoint_url": "http://b"}})
    assert here.place != there.place
    assert here.place == Options({"key": "other", "endpoint_url": "http://me:secret@a".replace("me:secret@", "")}).place
    assert Options({"key": "k"}).place == NO_OPTIONS.place == ""
    one, other = (f"BlobEndpoint=http://h/acct;AccountKey={key}" for key in ("a==", "b=="))
    assert Options({"connection_string": one}).place == Options({"connection_string": other}).place != ""


def test_nothing_given() -> None:
    assert not StorageOptions()
    assert not StorageOptions({})
    assert not NOTHING_GIVEN
    assert StorageOptions({"s3": {}})
    assert NOTHING_GIVEN.of("s3://b/x") is NO_OPTIONS


@pytest.mark.parametrize("given", ["key=x", 5, [("key", "x")], {1: "x"}])
def test_what_is_no_options(given: object) -> None:
    with pytest.raises(ConfigError, match="storage_options"):
        StorageOptions(given)  # type: ignore[arg-type]


def test_values_are_never_shown() -> None:
    given = StorageOptions({"s3": {"secret": "HUSH"}})
    flat = StorageOptions({"secret": "HUSH"})
    place = locate("s3://b/x", options=given)
    for shown in (repr(given), repr(flat), repr(given.of("s3://b")), repr(place), str(place)):
        assert "HUSH" not in shown
    assert "secret" in repr(flat)
    assert "s3" in repr(given)


def test_options_are_values() -> None:
    first, second = Options({"b": 1, "a": {"x": 2}}), Options({"a": {"x": 2}, "b": 1})
    assert first == second
    assert hash(first) == hash(second)
    assert first != Options({"a": {"x": 3}, "b": 1})
    assert first != {"a": {"x": 2}, "b": 1}
    assert dict(pickle.loads(pickle.dumps(first))) == {"a": {"x": 2}, "b": 1}
    given = pickle.loads(pickle.dumps(StorageOptions({"s3": {"key": "k"}})))
    assert given.of("s3://b") == Options({"key": "k"})
    assert StorageOptions(given).of("s3://b") == Options({"key": "k"})


def test_what_is_changed_afterwards_changes_nothing() -> None:
    mine = {"key": "k"}
    given = StorageOptions({"s3": mine})
    mine["key"] = "other"
    assert given.of("s3://b")["key"] == "k"
