"""`ShardStatistics`: fields, sizes, classes, images and duplicates of shards, read by one process or by the tasks of
`stats_job`; and `contact_sheet`, to look at them."""

from __future__ import annotations

import base64
import bisect
import collections
import hashlib
import io
import json
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wds_async import packages
from wds_async.distributed.attempts import add_traffic, skipped_entries
from wds_async.distributed.engines.base import RankedEngine
from wds_async.distributed.folder import JobFolder, job_url
from wds_async.distributed.jobs import Job, OnProgress
from wds_async.distributed.plan import Plan, planned
from wds_async.distributed.tasks import Record, Task
from wds_async.pipeline import DataPipeline
from wds_async.reading.stage import tarfile_to_samples
from wds_async.redact import redact
from wds_async.storage.listing.expand import Urls

__all__ = [
    "IMAGES", "FieldStatistics", "ImageStatistics", "PartStatistics", "ShardStatistics", "StatsJob", "StatsWork",
    "contact_sheet", "stats_job",
]  # fmt: skip

IMAGES = frozenset(["jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "tif", "tiff", "gif", "bmp", "img", "image"])
_NUMBERS = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
_DOCUMENTS = frozenset(["json", "jsn"])
_OTHERS, _NO_JSON = "(others)", "(no JSON)"
_MOST_VALUES = 10_000
_MOST_NAMES = 1000
_MOST_NAMED = 20
_SIZES_KEPT = 10_000
_DIGEST_BYTES = 16


class SizeCounts:
    """Counts by size: exact for 10,000 different sizes; with more of them all are rounded down to as many significant
    bits as leave no more than 10,000, at least eight. It depends on the sizes alone, and not on their order."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.bits = 64

    def add(self, size: int, count: int = 1) -> None:
        """Count ``size``."""
        self.counts[self._rounded(size)] += count
        while len(self.counts) > _SIZES_KEPT:
            self._round_to(self.bits - 1)

    def values(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"bits": self.bits, "counts": list(self.counts.items())}

    def merge(self, values: Mapping[str, Any]) -> None:
        """Add the `values` of another."""
        if values["bits"] < self.bits:
            self._round_to(values["bits"])
        for size, count in values["counts"]:
            self.add(size, count)

    def quantile(self, share: float) -> int:
        """Return the size that ``share`` of all do not exceed; 0 of none."""
        left = math.ceil(share * self.counts.total())
        for size in sorted(self.counts):
            left -= self.counts[size]
            if left <= 0:
                return size
        return 0

    def _rounded(self, size: int) -> int:
        excess = size.bit_length() - self.bits
        return size >> excess << excess if excess > 0 else size

    def _round_to(self, bits: int) -> None:
        self.bits, before, self.counts = bits, self.counts, Counter()
        for size, count in before.items():
            self.counts[self._rounded(size)] += count


class PictureChoice:
    """A random choice of ``most`` pictures: those with the smallest hash of seed, shard and key, so that it does not
    depend on what counts them in which order. Only hashes ``below`` are taken. ``items`` are hash, key, data, label."""

    def __init__(self, most: int, seed: int = 0, below: int = 1 << 64) -> None:
        self.most, self.seed, self.items = most, seed, list[tuple[int, str, bytes, str]]()
        self.below = below if most else 0

    def rank(self, shard: str, key: str) -> int | None:
        """Return the hash of a picture; None where it is not chosen."""
        if not self.below:
            return None
        name = f"{self.seed}\0{shard}\0{key}".encode("utf-8", "surrogatepass")
        rank = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
        return rank if rank < self.below else None

    def add(self, rank: int, key: str, data: bytes, label: str) -> None:
        """Take a picture, in place of the one with the largest hash; of equal ones the first stays."""
        if rank < self.below:
            bisect.insort(self.items, (rank, key, data, label), key=operator.itemgetter(0))
            del self.items[self.most :]
            if len(self.items) == self.most:
                self.below = self.items[-1][0]


def _count(counts: Counter[Any], most: int, key: Any, count: int) -> bool:
    """Count ``key``; return False where it is new and there are ``most``."""
    if key not in counts and len(counts) >= most:
        return False
    counts[key] += count
    return True


@dataclass
class ImageStatistics:
    """Images of a field: counts by size, format and mode, as their headers tell, and those that cannot be read."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    unreadable: list[tuple[str, str, str]] = field(default_factory=list)
    """Key, place and reason, of the first ones."""
    bad: int = 0
    least: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (0, 0)

    def add(self, data: bytes, key: str, place: str, decode: bool) -> None:
        """Count an image; with ``decode`` it is decoded to its end."""
        pil = packages.optional("PIL.Image", "stats of images", "images")
        try:
            with pil.open(io.BytesIO(data)) as image:
                size, kind = image.size, f"{image.format} {image.mode}"
                if decode:
                    image.load()
        except Exception as exn:  # Pillow raises all kinds of errors for damaged files
            self.bad += 1
            if len(self.unreadable) < _MOST_NAMED:
                self.unreadable.append((key, place, f"{type(exn).__name__}: {str(exn).partition(' <_io')[0]}"))
            return
        _count(self.sizes, _MOST_VALUES, size, 1)
        self.formats[kind] += 1
        self._widen(size, size)

    def values(self) -> dict[str, Any]:
        """Return it as JSON."""
        counts = {"sizes": list(self.sizes.items()), "formats": list(self.formats.items())}
        bounds = {"least": self.least, "most": self.most}
        return {**counts, **bounds, "unreadable": self.unreadable, "bad": self.bad}

    def merge(self, values: Mapping[str, Any]) -> None:
        """Add the `values` of images behind these."""
        for size, count in values["sizes"]:
            _count(self.sizes, _MOST_VALUES, tuple(size), count)
        for kind, count in values["formats"]:
            self.formats[kind] += count
        self.unreadable += map(tuple, values["unreadable"][: _MOST_NAMED - len(self.unreadable)])
        self.bad += values["bad"]
        self._widen(values["least"], values["most"])

    def _widen(self, least: Sequence[int], most: Sequence[int]) -> None:
        if least[0]:
            first = not self.least[0]
            self.least = (least[0], least[1]) if first else (min(self.least[0], least[0]), min(self.least[1], least[1]))
        self.most = (max(self.most[0], most[0]), max(self.most[1], most[1]))


@dataclass
class FieldStatistics:
    """One field: how many samples have it, the sizes in bytes, and what is in it."""

    name: str
    count: int = 0
    size_bytes: int = 0
    least: int = 0
    most: int = 0
    largest: str = ""
    found: Counter[str] = field(default_factory=Counter)
    """Counts of classes, or of the names in documents."""
    images: ImageStatistics | None = None
    sizes: SizeCounts = field(default_factory=SizeCounts)

    @property
    def extension(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2].lower()

    def add(self, data: bytes, key: str, place: str, decode: bool) -> None:
        """Count the field of a sample."""
        size = len(data)
        self._widen(size, size, key)
        self.count += 1
        self.size_bytes += size
        self.sizes.add(size)
        if self.extension in IMAGES:
            self.images = self.images or ImageStatistics()
            self.images.add(data, key, place, decode)
        elif self.extension in _NUMBERS:
            self._find(data.decode("utf-8", "replace").strip())
        elif self.extension in _DOCUMENTS:
            for name in _names(data):
                self._find(name)

    def values(self) -> dict[str, Any]:
        """Return it as JSON."""
        plain = {name: getattr(self, name) for name in ("count", "size_bytes", "least", "most", "largest")}
        images = self.images and self.images.values()
        return {**plain, "sizes": self.sizes.values(), "found": list(self.found.items()), "images": images}

    def merge(self, values: Mapping[str, Any]) -> None:
        """Add the `values` of this field in samples behind these."""
        self._widen(values["least"], values["most"], values["largest"])
        self.count += values["count"]
        self.size_bytes += values["size_bytes"]
        self.sizes.merge(values["sizes"])
        for value, count in values["found"]:
            self._find(value, count)
        if values["images"] is not None:
            self.images = self.images or ImageStatistics()
            self.images.merge(values["images"])

    def quantile(self, share: float) -> int:
        """Return the size that ``share`` of the fields do not exceed: exact up to 10,000 different ones, else rounded
        down by less than 1 %."""
        return max(self.least, self.sizes.quantile(share))

    def _widen(self, least: int, most: int, largest: str) -> None:
        if not self.count or least < self.least:
            self.least = least
        if not self.count or most > self.most:
            self.most, self.largest = most, largest

    def _find(self, value: str, count: int = 1) -> None:
        most = _MOST_NAMES if self.extension in _DOCUMENTS else _MOST_VALUES
        if value in (_OTHERS, _NO_JSON):
            self.found[value] += count
        elif not _count(self.found, most, value, count) and self.extension in _NUMBERS:
            self.found[_OTHERS] += count


def _names(data: bytes) -> Iterable[str]:
    """Return the names in a document, or what it is instead of an object."""
    try:
        document = json.loads(data)
    except ValueError:
        return [_NO_JSON]
    return document if isinstance(document, dict) else [f"({type(document).__name__})"]


class PartStatistics:
    """Statistics of one shard, to be merged by `ShardStatistics`, with its arguments. Only pictures with a hash
    ``below`` are kept."""

    def __init__(self, *, decode: bool, duplicates: str | None, pictures: int, seed: int, below: int = 1 << 64) -> None:
        self.shard, self.samples = "", 0
        self.fields: dict[str, FieldStatistics] = {}
        self.kinds: Counter[tuple[str, ...]] = collections.Counter()
        self.pictures = PictureChoice(pictures, seed, below)
        self._decode, self._duplicates = decode, duplicates
        self._digests, self._keys, self._offsets = bytearray(), list[str](), list[int]()

    def add(self, sample: Any) -> None:
        """Count one sample."""
        self.shard = self.shard or redact(sample.shard)
        self.samples += 1
        key, place = sample["__key__"], f"{self.shard} @{sample.offset}"
        names = sorted(name for name in sample if not name.startswith("_"))
        self.kinds[tuple(names)] += 1
        for name in names:
            if name not in self.fields:
                self.fields[name] = FieldStatistics(name)
            self.fields[name].add(sample[name], key, place, self._decode)
        self._keep_picture(sample, names, key)
        if self._duplicates in sample:
            self._digests += hashlib.blake2b(sample[self._duplicates], digest_size=_DIGEST_BYTES).digest()
            self._keys.append(key)
            self._offsets.append(sample.offset)

    def _keep_picture(self, sample: Any, names: list[str], key: str) -> None:
        image = next((name for name in names if name.rpartition(".")[2].lower() in IMAGES), None)
        if image is not None and (rank := self.pictures.rank(self.shard, key)) is not None:
            label = next((sample[name] for name in names if name.rpartition(".")[2] in _NUMBERS), b"")
            self.pictures.add(rank, key, bytes(sample[image]), label.decode("utf-8", "replace")[:12])

    def values(self) -> dict[str, Any]:
        """Return it as JSON, with pictures as thumbnails."""
        pictures = self.pictures.items
        return {
            "shard": self.shard,
            "samples": self.samples,
            "fields": [(name, one.values()) for name, one in self.fields.items()],
            "kinds": list(self.kinds.items()),
            "pictures": [(rank, key, _text(_thumbnail(data)), label) for rank, key, data, label in pictures],
            "digests": _text(self._digests),
            "places": list(zip(self._keys, self._offsets, strict=True)),
        }


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


class ShardStatistics:
    """Statistics of samples, in bounded memory (and 100 bytes a sample with ``duplicates``).

    ``duplicates`` is a field whose equal bytes are reported. ``pictures`` images (of the first image field) are kept
    for a contact sheet, as thumbnails; ``seed`` chooses them. ``decode``: images are decoded, and not only their
    headers read.

    Each shard is counted by itself (`PartStatistics`), and merged behind those before it. So the tasks of `stats_job`,
    which count a shard each, give the same.
    """

    def __init__(
        self, *, decode: bool = False, duplicates: str | None = None, pictures: int = 0, seed: int = 0
    ) -> None:
        self.samples = 0
        self.shards: set[str] = set()
        self.fields: dict[str, FieldStatistics] = {}
        self.kinds: Counter[tuple[str, ...]] = collections.Counter()
        self.pictures = PictureChoice(pictures, seed)
        self.duplicates = 0
        self.repeated: list[tuple[str, str, str]] = []
        """Key, place and the key with the same bytes, of the first duplicates."""
        self._seen: dict[bytes, str] = {}
        self._how: dict[str, Any] = {"decode": decode, "duplicates": duplicates, "pictures": pictures, "seed": seed}

    @property
    def bytes(self) -> int:
        """Bytes of all fields."""
        return sum(one.size_bytes for one in self.fields.values())

    def read(self, samples: Iterable[Any]) -> None:
        """Count ``samples``, as `WebDataset` gives them, in the order of their shards."""
        part, before = PartStatistics(**self._how), None
        for sample in samples:
            if before is not None and (sample.shard != before.shard or sample.offset <= before.offset):
                self.merge(part.values())
                part = PartStatistics(**self._how, below=self.pictures.below)
            part.add(sample)
            before = sample
        self.merge(part.values())

    def merge(self, values: Mapping[str, Any]) -> None:
        """Add the `PartStatistics.values` of the next shard."""
        if not values["samples"]:
            return
        self.samples += values["samples"]
        self.shards.add(values["shard"])
        for name, of_field in values["fields"]:
            if name not in self.fields:
                self.fields[name] = FieldStatistics(name)
            self.fields[name].merge(of_field)
        for kind, count in values["kinds"]:
            self.kinds[tuple(kind)] += count
        for rank, key, data, label in values["pictures"]:
            self.pictures.add(rank, key, base64.b64decode(data), label)
        digests = base64.b64decode(values["digests"])
        for number, (key, offset) in enumerate(values["places"]):
            digest = digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
            if digest not in self._seen:
                self._seen[digest] = key
                continue
            self.duplicates += 1
            if len(self.repeated) < _MOST_NAMED:
                self.repeated.append((key, f"{values['shard']} @{offset}", self._seen[digest]))


@dataclass(frozen=True)
class StatsWork:
    """Work of `stats_job`. For the fields see `ShardStatistics`."""

    decode: bool = False
    duplicates: str | None = None
    pictures: int = 0
    seed: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the fields that the result depends on."""
        return {"kind": "stats", **asdict(self)}

    def run(self, task: Task) -> Record:
        """Count the samples of the shard of ``task``; the record has them."""
        (shard,) = task.inputs
        info = {"url": shard.url} | ({"version": shard.version} if shard.version else {})
        pipeline, part = DataPipeline([info], tarfile_to_samples()), PartStatistics(**asdict(self))
        try:
            with pipeline:
                for sample in pipeline:
                    part.add(sample)
        finally:
            add_traffic(pipeline.traffic())
        skipped, more = skipped_entries(pipeline.ledger)
        return Record(
            task=task.number,
            id=task.identity(self.describe()),
            inputs=task.inputs,
            outputs=(),
            samples_in=part.samples,
            bytes_in=shard.size or int(pipeline.statistics().bytes),
            skipped=skipped,
            more={**more, "stats": part.values()},
        )


class StatsJob(Job):
    """A job of `stats_job`."""

    work: StatsWork

    @property
    def leads(self) -> bool:
        """False for all ranks but the first."""
        return not isinstance(self._engine, RankedEngine) or self._engine.leads

    def result(self) -> ShardStatistics:
        """Return the statistics of all shards, once every task, of any runner, has a record."""
        self.wait()
        statistics = ShardStatistics(**asdict(self.work))
        for record in self.folder.records(range(len(self.tasks))):
            statistics.merge(record.more["stats"])
        return statistics


def stats_job(
    inputs: Urls,
    out: str,
    work: StatsWork,
    *,
    engine: Any = "local",
    cpus: float | None = None,
    workers: int | None = None,
    attempts: int = 4,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> StatsJob:
    """Return the job with a task for each of the shards ``inputs`` (as for `map_shards`), whose counts
    `StatsJob.result` merges. Its records are in ``_wds/stats`` in the folder ``out``. See `map_shards` for the other
    arguments."""
    given: dict[str, Any] = {"engine": engine, "options": {"cpus": cpus, "workers": workers}, "attempts": attempts}
    return StatsJob(
        work,
        Plan(planned(inputs)),
        JobFolder(job_url(f"{out.rstrip('/')}/", "stats")),
        overwrite=overwrite,
        on_progress=on_progress,
        finishes=False,
        **given,
    )


_SIDE, _LABEL, _GAP = 128, 15, 6
_BACKGROUND, _INK, _FAINT, _BAR, _WRONG = "#ffffff", "#1f2328", "#8c959f", "#0969da", "#cf222e"
_HISTOGRAM = 110


def contact_sheet(pictures: PictureChoice, sizes: Mapping[tuple[int, int], int], title: str, columns: int = 8) -> bytes:
    """Return a PNG of ``pictures``, ``columns`` in a row, and below a histogram of the longer sides in ``sizes``. An
    image that cannot be read is a red frame. ``MissingExtra`` without Pillow."""
    pil = packages.optional("PIL.Image", "a contact sheet", "images")
    draw_of = packages.optional("PIL.ImageDraw", "a contact sheet", "images").Draw
    font = packages.optional("PIL.ImageFont", "a contact sheet", "images").load_default(11)
    columns = max(1, min(columns, len(pictures.items)))
    rows = math.ceil(len(pictures.items) / columns)
    wide = max(columns * (_SIDE + _GAP) + _GAP, 560)
    top = 26
    high = top + rows * (_SIDE + _LABEL + _GAP) + _HISTOGRAM
    sheet = pil.new("RGB", (wide, high), _BACKGROUND)
    draw = draw_of(sheet)
    draw.text((_GAP, 7), _fitting(draw, font, title, wide - 2 * _GAP), fill=_INK, font=font)
    for number, (_, key, data, label) in enumerate(pictures.items):
        x = _GAP + number % columns * (_SIDE + _GAP)
        y = top + number // columns * (_SIDE + _LABEL + _GAP)
        if data:
            small = pil.open(io.BytesIO(data))
            sheet.paste(small, (x + (_SIDE - small.width) // 2, y + (_SIDE - small.height) // 2))
        else:
            draw.rectangle((x, y, x + _SIDE - 1, y + _SIDE - 1), outline=_WRONG, width=2)
            draw.line((x, y, x + _SIDE, y + _SIDE), fill=_WRONG, width=2)
        text = f"{label}  {key}" if label else key
        draw.text((x, y + _SIDE + 1), _fitting(draw, font, text, _SIDE), fill=_INK, font=font)
    _histogram(draw, font, sizes, (_GAP, high - _HISTOGRAM + 14, wide - _GAP, high - 18))
    stream = io.BytesIO()
    sheet.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _thumbnail(data: bytes) -> bytes:
    """Return an image as a small JPEG, 128 pixels at most; nothing where it cannot be read."""
    pil = packages.optional("PIL.Image", "a contact sheet", "images")
    stream = io.BytesIO()
    try:
        with pil.open(io.BytesIO(data)) as image:
            image.draft("RGB", (_SIDE, _SIDE))
            small = image.convert("RGB")
            small.thumbnail((_SIDE, _SIDE))
            small.save(stream, "JPEG", quality=90)
    except Exception:  # Pillow raises all kinds of errors for damaged files
        return b""
    return stream.getvalue()


def _fitting(draw: Any, font: Any, text: str, wide: int) -> str:
    """Return ``text``, cut so that it fits, with control characters as spaces."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    if draw.textlength(text, font=font) <= wide:
        return text
    while text and draw.textlength(text + "…", font=font) > wide:
        text = text[:-1]
    return text + "…"


def _histogram(
    draw: Any, font: Any, sizes: Mapping[tuple[int, int], int], box: tuple[int, int, int, int], bars: int = 40
) -> None:
    """Draw how many images have which longer side, on a logarithmic scale."""
    left, top, right, bottom = box
    if not sizes:
        return
    sides = [max(size) for size in sizes]
    low, high = math.log2(min(sides)), math.log2(max(sides) + 1)
    counts = [0] * bars
    for size, count in sizes.items():
        place = int((math.log2(max(size)) - low) / max(high - low, 1e-9) * bars)
        counts[min(bars - 1, place)] += count
    step = (right - left) / bars
    for number, count in enumerate(counts):
        if count:
            height = max(1, (bottom - top) * count / max(counts))
            x = left + number * step
            draw.rectangle((x, bottom - height, x + step - 2, bottom), fill=_BAR)
    draw.line((left, bottom, right, bottom), fill=_FAINT)
    draw.text((left, bottom + 3), f"{min(sides)} px", fill=_INK, font=font)
    text = f"{max(sides)} px"
    draw.text((right - draw.textlength(text, font=font), bottom + 3), text, fill=_INK, font=font)
    text = "longer side of the images"
    draw.text(((left + right - draw.textlength(text, font=font)) / 2, bottom + 3), text, fill=_FAINT, font=font)
