"""`ShardStatistics`: fields, sizes, classes, images and duplicates of shards; and `contact_sheet`, to look at them."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wds_async import packages
from wds_async.redact import redact

__all__ = ["IMAGES", "FieldStatistics", "ImageStatistics", "ShardStatistics", "contact_sheet"]

IMAGES = frozenset(["jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "tif", "tiff", "gif", "bmp", "img", "image"])
_NUMBERS = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
_MOST_VALUES = 10_000
_MOST_NAMES = 1000
_MOST_NAMED = 20
_SIZES_KEPT = 10_000


class _Reservoir:
    """A sample of what passes by, each with the same probability (Vitter's algorithm R)."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self.most, self.count, self.items = most, 0, list[Any]()
        self._random = random.Random(seed)

    def place(self) -> int | None:
        """Return where the next item goes; None if it is passed over."""
        self.count += 1
        if len(self.items) < self.most:
            self.items.append(None)
            return len(self.items) - 1
        place = self._random.randrange(self.count)
        return place if place < self.most else None

    def add(self, item: Any) -> None:
        if (place := self.place()) is not None:
            self.items[place] = item


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
    pixels: int = 0

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
        if size in self.sizes or len(self.sizes) < _MOST_VALUES:
            self.sizes[size] += 1
        self.formats[kind] += 1
        self.pixels += size[0] * size[1]
        self.least = size if not self.least[0] else (min(self.least[0], size[0]), min(self.least[1], size[1]))
        self.most = (max(self.most[0], size[0]), max(self.most[1], size[1]))


@dataclass
class FieldStatistics:
    """One field: how many samples have it, and the sizes in bytes. ``values`` are counts of classes, or of the names in
    documents."""

    name: str
    count: int = 0
    size_bytes: int = 0
    least: int = 0
    most: int = 0
    largest: str = ""
    values: Counter[str] = field(default_factory=Counter)
    images: ImageStatistics | None = None

    def __post_init__(self) -> None:
        self._sizes = _Reservoir(_SIZES_KEPT)

    @property
    def extension(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2].lower()

    def add(self, data: bytes, key: str, place: str, decode: bool) -> None:
        """Count the field of a sample."""
        size = len(data)
        if not self.count or size < self.least:
            self.least = size
        if size > self.most or not self.count:
            self.most, self.largest = size, key
        self.count += 1
        self.size_bytes += size
        self._sizes.add(size)
        if self.extension in IMAGES:
            self.images = self.images or ImageStatistics()
            self.images.add(data, key, place, decode)
        elif self.extension in _NUMBERS:
            self._value(data.decode("utf-8", "replace").strip())
        elif self.extension in ("json", "jsn"):
            self._document(data)

    def quantile(self, share: float) -> int:
        """Return the size that ``share`` of the fields do not exceed: exact up to 10,000, else estimated."""
        ordered = sorted(self._sizes.items)
        return int(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]) if ordered else 0

    def _value(self, value: str) -> None:
        if value in self.values or len(self.values) < _MOST_VALUES:
            self.values[value] += 1
        else:
            self.values["(others)"] += 1

    def _document(self, data: bytes) -> None:
        try:
            document = json.loads(data)
        except ValueError:
            self.values["(no JSON)"] += 1
            return
        names = document if isinstance(document, dict) else [f"({type(document).__name__})"]
        for name in names:
            if name in self.values or len(self.values) < _MOST_NAMES:
                self.values[name] += 1


class ShardStatistics:
    """Statistics of samples, in bounded memory (and 100 bytes a sample with ``duplicates``).

    ``duplicates`` is a field whose equal bytes are reported. ``pictures`` images (of the first image field) are kept
    for a contact sheet, drawn with ``seed``. ``decode``: images are decoded, and not only their headers read.
    """

    def __init__(
        self, *, decode: bool = False, duplicates: str | None = None, pictures: int = 0, seed: int = 0
    ) -> None:
        self.samples = self.bytes = 0
        self.fields: dict[str, FieldStatistics] = {}
        self.shards: dict[str, int] = {}
        self.repeated: list[tuple[str, str, str]] = []
        """Key, place and the key with the same bytes, of the first duplicates."""
        self.duplicates = 0
        self.pictures = _Reservoir(pictures, seed)
        self._decode, self._duplicates = decode, duplicates
        self._seen: dict[bytes, str] = {}
        self.kinds: Counter[tuple[str, ...]] = collections.Counter()

    def read(self, samples: Iterable[Any]) -> None:
        """Count ``samples``, as `WebDataset` gives them."""
        for sample in samples:
            self.add(sample)

    def add(self, sample: Any) -> None:
        """Count one sample."""
        key, place = sample["__key__"], f"{redact(sample.shard)} @{sample.offset}"
        self.samples += 1
        self.shards[sample.shard] = self.shards.get(sample.shard, 0) + 1
        names = sorted(name for name in sample if not name.startswith("_"))
        self.kinds[tuple(names)] += 1
        for name in names:
            data = sample[name]
            self.bytes += len(data)
            if name not in self.fields:
                self.fields[name] = FieldStatistics(name)
            self.fields[name].add(data, key, place, self._decode)
        self._keep_picture(sample, names, key)
        if self._duplicates in sample:
            self._duplicate(sample[self._duplicates], key, place)

    def _keep_picture(self, sample: Any, names: list[str], key: str) -> None:
        if self.pictures.most:
            image = next((name for name in names if name.rpartition(".")[2].lower() in IMAGES), None)
            if image is not None and (where := self.pictures.place()) is not None:
                label = next((sample[name] for name in names if name.rpartition(".")[2] in _NUMBERS), b"")
                self.pictures.items[where] = (key, bytes(sample[image]), label.decode("utf-8", "replace")[:12])

    def _duplicate(self, data: bytes, key: str, place: str) -> None:
        other = self._seen.setdefault(hashlib.blake2b(data, digest_size=16).digest(), key)
        if other is not key:
            self.duplicates += 1
            if len(self.repeated) < _MOST_NAMED:
                self.repeated.append((key, place, other))


_SIDE, _LABEL, _GAP = 128, 15, 6
_BACKGROUND, _INK, _FAINT, _BAR, _WRONG = "#ffffff", "#1f2328", "#8c959f", "#0969da", "#cf222e"
_HISTOGRAM = 110


def contact_sheet(
    pictures: Sequence[tuple[str, bytes, str]], sizes: Mapping[tuple[int, int], int], title: str, columns: int = 8
) -> bytes:
    """Return a PNG of ``pictures`` (key, bytes of an image, label), ``columns`` in a row, and below a histogram of the
    longer sides in ``sizes``. An image that cannot be read is a red frame. ``MissingExtra`` without Pillow."""
    pil = packages.optional("PIL.Image", "a contact sheet", "images")
    draw_of = packages.optional("PIL.ImageDraw", "a contact sheet", "images").Draw
    font = packages.optional("PIL.ImageFont", "a contact sheet", "images").load_default(11)
    columns = max(1, min(columns, len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    wide = max(columns * (_SIDE + _GAP) + _GAP, 560)
    top = 26
    high = top + rows * (_SIDE + _LABEL + _GAP) + _HISTOGRAM
    sheet = pil.new("RGB", (wide, high), _BACKGROUND)
    draw = draw_of(sheet)
    draw.text((_GAP, 7), _fitting(draw, font, title, wide - 2 * _GAP), fill=_INK, font=font)
    for number, (key, data, label) in enumerate(pictures):
        x = _GAP + number % columns * (_SIDE + _GAP)
        y = top + number // columns * (_SIDE + _LABEL + _GAP)
        _thumbnail(pil, sheet, draw, data, x, y)
        text = f"{label}  {key}" if label else key
        draw.text((x, y + _SIDE + 1), _fitting(draw, font, text, _SIDE), fill=_INK, font=font)
    _histogram(draw, font, sizes, (_GAP, high - _HISTOGRAM + 14, wide - _GAP, high - 18))
    stream = io.BytesIO()
    sheet.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _thumbnail(pil: Any, sheet: Any, draw: Any, data: bytes, x: int, y: int) -> None:
    try:
        with pil.open(io.BytesIO(data)) as image:
            image.draft("RGB", (_SIDE, _SIDE))
            small = image.convert("RGB")
            small.thumbnail((_SIDE, _SIDE))
    except Exception:  # Pillow raises all kinds of errors for damaged files
        draw.rectangle((x, y, x + _SIDE - 1, y + _SIDE - 1), outline=_WRONG, width=2)
        draw.line((x, y, x + _SIDE, y + _SIDE), fill=_WRONG, width=2)
        return
    sheet.paste(small, (x + (_SIDE - small.width) // 2, y + (_SIDE - small.height) // 2))


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
