"""Ray Data over our shards, on a real cluster: every sample once, whatever fails."""

from __future__ import annotations

import ast
import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.finished import SAMPLES, write_job
from tests.packages import need_package
from tests.servers import Origin
from tests.servers.shards import make_shard
from wds_async.distributed import raydata
from wds_async.errors import ChecksumMismatch, ConfigError, TruncatedShard, UrlError
from wds_async.handlers import ignore_and_continue

pytestmark = [
    pytest.mark.usefixtures("ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(240),  # Ray starts a process for each worker, and those of Ray Train import torch
]


def contents(shards: int = 4, samples: int = 50, size: int = 2000) -> list[dict[str, dict[str, bytes]]]:
    """Fields by key, for each shard."""
    numbers = [range(shard * samples, (shard + 1) * samples) for shard in range(shards)]
    return [{f"{n:06d}": {"bin": random.Random(n).randbytes(size), "cls": str(n).encode()} for n in r} for r in numbers]


def write_shards(folder: Path, shards: list[dict[str, dict[str, bytes]]]) -> str:
    for number, shard in enumerate(shards):
        (folder / f"in-{number}.tar").write_bytes(make_shard(shard))
    return str(folder / f"in-{{0..{len(shards) - 1}}}.tar")


def rows_by_key(dataset: Any) -> dict[str, dict[str, bytes]]:
    """The fields of all rows; each key came once."""
    rows = dataset.take_all()
    again = {key: count for key, count in Counter(row["__key__"] for row in rows).items() if count > 1}
    assert not again
    return {row["__key__"]: {k: v for k, v in row.items() if not k.startswith("__")} for row in rows}


def joined(shards: list[dict[str, dict[str, bytes]]]) -> dict[str, dict[str, bytes]]:
    return {key: fields for shard in shards for key, fields in shard.items()}


def test_every_sample_is_a_row(tmp_path: Path) -> None:
    shards = contents()
    dataset = raydata.read(write_shards(tmp_path, shards), block_bytes="32K")
    assert rows_by_key(dataset) == joined(shards)
    for bundle in dataset.iter_internal_ref_bundles():
        assert all(entry.metadata.size_bytes <= 32 << 10 for entry in bundle.blocks)
    row = dataset.limit(1).take_all()[0]
    assert list(row) == ["__key__", "__url__", "__offset__", "bin", "cls"]
    assert row["__url__"].startswith(str(tmp_path))


def test_named_fields_give_the_schema_before_anything_is_read(tmp_path: Path) -> None:
    write_shards(tmp_path, contents(2))
    dataset = raydata.read([str(tmp_path / "in-*.tar")], fields=["cls", "txt"])
    schema = dataset.schema(fetch_if_missing=False)
    assert schema.names == ["__key__", "__url__", "__offset__", "cls", "txt"]
    row = dataset.take(1)[0]
    assert (row["cls"].isdigit(), row["txt"]) == (True, None)


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"key": batch["__key__"], "number": np.array([2 * int(value) for value in batch["cls"]])}


def test_it_works_with_operators_and_iterators_of_ray(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, contents())
    dataset = raydata.read(urls, fields=["cls"])
    doubled = dataset.map_batches(_doubled, batch_format="numpy").take_all()
    assert sorted(row["number"] for row in doubled) == [2 * number for number in range(200)]

    def seen(split: Any) -> list[int]:
        return [int(value) for batch in split.iter_batches(batch_format="pandas") for value in batch["cls"]]

    with ThreadPoolExecutor(2) as threads:  # each split waits for the other at the start
        parts = list(threads.map(seen, dataset.streaming_split(2, equal=False)))
    assert sorted(parts[0] + parts[1]) == list(range(200))


def _train(config: dict[str, Any]) -> None:
    """Write down the samples that this worker of Ray Train gets, in two epochs."""
    from ray import train

    rank, shard = train.get_context().get_world_rank(), train.get_dataset_shard("train")
    for epoch in range(2):
        batches = shard.iter_torch_batches(
            batch_size=10, collate_fn=lambda batch: [int(value) for value in batch["cls"]]
        )
        Path(config["folder"], f"{epoch}-{rank}").write_text(str([number for batch in batches for number in batch]))


def test_ray_train_gets_every_sample_once_an_epoch(tmp_path: Path) -> None:
    need_package("torch")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        _train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
        datasets={"train": raydata.read(write_shards(tmp_path, contents()), fields=["cls"], block_bytes="8K")},
    )
    trainer.fit()
    for epoch in range(2):
        parts = [ast.literal_eval((tmp_path / f"{epoch}-{rank}").read_text()) for rank in range(2)]
        assert sorted(parts[0] + parts[1]) == list(range(200))
        assert all(parts)


def test_rows_keep_their_order_where_ray_is_told_to(ray: Any, tmp_path: Path) -> None:
    dataset = raydata.read(write_shards(tmp_path, contents()), fields=["cls"], block_bytes="8K")
    dataset.context.execution_options.preserve_order = True
    assert [int(row["cls"]) for row in dataset.take_all()] == list(range(200))


def test_a_few_rows_and_the_schema_read_a_few_shards() -> None:
    shards = contents(24, 40, 20_000)
    with Origin({f"/{number}.tar": make_shard(shard) for number, shard in enumerate(shards)}) as origin:
        urls = [origin.url(f"{number}.tar") for number in range(24)]
        dataset = raydata.read(urls, concurrency=2)
        origin.forget()  # the requests that looked the shards up
        assert {len(rows) for rows in (dataset.take(3), dataset.limit(3).take_all())} == {3}
        assert dataset.schema().names[3:] == ["bin", "cls"]
        read = {request.path for request in origin.requests}
        assert 0 < len(read) <= 12  # a task that has begun reads the first blocks of its shard


def test_a_job_is_read_and_its_samples_are_counted_without_reading(tmp_path: Path) -> None:
    job = write_job(tmp_path, 3)
    shard = tmp_path / "x-01.tar"
    assert raydata.read(job).count() == 3 * SAMPLES
    assert len(rows_by_key(raydata.read(job))) == 3 * SAMPLES
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    assert raydata.read(job).count() == 3 * SAMPLES  # as the list states it
    with pytest.raises(ChecksumMismatch, match=r"x-01\.tar"):
        raydata.read(job, expect=["bin"]).count()
    mix = {"dataset": [{"shards": str(shard)}, {"shards": str(tmp_path / "x-02.tar")}]}
    with pytest.raises(ConfigError, match=r"a mix of 2 sources.*Dataset\.union"):
        raydata.read(mix)


def test_the_number_of_blocks_is_that_of_tasks_as_far_as_there_are_shards(tmp_path: Path) -> None:
    shards = contents(4)
    urls = write_shards(tmp_path, shards)
    for name, number, blocks in (("override_num_blocks", 2, 2), ("parallelism", 3, 4), ("override_num_blocks", 8, 8)):
        dataset = raydata.read(urls, **{name: number}).materialize()
        assert (dataset.num_blocks(), rows_by_key(dataset)) == (blocks, joined(shards))


class Dies:
    """A function for batches that kills its process once, for all processes together."""

    def __init__(self, folder: Path) -> None:
        self.mark = str(folder / "died")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if int(batch["cls"][0]) >= 60:
            try:
                os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return batch
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_a_killed_worker_loses_and_doubles_nothing(tmp_path: Path) -> None:
    shards = contents()
    dataset = raydata.read(write_shards(tmp_path, shards), block_bytes="16K")
    assert rows_by_key(dataset.map_batches(Dies(tmp_path).__call__, batch_size=10)) == joined(shards)
    assert (tmp_path / "died").exists()


def test_an_error_names_the_shard_and_has_its_class(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, contents(2))
    bad = tmp_path / "in-1.tar"
    bad.write_bytes(bad.read_bytes()[:50_000])
    with pytest.raises(TruncatedShard, match=r"in-1\.tar: the shard ends at byte 50000"):
        raydata.read(urls).take_all()
    assert 50 < raydata.read(urls, handler=ignore_and_continue).count() < 100


def test_wrong_arguments_are_found_before_anything_is_listed(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_bytes": "many"}, "block_bytes='many'"),
        ({"fields": "jpg"}, "fields='jpg'"),
        ({"groups": -1}, "groups=-1"),
        ({"override_num_blocks": 0}, "override_num_blocks=0"),
        ({"feilds": ["jpg"]}, "no argument 'feilds'"),
        ({"on_corrupt": "hope"}, "on_corrupt='hope'"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            raydata.read(str(tmp_path / "none-*.tar"), **options)
    with pytest.raises(UrlError, match="empty list"):
        raydata.read([])
