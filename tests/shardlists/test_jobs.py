"""The folder of a job is read as a list of its shards, each compared with the CRC-32C in the job's records."""

from __future__ import annotations

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import wds_async as wds
from tests.finished import SAMPLES, write_job
from tests.servers import moto as moto_server
from tests.servers.nginx import Nginx
from tests.servers.radosgw import KEY, SECRET, radosgw  # noqa: F401
from wds_async.errors import AccessDenied, ChecksumMismatch, ConfigError, ShardNotFound, UnsafeContent
from wds_async.shardlists.jobs import is_job_folder
from wds_async.shardlists.lists import MultiShardSample, ResampledShards
from wds_async.shardlists.spec import load

clean_aws = moto_server.clean_aws


def keys(urls: Any, **kw: Any) -> list[str]:
    return [sample["__key__"] for sample in wds.WebDataset(urls, shardshuffle=False, **kw)]


def expected(*tasks: int) -> list[str]:
    return [f"{task}-{n}" for task in tasks for n in range(SAMPLES)]


def damage(shard: Path) -> None:
    """Change one byte of a sample, which a tar does not show."""
    body = bytearray(shard.read_bytes())
    body[700] ^= 1
    shard.write_bytes(body)


@pytest.mark.parametrize(
    ("name", "yes"),
    [
        ("s3://out/_wds/map", True),
        ("out/_wds/caption-v2.1/", True),
        ("_wds/x", True),
        ("/a/_wds/x.gather", True),
        ("s3://out/_wds/", False),
        ("s3://out/my_wds/x", False),
        ("s3://out/_wds/x/finished.json", False),
        ("s3://out/_wds/x.tar", False),
        ("s3://out/_wds/x.tar.gz", False),
        ("s3://out/_wds/x-{0..3}.tar", False),
        ("http://h/_wds/x?signature=1", False),
    ],
)
def test_names_of_jobs(name: str, yes: bool) -> None:
    assert is_job_folder(name) is yes


def test_a_finished_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_job(tmp_path / "out")
    for name in (folder, f"{folder}/", Path(folder), f"file:{folder}", f"{folder}/finished.json"):
        dataset = wds.WebDataset(name, shardshuffle=False)
        assert len(dataset) == 3 * SAMPLES
        samples = list(dataset)
        assert [sample["__key__"] for sample in samples] == expected(0, 1, 2)
    assert samples[0]["__source__"] == {"name": "j"}
    monkeypatch.chdir(tmp_path / "out")
    samples = list(wds.WebDataset("_wds/j", shardshuffle=False))
    assert [sample["__url__"] for sample in samples[::SAMPLES]] == [f"x-{n:02d}.tar" for n in range(3)]


def test_a_shard_that_is_not_the_recorded_one(tmp_path: Path) -> None:
    folder = write_job(tmp_path)
    damage(tmp_path / "x-01.tar")
    with pytest.raises(ChecksumMismatch, match=r"x-01\.tar.*crc32c of its \d+ bytes.*its list of shards gives"):
        keys(folder)
    assert keys(folder, verify="never") == expected(0, 1, 2)
    assert keys(folder, handler=wds.ignore_and_continue, verify="always") == expected(0, 2)
    with pytest.raises(ChecksumMismatch, match=r"read 3 times"):
        keys(folder, verify="always")


@pytest.mark.parametrize("options", [{"interleave": 2}, {"split": "bytes"}, {"resampled": True}, {"shardshuffle": 9}])
def test_every_way_of_reading_compares(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_job(tmp_path)
    good = wds.WebDataset(folder, **{"shardshuffle": False, "seed": 1, **options})
    assert sorted({sample["__key__"] for _, sample in zip(range(200), good, strict=False)}) == expected(0, 1, 2)
    for n in range(3):
        damage(tmp_path / f"x-{n:02d}.tar")
    with pytest.raises(ChecksumMismatch, match=r"x-\d\d\.tar"):
        list(wds.WebDataset(folder, **{"shardshuffle": False, "seed": 1, **options}))


def test_lists_keep_the_checksums(tmp_path: Path) -> None:
    source = load(write_job(tmp_path)).sources[0]
    shards = [{"url": url, "crc32c": source.checksums[url]} for url in source.urls]
    every = MultiShardSample(write_job(tmp_path))
    assert sorted(every, key=lambda one: one["url"]) == shards
    drawn = ResampledShards(wds.shardlists.Expanded(source.urls, source.checksums), 20)
    assert all(one in shards for one in pickle.loads(pickle.dumps(drawn)))


def test_an_epoch_goes_on_from_a_state(tmp_path: Path) -> None:
    folder = write_job(tmp_path)
    dataset = wds.WebDataset(folder, shardshuffle=False)
    items = iter(dataset)
    had = [next(items)["__key__"] for _ in range(SAMPLES + 2)]
    state = dataset.state_dict()
    resumed = wds.WebDataset(folder, shardshuffle=False)
    resumed.load_state_dict(state)
    assert had + [sample["__key__"] for sample in resumed] == expected(0, 1, 2)


def test_a_copy_in_a_cache_is_compared_and_fetched_again(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "out")
    options = {"cache_dir": tmp_path / "cache", "cache_local": True}
    assert keys(folder, **options) == expected(0, 1, 2)
    (copy,) = (tmp_path / "cache").rglob("x-01.tar*")
    damage(copy)
    with pytest.raises(ChecksumMismatch, match=r"x-01\.tar"):
        keys(folder, **options)
    assert keys(folder, **options) == expected(0, 1, 2)


# -- jobs that are not finished ----------------------------------------------------------------------------------------


def test_what_is_finished_of_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_job(tmp_path, 4, finished=[0, 2])
    with caplog.at_level(logging.WARNING, "wds_async"):
        dataset = wds.WebDataset(folder, shardshuffle=False)
    assert f"{folder}: this job is not finished: the 2 shards of the 2 tasks" in caplog.text
    assert len(dataset) == 2 * SAMPLES
    assert [sample["__key__"] for sample in dataset] == expected(0, 2)
    damage(tmp_path / "x-02.tar")
    with pytest.raises(ChecksumMismatch, match=r"x-02\.tar"):
        list(dataset)


def test_a_job_of_which_nothing_is_finished(tmp_path: Path) -> None:
    folder = write_job(tmp_path, 2, finished=[])
    nothing = pytest.raises(ShardNotFound, match=r"/_wds/j: no task of this job is finished, or there is no such job")
    with nothing:
        wds.WebDataset(folder)
    with nothing:
        wds.WebDataset(f"{tmp_path}/none/_wds/j")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"finished\.json.*holds no `shardlist`"),
        ('{"wids_version": 1, "shardlist": []}', r"finished\.json.*has written no shards"),
        ("{", r"finished\.json, line 1.*not valid JSON"),
        ('{"wids_version": 1, "shardlist": [{"url": "x.tar", "crc32c": 7}]}', r"finished\.json, line 1.*no CRC-32C"),
        ('{"wids_version": 1, "shardlist": [{"url": "x.tar", "crc32c": "12"}]}', r"eight hexadecimal digits"),
    ],
)
def test_a_list_that_no_job_has_written(tmp_path: Path, text: str, message: str) -> None:
    folder = write_job(tmp_path)
    Path(folder, "finished.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        wds.WebDataset(folder)


def test_records_that_no_job_has_written(tmp_path: Path) -> None:
    folder = write_job(tmp_path, 2, finished=[0])
    record = Path(folder, "00000.json")
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "outputs": [one for one in values["outputs"] if one["samples"] is None]}))
    with pytest.raises(ConfigError, match="its 1 finished tasks have written no shards"):
        wds.WebDataset(folder)
    for broken in ("[]", '{"outputs": 7}', '{"outputs": [{"url": "x.tar"}]}', '{"outputs": [7]}'):
        record.write_text(broken)
        with pytest.raises(ConfigError, match=r"00000\.json.*no record of a task"):
            wds.WebDataset(folder)


# -- stores (the others are in tests/clouds/test_conformance.py) -------------------------------------------------------


def test_a_job_in_ceph(radosgw: Any, clean_aws: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    for name, value in {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "ENDPOINT_URL": radosgw.base}.items():
        clean_aws.setenv(f"AWS_{name}", value)
    clean_aws.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = pytest.importorskip("boto3").session.Session().client("s3")
    client.create_bucket(Bucket="jobs")
    write_job(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "jobs", str(path.relative_to(tmp_path)))
    assert len(wds.WebDataset("s3://jobs/_wds/j")) == 3 * SAMPLES
    assert keys("s3://jobs/_wds/j") == expected(0, 1, 2)
    client.delete_object(Bucket="jobs", Key="_wds/j/finished.json")
    assert keys("s3://jobs/_wds/j") == expected(0, 1, 2)
    damage(tmp_path / "x-00.tar")
    client.upload_file(str(tmp_path / "x-00.tar"), "jobs", "x-00.tar")
    with pytest.raises(ChecksumMismatch, match=r"s3://jobs/x-00\.tar"):
        keys("s3://jobs/_wds/j")


def test_a_web_server_that_lists_nothing(tmp_path: Path) -> None:
    folder = write_job(tmp_path)
    with Nginx(tmp_path) as server:
        assert keys(f"{server.base}/_wds/j") == expected(0, 1, 2)
        os.remove(f"{folder}/finished.json")
        with pytest.raises(AccessDenied, match=r"/_wds/j: this job is not finished.*cannot be listed"):
            wds.WebDataset(f"{server.base}/_wds/j")


def test_a_fetched_list_names_no_files_of_this_machine(tmp_path: Path) -> None:
    folder = write_job(tmp_path)
    Path(folder, "finished.json").write_text('{"wids_version": 1, "shardlist": [{"url": "/etc/passwd"}]}')
    with Nginx(tmp_path) as server, pytest.raises(UnsafeContent, match="/etc/passwd"):
        wds.WebDataset(f"{server.base}/_wds/j")
