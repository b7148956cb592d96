"""A program that runs a job as a user's script does, without a guard: ``driver.py INPUTS OUTPUT [name=value …]``."""

from __future__ import annotations

import json
import sys

from wds_async import distributed as dist

inputs, output, *options = sys.argv[1:]
arguments = {name: json.loads(value) for name, _, value in (option.partition("=") for option in options)}
sys.stdout.write("begin\n")
sys.stdout.flush()
function = f"tests.distributed.functions:{arguments.pop('function', 'slow')}"
summary = dist.map_shards(inputs, output, function, index=True, **arguments).run()
sys.stdout.write(json.dumps({"done": summary.done, "before": summary.before, "lost": summary.lost}) + "\n")
