"""Convert a folder of images, with one subfolder per class, into shards.

``wds-async create DESTINATION SOURCE --imagefolder --shuffle 0`` does this, in any store and by many processes. This
script is for those that want to change what a sample holds.

``python examples/convert_folder.py SOURCE DESTINATION``; without arguments it makes such a folder and converts that.
The files' bytes are stored unchanged. Samples are shuffled once here, because the order within a shard is fixed and the
shuffle buffer of a training only reaches so far.
"""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import wds_async as wds

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def convert(source: Path, destination: str, maxcount: int = 100_000, maxsize: float = 500e6) -> int:
    """Write the pictures below ``source`` to ``destination`` (``train-%06d.tar``, local or a URL) and return their
    number. Shards of some hundred megabytes are read fastest; a training wants a few of them for each worker."""
    classes = sorted(folder.name for folder in source.iterdir() if folder.is_dir())
    files = [path for path in sorted(source.rglob("*")) if path.suffix.lower() in SUFFIXES]
    random.Random(0).shuffle(files)
    with wds.ShardWriter(destination, maxcount=maxcount, maxsize=maxsize, verbose=0, mtime=0) as sink:
        for number, path in enumerate(files):
            label = path.relative_to(source).parts[0]
            sink.write(
                {
                    # A key has no dot in its last part: what follows the first dot is the field's name.
                    "__key__": f"{label}/{number:08d}",
                    path.suffix.lower()[1:]: path.read_bytes(),
                    "cls": classes.index(label),
                    "json": {"file": str(path.relative_to(source)), "label": label},
                }
            )
    return len(files)


def make_folder(folder: Path) -> Path:
    """Thirty small pictures in three classes."""
    rng = np.random.default_rng(0)
    for number in range(30):
        path = folder / ("cat", "dog", "owl")[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return folder


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        if len(sys.argv) > 2:
            source, destination = Path(sys.argv[1]), f"{sys.argv[2]}/train-%06d.tar"
        else:
            source, destination = make_folder(Path(temporary, "pictures")), f"{temporary}/train-%06d.tar"
        small = {} if len(sys.argv) > 2 else {"maxcount": 10}  # so that the example has more than one shard
        count = convert(source, destination, **small)
        print(f"{count} pictures converted")
        if len(sys.argv) <= 2:
            shards = sorted(Path(temporary).glob("*.tar"))
            classes = [sample["cls"] for sample in wds.WebDataset(shards, shardshuffle=False).decode()]
            print(f"{len(shards)} shards, {len(classes)} samples read back, classes {sorted(set(classes))}")
