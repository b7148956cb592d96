"""Other frameworks: NumPy, torchdata's nodes, Arrow, Hugging Face: what they read, and where they resume."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_async as wds
from tests.packages import need_package
from wds_async.errors import ConfigError, StateError

SAMPLES = 53


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    with wds.ShardWriter(f"{tmp_path}/t-%03d.tar", maxcount=10, verbose=0, mtime=0) as sink:
        for n in range(SAMPLES):
            pixels = np.full((4, 5, 3), n, np.uint8)
            sink.write({"__key__": f"{n:03d}", "png": pixels, "cls": n, "txt": f"text {n}"})
    return [str(path) for path in sorted(tmp_path.glob("*.tar"))]


def pipeline(urls: list[str]) -> Any:
    return wds.WebDataset(urls, shardshuffle="epoch", seed=3).shuffle(20, seed=1).decode("rgb8").to_tuple("png", "cls")


def test_numpy_batches_are_those_of_the_dataset_ahead_by_threads(urls: list[str]) -> None:
    expected = [(images.tolist(), labels.tolist()) for images, labels in pipeline(urls).batched(8)]
    loader = wds.NumpyLoader(pipeline(urls), 8, threads=2)
    batches = list(loader)
    assert all(isinstance(images, np.ndarray) and images.shape[1:] == (4, 5, 3) for images, _ in batches)
    assert [(images.tolist(), labels.tolist()) for images, labels in batches] == expected
    assert len(list(wds.NumpyLoader(pipeline(urls), 8, drop_last=True))) == SAMPLES // 8
    with pytest.raises(ConfigError, match="not a list"):
        wds.NumpyLoader([1, 2])


@pytest.mark.parametrize("taken", [0, 1, 5, 17, 26, 27])
def test_a_numpy_loader_goes_on_behind_the_last_batch_taken(urls: list[str], taken: int) -> None:
    def loader() -> Any:
        return wds.NumpyLoader(pipeline(urls).batched(2), threads=2)

    one = loader()
    whole = [labels.tolist() for _, labels in one]
    second = [labels.tolist() for _, labels in one]
    left = loader()
    iterator = iter(left)
    begun = [next(iterator)[1].tolist() for _ in range(taken)]
    state = left.state_dict()
    left.close()
    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert begun + [labels.tolist() for _, labels in resumed] == whole
    assert [labels.tolist() for _, labels in resumed] == second
    with pytest.raises(StateError, match="NumpyLoader"):
        resumed.load_state_dict({"format": 1})


def test_a_numpy_loader_never_imports_torch(urls: list[str]) -> None:
    code = (
        "import sys, wds_async as wds\n"
        f"data = wds.WebDataset({urls!r}, shardshuffle=False).decode('rgb8').to_tuple('png', 'cls')\n"
        "print(sum(len(labels) for _, labels in wds.NumpyLoader(data, 10)), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(SAMPLES), "False"]


def test_a_node_of_torchdata_resumes_exactly_within_its_graph(urls: list[str]) -> None:
    need_package("torchdata")
    import torchdata.nodes as tn

    from wds_async.nodes import ShardReader

    def loader() -> Any:
        node = ShardReader(wds.WebDataset(urls, shardshuffle="epoch", seed=3).shuffle(20, seed=1))
        node = tn.ParallelMapper(node, lambda sample: int(sample["cls"]), num_workers=2, method="thread")
        return tn.Loader(tn.Prefetcher(tn.Batcher(node, 4, drop_last=False), 2))

    one = loader()
    whole, second = list(one), list(one)
    assert sorted(itertools.chain.from_iterable(whole)) == list(range(SAMPLES))
    assert whole != second
    left = loader()
    iterator = iter(left)
    begun = [next(iterator) for _ in range(5)]
    state = left.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert begun + list(resumed) == whole
    assert list(resumed) == second


def test_arrow_batches_have_the_bytes_of_the_shards(urls: list[str]) -> None:
    need_package("pyarrow")
    import pyarrow as pa

    table = pa.Table.from_batches(wds.arrow_batches(urls, fields=["cls", "png"], batch_bytes=2000))
    assert table.column_names == ["__key__", "__url__", "__offset__", "cls", "png"]
    samples = list(wds.WebDataset(urls, shardshuffle=False))
    assert table["png"].to_pylist() == [sample["png"] for sample in samples]
    assert table["__key__"].to_pylist() == [sample["__key__"] for sample in samples]
    assert table["__offset__"].to_pylist() == [sample.offset for sample in samples]
    with pytest.raises(ConfigError, match="batch_bytes"):
        list(wds.arrow_batches(urls, batch_bytes="many"))


def test_samples_as_arrow_batches(urls: list[str]) -> None:
    need_package("pyarrow")
    import pyarrow as pa

    dataset = wds.WebDataset(urls, shardshuffle=False).decode("rgb8").rename(image="png", label="cls", keep=False)
    samples = list(dataset)
    first = samples[0]["image"]
    batches = list(dataset.to_arrow_batches(7))
    assert {len(batch) for batch in batches[:-1]} == {7}
    table = pa.Table.from_batches(batches)
    assert table["label"].to_pylist() == [sample["label"] for sample in samples]
    assert table["label"].type == pa.int64()
    assert table["image"][0].as_py() == first.tolist()

    def lacks(sample: dict[str, Any]) -> dict[str, Any]:
        return {"a": sample["label"]} if sample["label"] % 2 else {"b": "text"}

    mixed = pa.Table.from_batches(dataset.map(lacks).to_arrow_batches())
    assert set(mixed.column_names) == {"__key__", "a", "b"}
    assert mixed.select(["b", "a"]).slice(0, 2).to_pylist() == [{"b": "text", "a": None}, {"b": None, "a": 1}]
    schema = pa.schema([("a", pa.int8()), ("c", pa.string())])
    assert next(iter(dataset.map(lacks).to_arrow_batches(schema=schema))).schema == schema
    with pytest.raises(ConfigError, match="batchsize"):
        next(dataset.to_arrow_batches(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_reads_ours_and_we_read_theirs(urls: list[str], tmp_path: Path) -> None:
    need_package("datasets")
    from datasets import Dataset, Features, Image, Value
    from datasets.distributed import split_dataset_by_node

    theirs = wds.to_huggingface(urls, decode="rgb8")
    assert theirs.num_shards == len(urls)
    assert [row["cls"] for row in theirs] == list(range(SAMPLES))
    halves = [[row["cls"] for row in split_dataset_by_node(theirs, rank, 2)] for rank in range(2)]
    assert sorted(itertools.chain.from_iterable(halves)) == list(range(SAMPLES))
    iterator = iter(theirs)
    for _ in range(13):
        next(iterator)
    state = theirs.state_dict()
    again = wds.to_huggingface(urls, decode="rgb8")
    again.load_state_dict(state)
    assert [row["cls"] for row in again] == list(range(13, SAMPLES))

    samples = list(wds.WebDataset(urls, shardshuffle=False))
    rows = {"image": [{"bytes": one["png"], "path": "a.png"} for one in samples], "cls": list(range(SAMPLES))}
    features = Features({"image": Image(), "cls": Value("int64")})
    with wds.TarWriter(tmp_path / "back.tar") as sink:
        for sample in wds.from_huggingface(Dataset.from_dict(rows, features=features)):
            sink.write(sample)
    back = list(wds.WebDataset(str(tmp_path / "back.tar"), shardshuffle=False).decode("rgb8"))
    assert [int(one["cls"]) for one in back] == list(range(SAMPLES))
    assert [one["__key__"] for one in back[:2]] == ["000000000", "000000001"]
    assert all((one["image.png"] == n).all() for n, one in enumerate(back))


def test_telemetry_counts_requests_and_spans_shards(urls: list[str], tmp_path: Path) -> None:
    need_package("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from wds_async.integrations.telemetry import observe, shard_spans

    reader, exporter, tracing = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    dataset = wds.WebDataset(urls, shardshuffle=False).compose(shard_spans(tracing))
    observe(dataset, "train", meter_provider=MeterProvider([reader]))
    assert len(list(dataset)) == SAMPLES
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    values = {metric.name: metric.data.data_points[0] for metric in scope.metrics}
    assert values["wds_async.samples"].value == SAMPLES
    assert values["wds_async.shards"].value == len(urls)
    assert values["wds_async.bytes"].value == sum(Path(url).stat().st_size for url in urls)
    assert dict(values["wds_async.requests"].attributes) == {"dataset": "train"}
    spans = exporter.get_finished_spans()
    assert [span.attributes["url.full"] for span in spans] == urls
    assert [span.attributes["wds_async.samples"] for span in spans] == [10, 10, 10, 10, 10, 3]

    data = Path(urls[0]).read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[:5700])
    exporter.clear()
    with pytest.raises(wds.errors.TruncatedShard):
        list(wds.WebDataset(str(tmp_path / "cut.tar"), shardshuffle=False).compose(shard_spans(tracing)))
    (span,) = exporter.get_finished_spans()
    assert span.status.is_ok is False
    assert span.events[0].name == "exception"
