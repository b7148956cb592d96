"""The values of a specification, and what its sources say to the stores' clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wds_async as wds
from tests.servers import Origin, make_shards
from wds_async.errors import ConfigError, UnsafeContent
from wds_async.shardlists import spec
from wds_async.shardlists.spec import Spec, SpecSource


@pytest.fixture
def served(origin: Origin, tmp_path: Path) -> list[str]:
    """The URLs of two shards."""
    return [origin.add(path.name, path.read_bytes()) for path in make_shards(tmp_path / "shards", 2, 3)]


def test_samples_are_counted_where_every_source_tells() -> None:
    one = SpecSource("a", ("x.tar",), 1.0, nsamples=3)
    assert Spec((one, SpecSource("b", ("y.tar",), 1.0, nsamples=4))).nsamples == 7
    assert Spec((one, SpecSource("b", ("y.tar",), 1.0))).nsamples is None
    assert Spec((one, SpecSource("b", ("y.tar",), 0.0))).nsamples == 3
    assert Spec((one, SpecSource("b", ("y.tar",), 1.0, nsamples=4, resample=True))).nsamples is None


def test_each_source_has_its_own_options(origin: Origin, served: list[str]) -> None:
    mixed = {
        "dataset": [
            {"shards": served[0], "storage_options": {"http": {"headers": {"X-Who": "first"}}}},
            {"shards": served[1]},
        ]
    }
    samples = list(
        wds.WebDataset(mixed, shardshuffle=False, storage_options={"http": {"headers": {"X-Who": "the dataset"}}})
    )
    assert len(samples) == 6
    heard = {(request.path.rpartition("/")[2], request.headers["x-who"]) for request in origin.requests}
    assert heard == {(served[0].rpartition("/")[2], "first"), (served[1].rpartition("/")[2], "the dataset")}
    assert all("storage_options" not in sample["__source__"] for sample in samples)


def test_options_are_never_shown() -> None:
    mixed = {"dataset": [{"shards": "s3://b/x.tar", "storage_options": {"s3": {"secret": "HUSH"}}}]}
    loaded = spec.load(mixed)
    assert loaded.sources[0].storage_options.of("s3://b/x.tar")["secret"] == "HUSH"
    dataset = wds.WebDataset(mixed, shardshuffle=False)
    assert "HUSH" not in repr(loaded) + repr(dataset) + repr(dataset.pipeline)


def test_a_file_of_this_machine_may_have_them_and_a_fetched_one_not(
    origin: Origin, served: list[str], tmp_path: Path
) -> None:
    text = json.dumps({"dataset": [{"shards": served[0], "storage_options": {"http": {"token": "t"}}}]})
    (tmp_path / "mix.json").write_text(text)
    assert len(list(wds.WebDataset(str(tmp_path / "mix.json"), shardshuffle=False))) == 3
    assert origin.requests[-1].headers["authorization"] == "Bearer t"
    with pytest.raises(UnsafeContent, match="may not say where credentials go"):
        wds.WebDataset(origin.add("mix.json", text.encode()), shardshuffle=False)


def test_a_specification_is_read_with_the_datasets_options(origin: Origin, served: list[str]) -> None:
    url = origin.add("mix.json", json.dumps({"dataset": [{"shards": served[0]}]}).encode())
    options = {"http": {"token": "t"}}
    assert len(list(wds.WebDataset(url, shardshuffle=False, storage_options=options))) == 3
    assert {request.headers["authorization"] for request in origin.requests} == {"Bearer t"}


def test_what_is_no_options_is_named(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text("dataset:\n- shards: x.tar\n  storage_options: 5\n")
    with pytest.raises(ConfigError, match=r"mix.yaml, line 3.*storage_options"):
        spec.load(str(tmp_path / "mix.yaml"))
