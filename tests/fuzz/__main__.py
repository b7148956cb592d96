"""``python -m tests.fuzz [TARGET…] --seconds 10``: look for inputs that a reader answers wrongly.

With ``atheris`` installed (extra ``fuzz``; Linux) libFuzzer looks, led by coverage; without it inputs of the corpus are
changed at random. Each target is a process of its own. What is found is kept in ``out/fuzz`` and ends the run with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.mutate import Mutations

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("out/fuzz")
_LONGEST_BYTES = 16 << 10
_ONE_INPUT_S = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help="all of them unless named")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--runs", type=int, default=0, help="inputs for each target, at most")
    parser.add_argument("--seed", type=int, default=0, help="the same looks at the same inputs; 0: others each time")
    parser.add_argument("--without-atheris", action="store_true", help="change inputs at random")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    led = importlib.util.find_spec("atheris") is not None and not given.without_atheris
    if given.child:
        (_fuzz_led if led else _fuzz_at_random)(given.child, given)
        return 0
    from tests.fuzz.targets import TARGETS

    wrong = [name for name in given.target or TARGETS if not _in_child(name, given, led)]
    return 1 if wrong else 0


def _in_child(name: str, given: argparse.Namespace, led: bool) -> bool:
    command = [sys.executable, "-m", "tests.fuzz", "--child", name]
    command += [word for option in ("seconds", "runs", "seed") for word in (f"--{option}", str(getattr(given, option)))]
    began = time.monotonic()
    process = subprocess.run(
        [*command, *([] if led else ["--without-atheris"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=given.seconds + 120,
        env={**os.environ, **({"PYTHONHASHSEED": "0"} if given.seed else {})},
        check=False,
    )
    good = process.returncode == 0
    said = process.stdout.decode(errors="replace")
    how = "led by coverage" if led else "at random"
    told = f"{name:14} {how}, {time.monotonic() - began:.0f} s: {'nothing found' if good else 'FOUND'}\n"
    sys.stdout.write(told if good else told + said[-6000:])
    sys.stdout.flush()
    return good


def _fuzz_led(name: str, given: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=["wds_async"]):
        from tests.fuzz.targets import run
    FOUND.mkdir(parents=True, exist_ok=True)
    grown = tempfile.mkdtemp(prefix="fuzz-")
    options = {
        "max_total_time": int(given.seconds) or 1,
        "runs": given.runs or -1,
        "seed": given.seed,
        "max_len": _LONGEST_BYTES,
        "timeout": _ONE_INPUT_S,
        "rss_limit_mb": 2048,
        "artifact_prefix": f"{FOUND}/{name}-",
    }
    arguments = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), grown]
    atheris.Setup([*arguments, str(CORPUS / name)], lambda data: run(name, data))
    atheris.Fuzz()


def _fuzz_at_random(name: str, given: argparse.Namespace) -> None:
    from tests.fuzz.targets import run

    mutations = Mutations(CORPUS / name, seed=given.seed or os.getpid())
    deadline, runs = time.monotonic() + given.seconds, 0
    while time.monotonic() < deadline and (not given.runs or runs < given.runs):
        runs += 1
        data = mutations.next()
        try:
            run(name, data)
        except BaseException:
            FOUND.mkdir(parents=True, exist_ok=True)
            (FOUND / f"{name}-random").write_bytes(data)
            raise


if __name__ == "__main__":
    sys.exit(main())
