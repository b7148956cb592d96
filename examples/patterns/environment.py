"""The same program, led elsewhere by its environment: ``python examples/patterns/environment.py``."""

import os
import subprocess
import sys

from shards import SAMPLES, SHARDS, served, shards

PROGRAM = """
import sys, wds_async as wds
print(sum(1 for _ in wds.WebDataset(sys.argv[1], shardshuffle=False)))
"""


def count(url: str, **environment: str) -> int:
    """The samples that the program finds at ``url``."""
    command = [sys.executable, "-c", PROGRAM, url]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return int(done.stdout)


with shards() as url, served() as host:
    expected = SHARDS * SAMPLES
    assert count(f"gs://bucket/{url}", WDS_REWRITE=f"gs://bucket/={os.getcwd()}/") == expected
    assert count(f"gs://bucket/{url}", WDS_REWRITE=f"gs://bucket/={host}/") == expected
    assert count(f"gs://bucket/{url}", WDS_REWRITE=f"gs://bucket/=pipe:curl -s {host}/") == expected
    assert count("${PLACE}/" + url, WDS_PLACE=host) == expected
    for _ in range(2):  # the second time from the cache
        assert count(f"{host}/{url}", WDS_CACHE="./cache", WDS_VERBOSE_CACHE="1") == expected
    print("the environment leads where it says")
