"""`decode_batch`: which images a device gets, what becomes of the others, and what stands in a batch afterwards.

The machines that test have no GPU, and no library for one can be loaded there: most tests give `decoded` a function
with the interface of ``torchcodec.decoders.decode_jpeg``, on the CPU. Those marked ``cuda`` need a GPU and the library.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

import wds_async as wds
from tests.decoding.test_crops import difference, encoded, photograph
from tests.servers.shards import make_shard
from wds_async.decoding.batches import baseline_jpeg, decoded
from wds_async.decoding.images import imagehandler
from wds_async.errors import ConfigError, DecodingError
from wds_async.handlers import ignore_and_continue

torch = pytest.importorskip("torch")

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
PICTURE = photograph(60, 70)
TURNED = PIL.Image.Exif()
TURNED[0x0112] = 6
BASELINE = {
    "4:2:0": encoded(PICTURE, quality=90),
    "4:4:4": encoded(PICTURE, quality=90, subsampling=0),
    "grey": encoded(PICTURE.convert("L")),
    "turned by its EXIF data": encoded(PICTURE, exif=TURNED.tobytes()),
}
OTHERS = {
    "progressive": encoded(PICTURE, progressive=True),
    "CMYK": encoded(PICTURE.convert("CMYK")),
    "RGB": encoded(PICTURE, keep_rgb=True),
    "PNG": encoded(PICTURE, "PNG"),
    "bytes behind its end": BASELINE["4:2:0"] + b"\0\0",
}
SUBSAMPLED = ("4:2:0", "turned by its EXIF data")
REFUSED = encoded(photograph(31, 33))


class Library:
    """``decode_jpeg`` of torchcodec: a list gives a list, EXIF data turns an image, and there is no partial result."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, source: list[Any], *, mode: str, device: Any) -> list[Any]:
        self.calls.append(len(source))
        images = [PIL.Image.open(io.BytesIO(bytes(file.numpy()))) for file in source]
        if any(image.size == (33, 31) for image in images):
            raise RuntimeError("nvjpegDecode failed: 2")
        turned = [np.array(PIL.ImageOps.exif_transpose(image).convert(mode)) for image in images]
        return [torch.from_numpy(image).permute(2, 0, 1).to(device) for image in turned]


def samples(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"__key__": key, "__url__": "s3://user:secret@bucket/a.tar", "jpg": data} for key, data in files.items()]


def same_as_decode(images: list[Any], files: dict[str, bytes]) -> bool:
    decode = imagehandler("torchrgb8")
    return all(torch.equal(image, decode(".jpg", data)) for image, data in zip(images, files.values(), strict=True))


def test_a_device_gets_baseline_jpegs_and_the_images_are_those_of_decode() -> None:
    files, library = BASELINE | OTHERS, Library()
    assert [name for name, data in files.items() if baseline_jpeg(data)] == [*BASELINE]
    assert same_as_decode(decoded(samples(files), "jpg", CPU, library), files)
    assert library.calls == [len(BASELINE)]


def test_what_the_library_refuses_is_decoded_by_the_cpu_and_nothing_else() -> None:
    files, library = {**BASELINE, "refused": REFUSED}, Library()
    assert same_as_decode(decoded(samples(files), "jpg", CPU, library), files)
    assert library.calls == [len(files), *[1] * len(files)]


def test_memory_that_is_short_is_no_image_that_is_refused() -> None:
    def library(source: list[Any], **options: Any) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        decoded(samples(BASELINE), "jpg", CPU, library)


@pytest.mark.parametrize("broken", [BASELINE["4:2:0"][:400], b"", b"no image"])
def test_a_broken_image_is_an_error_that_names_its_sample(broken: bytes) -> None:
    batch = samples({**BASELINE, "bad": broken})
    with pytest.raises(DecodingError, match=r"bucket/a\.tar: field 'jpg' .* of sample 'bad'") as caught:
        decoded(batch, "jpg", CPU, Library())
    assert "secret" not in str(caught.value)
    whole, part = ({name: [sample[name] for sample in part] for name in batch[0]} for part in (batch, batch[:2]))
    stage = wds.decode_batch("jpg", "cpu", handler=ignore_and_continue)
    assert [len(left["jpg"]) for left in stage([part, whole, part])] == [2, 2]


def shards(folder: Path) -> str:
    pictures = {f"{i}": {"jpg": encoded(photograph(60 + i, 70), quality=95), "cls": b"%d" % i} for i in range(6)}
    (folder / "a.tar").write_bytes(make_shard(pictures))
    return str(folder / "a.tar")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_crops_behind_a_loader_are_those_of_decode(device: str, tmp_path: Path) -> None:
    dataset, options = (
        wds.WebDataset(shards(tmp_path), shardshuffle=False),
        {"size": 32, "crop": "random", "flip": True},
    )
    random.seed(1)
    expected = [sample["jpg"] for sample in dataset.decode("torchrgb8", **options)]
    raw = dataset.decode(only="cls").batched(4)
    loader = wds.WebLoader(raw, batch_size=None, num_workers=0).decode_batch("jpg", device, **options)
    random.seed(1)
    batches = list(loader)
    assert [(batch["cls"].tolist(), batch["jpg"].device.type) for batch in batches] == [
        ([0, 1, 2, 3], device),
        ([4, 5], device),
    ]
    images = torch.cat([batch["jpg"] for batch in batches]).cpu()
    assert (images.dtype, images.shape) == (torch.uint8, (6, 3, 32, 32))
    assert difference(images, torch.stack(expected)).max() <= (1 if device == "cpu" else 25)  # 4:2:0


def test_the_state_goes_on_with_the_same_crops(tmp_path: Path) -> None:
    dataset = wds.WebDataset(shards(tmp_path), shardshuffle=False).batched(2)
    first, again = (dataset.decode_batch("jpg", "cpu", size=20, crop="random") for _ in range(2))
    next(iterator := iter(first))
    state = first.state_dict()
    rest = [batch["jpg"] for batch in iterator]
    again.load_state_dict(state)
    assert [torch.equal(a["jpg"], b) for a, b in zip(again, rest, strict=True)] == [True, True]


def test_what_cannot_be_is_refused_where_it_is_written(tmp_path: Path) -> None:
    dataset = wds.WebDataset(shards(tmp_path), shardshuffle=False)
    with pytest.raises(ConfigError, match="size=20 with crop=None"):
        dataset.batched(2).decode_batch("jpg", "cpu", size=20)
    with pytest.raises(ConfigError, match="'gpu' is not a device of torch"):
        dataset.batched(2).decode_batch("jpg", "gpu")
    with pytest.raises(ValueError, match=r"Unknown imagespec: cuda .*decode_batch"):
        dataset.decode("cuda")
    with pytest.raises(TypeError, match="put it behind decode_batch"):
        next(iter(dataset.to_tuple("jpg").batched(2).decode_batch("jpg", "cpu")))
    with pytest.raises(KeyError, match="no field 'png' in a batch with __key__"):
        next(iter(dataset.batched(2).decode_batch("png", "cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused_when_the_stage_or_the_loader_is_made() -> None:
    with pytest.raises(ConfigError, match=r"decode_batch: device='cuda': torch .* give device=\"cpu\""):
        wds.decode_batch()
    with pytest.raises(ConfigError, match=r"WebLoader: device='cuda:1': torch .* give device=\"cpu\""):
        wds.WebLoader([1], device="cuda:1")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_worker_has_no_tensors_on_a_device(tmp_path: Path) -> None:
    dataset = wds.WebDataset(shards(tmp_path), shardshuffle=False).batched(2).decode_batch("jpg", "meta")
    assert {image.device.type for batch in dataset for image in batch["jpg"]} == {"meta"}
    with pytest.raises(ConfigError, match="put the stage behind the loader"):
        list(wds.WebLoader(dataset, batch_size=None, num_workers=1))


@cuda
def test_images_on_a_gpu_are_nearly_those_of_decode() -> None:
    files = BASELINE | OTHERS
    names = [*files]
    batch = {"__key__": names, "__url__": ["a.tar"] * len(names), "jpg": [*files.values()]}
    (result,) = wds.decode_batch("jpg", "cuda")([batch])
    for name, image in zip(names, result["jpg"], strict=True):
        expected = imagehandler("torchrgb8")(".jpg", files[name])
        assert image.device.type == "cuda"
        # The decoder repeats a colour for four pixels where the CPU's interpolates; grey and 4:4:4 are the same.
        assert difference(image.cpu(), expected).mean() <= (5 if name in SUBSAMPLED else 0), name
