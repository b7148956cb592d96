"""Every way to name the data, 2020 to today: ``python examples/patterns/sources.py``."""

import logging
import subprocess
import sys
import warnings

from shards import SAMPLES, SHARDS, served, shards

import wds_async as wds

warnings.simplefilter("ignore")  # shardshuffle=True means 100, and says so each time
logging.getLogger("wds_async").setLevel("ERROR")  # a pipe: that is not needed is named
ALL = SHARDS * SAMPLES


def count(dataset: wds.WebDataset) -> int:
    """The number of samples."""
    return sum(1 for _ in dataset)


with shards() as url, served() as host:
    one = "x-000000.tar"
    assert count(wds.WebDataset(url)) == ALL
    assert count(wds.WebDataset(f"{host}/{url}")) == ALL
    assert count(wds.WebDataset([f"{host}/x-000000.tar", "x-000001.tar"])) == 2 * SAMPLES
    assert count(wds.WebDataset(f"pipe:curl -L -s {host}/{one} || true")) == SAMPLES
    assert count(wds.WebDataset(f"pipe:cat {url}")) == ALL
    assert count(wds.WebDataset(f"file:{one}")) == SAMPLES
    assert count(wds.WebDataset(url, shardshuffle=True)) == ALL
    assert count(wds.WebDataset(f"{host}/{url}", cache_dir="./cache")) == ALL
    assert len(wds.WebDataset(url, length=ALL)) == ALL
    assert count(wds.WebDataset(url, resampled=True).shuffle(100).with_epoch(150)) == 150
    # Standard input: `cat x.tar | python train.py` with the URL "-".
    program = "import wds_async as wds; print(sum(1 for _ in wds.WebDataset('-', shardshuffle=False)))"
    with open(one, "rb") as stream:
        printed = subprocess.run([sys.executable, "-c", program], stdin=stream, capture_output=True, check=True).stdout
    assert int(printed) == SAMPLES
    print("all sources give their samples")
