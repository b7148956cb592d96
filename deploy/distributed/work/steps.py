"""The work of the jobs in deploy/distributed: change these functions to what you need.

All pods find the module by ``PYTHONPATH``, so that a job names a function as ``steps:smaller``. What a function gives
may depend on the sample alone: then a task that is run again writes the same bytes again.
"""

import io
from typing import Any

from PIL import Image

SIDE = 256


def smaller(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with its picture in sides of `SIDE` pixels at most."""
    with Image.open(io.BytesIO(sample["jpg"])) as picture:
        picture.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        picture.convert("RGB").save(out, "JPEG", quality=90)
    return {**sample, "jpg": out.getvalue()}
