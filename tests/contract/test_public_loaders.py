"""Side by side with webdataset 1.0.2: the calls that public projects make, each with both libraries over the same data.

Every function below is written anew after what one project's loader calls, in which order and with which arguments;
models, configuration and transforms are left out. What it returns is compared.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import multiprocessing
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wds_async as ours
from tests.contract.common import same, without_path
from tests.servers import make_tar, png

theirs = pytest.importorskip("webdataset")
torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

SHARDS, SAMPLES = 6, 10
WIDTH = 3  # digits of a sample's number in its key
BAD_IMAGE, NO_TEXT = 7, 3

Loader = Callable[[Any, Path], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of captioned images with metadata; in each one image is broken and one caption missing."""
    where = tmp_path_factory.mktemp("public")
    for shard in range(SHARDS):
        members: list[tuple[str, bytes]] = []
        for i in range(SAMPLES):
            number, key = shard * SAMPLES + i, f"{shard:05}{i:0{WIDTH}}"
            meta = {
                "caption": f"picture {number}",
                "original_width": 256 * i,
                "original_height": 512,
                "pwatermark": 0.1,
            }
            members += [
                (f"{key}.jpg", b"no image" if i == BAD_IMAGE else png(number)),
                (f"{key}.cls", str(number).encode()),
                (f"{key}.json", json.dumps(meta).encode()),
                (f"{key}.tokens.json", json.dumps(list(range(number))).encode()),
            ]
            if i != NO_TEXT:
                members.append((f"{key}.txt", f"text {number}".encode()))
        (where / f"{shard:05}.tar").write_bytes(make_tar(members))
        np.save(where / f"emb_{shard:04}.npy", np.arange(SAMPLES * 2, dtype="f4").reshape(SAMPLES, 2) + shard)
    (where / "info.json").write_text(json.dumps({"splits": {"train": {"samples": SHARDS * SAMPLES}}}))
    return where


def urls(folder: Path) -> str:
    return str(folder / f"{{00000..{SHARDS - 1:05}}}.tar")


def pixels(image: Any) -> Any:
    return torch.tensor(list(image.convert("RGB").resize((2, 2)).tobytes()))


def carry_on(exn: Exception) -> bool:
    return True


class Shared:
    """A number that workers see change."""

    def __init__(self) -> None:
        self.value = multiprocessing.Value("i", 0)


# -- diffusers: LCM distillation


def filled(keys: Any, members: Any) -> Iterator[dict[str, Any]]:
    """Members to samples; a field met twice begins another sample."""
    sample: dict[str, Any] = {}
    for member in members:
        key, field = keys(member["fname"])
        if key is None:
            continue
        if sample and (key != sample["__key__"] or field in sample):
            yield sample
            sample = {}
        sample = sample or {"__key__": key, "__url__": member["__url__"]}
        sample[field.lower()] = member["data"]
    if sample:
        yield sample


def forgiving(wds: Any) -> Callable[[Any], Any]:
    """A reading stage of the project's own, on the parts of the library."""
    parts = wds.tariterators

    def read(source: Any) -> Iterator[dict[str, Any]]:
        members = parts.tar_file_expander(parts.url_opener(source, handler=carry_on), handler=carry_on)
        return filled(parts.base_plus_ext, (member for member in members if "fname" in member))

    return read


def large_enough(sample: dict[str, Any]) -> bool:
    meta = json.loads(sample["json"])
    return bool(meta["original_width"] >= 512 and meta["pwatermark"] <= 0.5)


def diffusers_lcm(wds: Any, folder: Path) -> Any:
    workers, batch = 2, 4
    each = math.ceil(SHARDS * SAMPLES / (batch * workers))
    stages = [
        wds.ResampledShards(wds.shardlists.expand_urls(urls(folder))),
        forgiving(wds),
        wds.shuffle(30),
        wds.select(large_enough),
        wds.decode("pil", handler=wds.ignore_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="text;txt;caption", handler=wds.ignore_and_continue),
        wds.map(lambda sample: {k: v for k, v in sample.items() if k in ("image", "text")}),
        wds.map_dict(image=pixels),
        wds.to_tuple("image", "text"),
        wds.batched(batch, partial=False, collation_fn=torch.utils.data.default_collate),
    ]
    dataset = wds.DataPipeline(*stages).with_epoch(each)
    loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=workers, pin_memory=False)
    loader.num_batches, loader.num_samples = each * workers, each * workers * batch
    batches = list(loader)
    kinds = {(images.shape, len(texts), texts[0].split()[0]) for images, texts in batches}
    # Which shards are drawn is chance; what can come out of them is not.
    return loader.num_batches, len(batches), kinds


# -- timm: reader_wds


def timm_reader(wds: Any, folder: Path) -> Any:
    epoch, seed, per_worker = Shared(), 42, 23

    class ShardShuffle(wds.PipelineStage):
        def run(self, src: Any) -> Any:
            return wds.filters._shuffle(src, 500, 100, random.Random(seed + epoch.value.value))

    def share(src: Any) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        return itertools.islice(src, info.id if info else 0, None, info.num_workers if info else 1)

    def decoded(sample: dict[str, Any], key: str = "jpg") -> dict[str, Any]:
        image = Image.open(io.BytesIO(wds.filters.getfirst(sample, key)))
        image.load()
        return {"jpg": image.convert("RGB"), "target": int(sample["cls"]), "json": sample.get("json")}

    with wds.gopen(str(folder / "info.json")) as file:
        total = json.load(file)["splits"]["train"]["samples"]

    class Reader(torch.utils.data.IterableDataset):  # type: ignore[misc]
        pipeline: Any = None

        def __iter__(self) -> Iterator[Any]:
            if self.pipeline is None:
                names = [str(folder / name) for name in wds.shardlists.expand_urls(f"{{00000..{SHARDS - 1:05}}}.tar")]
                self.pipeline = wds.DataPipeline(
                    wds.SimpleShardList(names),
                    ShardShuffle(),
                    share,
                    wds.tarfile_to_samples(handler=carry_on),
                    wds.shuffle(bufsize=16, initial=8, rng=random.Random(seed)),
                    wds.map(functools.partial(decoded, key="jpg;png"), handler=carry_on),
                    wds.rename(image="jpg;png", target="target"),
                )
            for sample in self.pipeline.with_epoch(per_worker):
                yield list(sample["image"].resize((2, 2)).tobytes()), sample["target"]

        def __len__(self) -> int:
            return int(total)

    found = []
    for number in range(3):
        epoch.value.value = number
        for workers in (0, 2):
            found.append(list(torch.utils.data.DataLoader(Reader(), batch_size=None, num_workers=workers)))
    return found


# -- DALLE2-pytorch: decoder_loader


def dalle2_decoder(wds: Any, folder: Path) -> Any:
    def known_shards(shards: Any, known: set[int], handler: Any = None) -> Iterator[Any]:
        for shard in shards:
            if int(Path(shard["url"]).stem) in known:
                yield shard

    def with_embeddings(samples: Any, width: int, handler: Any = wds.handlers.reraise_exception) -> Iterator[Any]:
        rows: dict[str, Any] = {}
        for sample in samples:
            try:
                shard, index = int(Path(sample["__url__"]).stem), int(sample["__key__"][-width:])
                rows.setdefault(shard, torch.from_numpy(np.load(folder / f"emb_{shard:04}.npy")))
                if not torch.count_nonzero(rows[shard][index]):
                    raise RuntimeError("no embedding")
                yield {**sample, "npy": rows[shard][index]}
            except Exception as exn:
                if not handler(exn):
                    break

    def whole(samples: Any) -> Iterator[Any]:
        return (sample for sample in samples if "jpg" in sample and "npy" in sample)

    class Embedded(wds.DataPipeline, wds.compat.FluidInterface):  # type: ignore[misc]
        def __init__(self, source: str, shuffled: bool) -> None:
            super().__init__()
            handler = wds.handlers.ignore_and_continue
            self.append(wds.SimpleShardList(source))
            if shuffled:
                self.append(wds.filters.shuffle(1000))
            self.append(wds.filters.pipelinefilter(known_shards)(known={0, 2, 3, 5}, handler=handler))
            self.append(wds.split_by_node)
            self.append(wds.split_by_worker)
            self.append(wds.tarfile_to_samples(handler=handler))
            self.append(wds.decode("pilrgb", handler=handler))
            self.append(wds.filters.pipelinefilter(with_embeddings)(width=WIDTH, handler=handler))
            self.append(whole)
            self.append(wds.map(self.preprocessed))
            self.append(wds.to_tuple("jpg", "npy", "cls"))

        def preprocessed(self, sample: dict[str, Any]) -> dict[str, Any]:
            sample["jpg"] = pixels(sample["jpg"])
            return sample

    loader = wds.WebLoader(Embedded(urls(folder), False), num_workers=2, batch_size=4, prefetch_factor=2, shuffle=False)
    shuffled = sorted(number for *_, number in Embedded(urls(folder), True).shuffle(5))
    return list(loader), shuffled


# -- DALLE-pytorch: train_dalle


def dalle_training(wds: Any, folder: Path) -> Any:
    def complete(sample: dict[str, Any]) -> bool:
        return all(name in sample for name in ("jpg", "txt"))

    def opened(data: bytes) -> Any:
        return Image.open(io.BytesIO(data))

    ranks, size = 4, 16
    dataset = wds.WebDataset(urls(folder), handler=wds.warn_and_continue)
    steps = dataset.select(complete).map_dict(jpg=opened, txt=bytes.decode, handler=wds.ignore_and_continue)
    steps = steps.map_dict(jpg=pixels).to_tuple("txt", "jpg").batched(size / ranks, partial=True)
    loader = wds.WebLoader(steps, batch_size=None, shuffle=False)
    loader = loader.repeat(2).slice(int(1e3) // (size * ranks))
    loader.length = 15
    return list(loader), loader.length


# -- LAVIS: laion_dataset


def lavis_laion(wds: Any, folder: Path) -> Any:
    def to_dict(sample: Any) -> dict[str, Any]:
        return {"image": sample[0], "text_input": sample[1]["caption"]}

    quiet = {"handler": wds.ignore_and_continue}
    inner = wds.DataPipeline(
        wds.ResampledShards(urls(folder), deterministic=True),
        wds.tarfile_to_samples(**quiet),
        wds.shuffle(10, seed=1, **quiet),
        wds.decode("pilrgb", **quiet),
        wds.to_tuple("jpg", "json", **quiet),
        wds.map_tuple(pixels, **quiet),
        wds.map(to_dict, **quiet),
    )
    return list(itertools.islice(torch.utils.data.DataLoader(inner, batch_size=2), 40))


# -- clip-retrieval: clip_inference/reader


def clip_retrieval_reader(wds: Any, folder: Path) -> Any:
    def complete(sample: dict[str, Any]) -> bool:
        return "txt" in sample and "jpg" in sample and "json" in sample

    def prepared(sample: dict[str, Any]) -> dict[str, Any]:
        image = Image.open(io.BytesIO(sample["jpg"]))
        return {
            "image_filename": sample["__key__"],
            "image_tensor": pixels(image),
            "text": sample["txt"].decode("utf-8"),
            "metadata": sample["json"].decode("utf-8"),
        }

    names = wds.shardlists.expand_urls(urls(folder))[1:]
    dataset = wds.WebDataset(names, cache_dir=None, cache_size=10**10, handler=wds.handlers.warn_and_continue)
    dataset = dataset.select(complete).map(prepared, handler=wds.handlers.ignore_and_continue)
    found = [list(torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=n, collate_fn=None)) for n in (0, 2)]
    # The key that `map` adds to what the function returned is collated too.
    return found


# -- open_lm: data


def open_lm_mix(wds: Any, folder: Path) -> Any:
    def tokens(data: bytes, vocabulary: int) -> list[int]:
        return [token % vocabulary for token in json.loads(data)]

    def long_enough(least: int, sample: Any) -> bool:
        return len(sample[0]) > least

    def source(first: int, last: int, seed: int) -> Any:
        shards = str(folder / f"{{{first:05}..{last:05}}}.tar")
        return wds.DataPipeline(
            wds.SimpleShardList(shards),
            wds.detshuffle(bufsize=2000, initial=500, seed=seed),
            wds.split_by_node,
            wds.split_by_worker,
            forgiving(wds),
            wds.shuffle(bufsize=8, initial=4, rng=random.Random(seed)),
            wds.rename(json="tokens.json"),
            wds.map_dict(json=functools.partial(tokens, vocabulary=17), handler=carry_on),
            wds.to_tuple("json"),
            wds.select(functools.partial(long_enough, 5)),
            wds.batched(3, partial=False),
        )

    random.seed(5)  # the mix has no seed of its own
    mixed = wds.mix.RandomMix([source(0, 3, 1), source(4, 5, 2)], probs=[0.7, 0.3], longest=True)
    return [list(wds.WebLoader(mixed, batch_size=None, shuffle=False, num_workers=0)) for _ in range(2)]


# -- lhotse: dataset/webdataset


def lhotse_cuts(wds: Any, folder: Path) -> Any:
    class Cuts:
        """One shard as an iterator that can be pickled between two passes."""

        def __init__(self, path: str) -> None:
            self.path = path

        def __getstate__(self) -> dict[str, Any]:
            return {"path": self.path}

        def __iter__(self) -> Any:
            self.samples = iter(wds.WebDataset(self.path))
            return self

        def __next__(self) -> Any:
            return pickle.loads(next(self.samples)["data"])

    path = folder / f"cuts-{wds.__name__}.tar"
    with wds.TarWriter(str(path)) as sink:
        for i in range(20):
            cut = {"id": f"cut-{i}", "recording": np.full(4, i, "f4"), "duration": i / 2}
            sink.write({"__key__": cut["id"], "data": pickle.dumps(cut)})
    cuts = Cuts(str(path))
    first = list(cuts)
    return first, list(Cuts(**cuts.__getstate__())), [next(iter(cuts))["id"] for _ in range(2)]


# -- img2dataset: writer


def img2dataset_writer(wds: Any, folder: Path) -> Any:
    path = folder / f"written-{wds.__name__}.tar"
    with path.open("wb") as file:
        writer = wds.writer.TarWriter(file)
        for i in range(12):
            sample = {"__key__": f"{i:09}", "jpg": png(i), "txt": str(i) if i % 3 else ""}
            sample["json"] = json.dumps({"width": i, "exif": "{}", "faces": np.arange(i).tolist()}, indent=4)
            writer.write(sample)
        writer.close()
        assert not file.closed
    read = wds.WebDataset(str(path), shardshuffle=False)
    return [{k: v for k, v in s.items() if k != "__url__"} for s in without_path(read)], len(path.read_bytes()) % 10240


# -- Energon: a sample decoder with nested images


def energon_decoder(wds: Any, folder: Path) -> Any:
    class Nested:
        """Fields that hold a pickled list of images."""

        def __init__(self, spec: str) -> None:
            self.image = wds.autodecode.imagehandler(spec)

        def __call__(self, key: str, data: bytes) -> Any:
            extension = re.sub(r".*[.]", "", key)
            return [self.image("jpg", one) for one in pickle.loads(data)] if extension == "jpgs" else None

    def video(key: str, data: bytes) -> Any:
        return None

    decoder = wds.autodecode.Decoder([wds.autodecode.imagehandler("torchrgb"), Nested("torchrgb8"), video])
    samples = [
        {"__key__": "a/b", "jpg": png(1), "jpgs": pickle.dumps([png(2), png(3)]), "txt": b"x", "part.json": b"[1]"},
        {"__key__": "c", "seg.jpg": png(4), "pyd": pickle.dumps({"x": 1}), "other": b"?"},
    ]
    return [decoder(sample) for sample in samples], decoder({"__key__": "d", "cls": b"3"})["cls"]


# -- Stability: a decoder and a fluent interface of their own


def stability_decoder(wds: Any, folder: Path) -> Any:
    class Passing(wds.autodecode.Decoder):  # type: ignore[misc]
        """Leaves fields that are decoded already, where their names are given."""

        def __init__(self, *args: Any, passed: Any = (), **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.passed = passed

        def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
            result = {}
            for k, v in sample.items():
                if k[0] == "_" or (self.only is not None and k not in self.only):
                    result[k] = v
                elif self.partial:
                    result[k] = self.decode1(k, v) if isinstance(v, bytes) else v
                else:
                    assert isinstance(v, bytes) or k in self.passed
                    result[k] = self.decode1(k, v) if isinstance(v, bytes) else v
            return result

    class Interface(wds.compat.FluidInterface):  # type: ignore[misc]
        def decode(self, *args: Any, passed: Any = (), handler: Any = wds.reraise_exception, **kw: Any) -> Any:
            handlers = [wds.autodecode.ImageHandler(f) if isinstance(f, str) else f for f in args]
            return self.map(Passing(handlers, passed=passed, **kw), handler=handler)

    class Images(wds.DataPipeline, Interface):  # type: ignore[misc]
        def __init__(self, source: Any, shardshuffle: Any = None) -> None:
            super().__init__()
            self.append(wds.shardlists.SimpleShardList(source))
            self.append(wds.shardlists.split_by_node)
            self.append(wds.shardlists.split_by_worker)
            if shardshuffle is not None:
                self.append(wds.filters.detshuffle(shardshuffle))
            self.append(wds.tariterators.tarfile_to_samples(handler=wds.reraise_exception))

    dataset = (
        Images(urls(folder), shardshuffle=100)
        .map(lambda sample: {**sample, "length": len(sample["jpg"])})
        .decode("torchrgb8", passed=["length"], handler=wds.ignore_and_continue)
        .rename(image="jpg;png", label="cls")
        .select(lambda sample: "txt" in sample)
        .map_dict(label=float)
        .batched(5, partial=False)
    )
    assert isinstance(dataset, Images)
    return [list(without_path(dataset)) for _ in range(2)]


# -- NeMo: multimodal/data/common/webdataset


def nemo_common(wds: Any, folder: Path) -> Any:
    def image(key: str, data: bytes) -> Any:
        if re.sub(r".*[.]", "", key).lower() not in ("jpg", "png"):
            return None
        return Image.open(io.BytesIO(data)).convert("RGB")

    class ChunkShuffle(wds.PipelineStage):  # type: ignore[misc]
        def __init__(self, bufsize: int) -> None:
            self.bufsize, self.epoch = bufsize, -1

        def run(self, src: Any) -> Any:
            self.epoch += 1
            return wds.filters._shuffle(src, self.bufsize, 5, random.Random(self.epoch))

    class Common(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __init__(self, **kw: Any) -> None:
            names = [str(folder / name) for name in wds.shardlists.expand_urls("{00000..00003}.tar")]
            dataset = wds.WebDataset(names, handler=wds.warn_and_continue, resampled=False)
            dataset = dataset.compose(ChunkShuffle(bufsize=10)).decode(image, handler=wds.ignore_and_continue)
            dataset = dataset.select(lambda sample: "txt" in sample).map(lambda s: (pixels(s["jpg"]), s["txt"]))
            for step in (wds.filters.pipelinefilter(lambda src: (pair[::-1] for pair in src))(),):
                dataset = dataset.compose(step)
            dataset.total_images = 40
            rank, world, _, _ = wds.utils.pytorch_worker_info()
            self._dataset = (
                dataset.with_epoch(nbatches=dataset.total_images // world) if kw.get("infinite") else dataset
            )
            assert (rank, self._dataset.total_images) == (0, 40)

        def __iter__(self) -> Any:
            return iter(self._dataset)

    def loaded(dataset: Any, **kw: Any) -> list[Any]:
        return list(torch.utils.data.DataLoader(dataset, batch_size=4, drop_last=True, **kw))

    return loaded(Common()), loaded(Common(), num_workers=2), loaded(Common(infinite=True))


# -- CLAP: training/data


def clap_training(wds: Any, folder: Path) -> Any:
    def sound(key: str, data: bytes) -> Any:
        """In place of ``wds.torch_audio``, which needs a library for each format."""
        return torch.tensor(list(data.ljust(8)[:8]), dtype=torch.float32) if key.endswith("txt") else None

    def collated(batch: list[dict[str, Any]], audio: str, texts: str) -> dict[str, Any]:
        names = [f"{sample['__key__'].split('/')[-1]}.{audio}" for sample in batch]
        waves = torch.stack([sample[audio] for sample in batch])
        return {"waveform": waves, "raw_text": [sample[texts]["caption"] for sample in batch], "audio_name": names}

    batch, workers = 4, 2
    assert wds.torch_audio(".none", b"") is None
    dataset = wds.DataPipeline(
        wds.SimpleShardList(wds.shardlists.expand_urls(urls(folder))),
        wds.detshuffle(bufsize=2000, initial=500, seed=3),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(handler=carry_on),
        wds.select(lambda sample: "txt" in sample),
        wds.shuffle(bufsize=20, initial=5, rng=random.Random(3)),
        wds.decode(sound),
        wds.batched(batch, partial=False, collation_fn=functools.partial(collated, audio="txt", texts="json")),
    )
    each = math.ceil(math.ceil(SHARDS * SAMPLES / batch) / workers)
    dataset = dataset.with_epoch(each)
    loader = wds.WebLoader(
        dataset, batch_size=None, shuffle=False, num_workers=workers, prefetch_factor=max(2, batch // workers)
    )
    loader.num_batches = each * workers
    return list(loader), loader.num_batches


# -- OpenCLIP: training/data


def openclip_stages(wds: Any, *reading: Any, partial: bool) -> list[Any]:
    return [
        *reading,
        wds.select(lambda sample: "txt" in sample and "jpg" in sample),
        wds.decode("pilrgb", handler=carry_on),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=pixels, text=len),
        wds.to_tuple("image", "text", "__key__"),
        wds.batched(4, partial=partial),
    ]


def openclip_training(wds: Any, folder: Path) -> Any:
    """Epochs of the same number of whole batches, in another order each. Which samples are in them is chance, but
    without resampling none comes twice, except where a worker begins again."""
    epoch = Shared()

    class ShardShuffle(wds.PipelineStage):  # type: ignore[misc]
        def run(self, src: Any) -> Any:
            return wds.filters._shuffle(src, 2000, 500, random.Random(7 + epoch.value.value))

    class WeightedShards(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[dict[str, str]]:
            info = torch.utils.data.get_worker_info()
            rng = random.Random(info.seed + epoch.value.value * info.num_workers)
            names = wds.shardlists.expand_urls(urls(folder))
            return ({"url": rng.choices(names, weights=[1.0] * SHARDS)[0]} for _ in itertools.count())

    shuffled = [wds.SimpleShardList(urls(folder)), ShardShuffle(), wds.split_by_node, wds.split_by_worker]
    found: list[Any] = []
    runs: list[list[str]] = []
    for shards in (shuffled, [WeightedShards()]):
        stages = openclip_stages(wds, *shards, forgiving(wds), wds.shuffle(bufsize=20, initial=5), partial=False)
        dataset = wds.DataPipeline(*stages).with_epoch(5)
        loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=2, persistent_workers=True)
        loader = loader.with_epoch(10)
        loader.num_batches = 10
        for number in range(2):
            epoch.value.value = number
            batches = list(loader)
            runs.append([key for *_, keys in batches for key in keys])
            found.append([(images.shape, len(texts)) for images, texts, _ in batches])
    assert runs[0] != runs[1]
    assert runs[2] != runs[3]
    assert all(len(set(run)) >= len(run) - 2 * 4 for run in runs[:2])
    return found


def openclip_evaluation(wds: Any, folder: Path) -> Any:
    reading = [wds.SimpleShardList(urls(folder)), wds.split_by_worker, wds.tarfile_to_samples(handler=carry_on)]
    dataset = wds.DataPipeline(*openclip_stages(wds, *reading, partial=True))
    loader = wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=2, persistent_workers=True)
    return [list(loader) for _ in range(2)]


LOADERS: tuple[Loader, ...] = (
    clap_training,
    clip_retrieval_reader,
    dalle2_decoder,
    dalle_training,
    diffusers_lcm,
    energon_decoder,
    img2dataset_writer,
    lavis_laion,
    lhotse_cuts,
    nemo_common,
    open_lm_mix,
    openclip_evaluation,
    openclip_training,
    stability_decoder,
    timm_reader,
)


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_a_public_loader(loader: Loader, folder: Path) -> None:
    state, results = random.getstate(), []
    for wds in (theirs, ours):
        random.seed(0)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shardshuffle, of webdataset's open files
            results.append(loader(wds, folder))
    random.setstate(state)
    assert same(*results), [repr(result)[:400] for result in results]
    assert results[1]


class ShardSampler(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Shards as NeMo's sampler gives them out: this rank's, an epoch after the other."""

    def __init__(self, names: list[str], rank: int, ranks: int) -> None:
        self.names, self.rank, self.ranks, self.epoch = names, rank, ranks, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        names = random.Random(self.epoch).sample(self.names, len(self.names))
        self.epoch += 1
        return ({"url": name} for name in names[self.rank :: self.ranks])


def test_a_sampler_of_shards_as_urls(folder: Path) -> None:
    """NeMo gives `WebDataset` its own iterable of shards, which webdataset 1.0.2 refuses and 0.2 took."""
    names = ours.shardlists.expand_urls(urls(folder))
    with pytest.raises(AssertionError):
        theirs.WebDataset(ShardSampler(names, 0, 2), shardshuffle=False)
    shares = [ours.WebDataset(ShardSampler(names, rank, 2), shardshuffle=False) for rank in range(2)]
    for _ in range(2):
        assert sorted(s["__key__"] for share in shares for s in share) == sorted(
            f"{shard:05}{i:0{WIDTH}}" for shard in range(SHARDS) for i in range(SAMPLES)
        )
