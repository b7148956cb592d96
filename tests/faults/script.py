"""The rows: what the server does in place of the right answer, and to which requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.faults.objects import PART_BYTES, Objects
from tests.faults.worlds import World
from tests.servers.behaviour import BEFORE_HEAD, Behaviour, Request

__all__ = ["Script", "write"]

CUT_AFTER = 40_000
"""Bytes of a body that arrive before it breaks: a part's rest then fits into the next answer."""
_MODES: dict[str, dict[str, Any]] = {
    "once": {"skip": 1, "times": 1},
    "every_third": {"skip": 1, "every": 3},
    "always": {},
    "first_reading": {},
}
_STORM = 5
_REFUSED_S = 0.03
_TRICKLE_BYTES_S = 50_000
"""Less than the 16 KiB in each `reading.STALL_S` that are still taken for a transfer."""
_TRICKLE_OF_OTHERS_BYTES_S = 1_000_000
"""Another client waits for as long as anything comes, so there it need not last."""


@dataclass(slots=True)
class Script:
    """What was scripted; ``flipped`` are the damaged bytes that were sent: ``(shard, offset)``."""

    behaviour: Behaviour
    flipped: list[tuple[str, int]] = field(default_factory=list)


def write(world: World, objects: Objects, fault: str, mode: str) -> Script:
    """Have ``world`` misbehave by ``fault`` for the requests of ``mode``."""
    if fault == "expiring_signature" and world.plain:
        world.sign()
    script = Script(Behaviour())
    chosen = dict(_MODES[mode])
    if fault == "storm" and mode == "once":
        chosen["times"] = _STORM
    if fault in ("forbidden", "missing") and mode != "always":
        chosen["skip"] = 4  # by then one was answered well, whatever is asked for at once
    made = _SCRIPTED[fault](world, objects, script, mode)
    when = _first_time(world) if mode == "first_reading" else world.is_data
    if fault == "expiring_signature" and mode != "always":
        when = _used(world)
        chosen["skip"] = 0
    script.behaviour = world.data.behave(replace(made, when=when, **chosen))
    return script


def _first_time(world: World) -> Callable[[Request], bool]:
    """Data requests for what was not asked for before."""
    seen: set[tuple[str, str | None]] = set()

    def when(request: Request) -> bool:
        if not world.is_data(request) or (request.path, request.range) in seen:
            return False
        seen.add((request.path, request.range))
        return True

    return when


def _used(world: World) -> Callable[[Request], bool]:
    """Data requests whose signature is not new: one that was just given holds for a while. Where requests do not show
    how old theirs is, those that are made again have a new one."""
    if not world.plain:
        return _first_time(world)
    seen: set[str] = set()

    def when(request: Request) -> bool:
        known = request.target in seen
        seen.add(request.target)
        return known and world.is_data(request)

    return when


def _plain(**fields: Any) -> Callable[..., Behaviour]:
    return lambda world, objects, script, mode: Behaviour(**fields)


def _corrupt(find: Callable[[Objects, str, int, int], int | None], within: int) -> Callable[..., Behaviour]:
    def make(world: World, objects: Objects, script: Script, mode: str) -> Behaviour:
        def corrupt(path: str, first: int, end: int) -> int | None:
            name = world.name_of(path)
            at = find(objects, name, first, end)
            if at is None:
                return None
            script.flipped.append((name, at))
            return at + within

        return Behaviour(corrupt=corrupt)

    return make


def _trickle(world: World, objects: Objects, script: Script, mode: str) -> Behaviour:
    return Behaviour(rate_bytes_s=_TRICKLE_BYTES_S if world.direct else _TRICKLE_OF_OTHERS_BYTES_S)


def _changed(world: World, objects: Objects, script: Script, mode: str) -> Behaviour:
    def other(request: Request, content: bytes) -> bytes:
        # Another byte near the end, and another one each time: all that comes before it is as it was.
        changed = bytearray(content)
        changed[-2000] ^= 1 + request.number % 255
        return bytes(changed)

    return Behaviour(content=other)


def _no_length(world: World, objects: Objects, script: Script, mode: str) -> Behaviour:
    return Behaviour(ignore_range=True, no_length=True, cut_after=objects.half_a_sample, cut="fin")


_SCRIPTED: dict[str, Callable[[World, Objects, Script, str], Behaviour]] = {
    "reset_before_head": _plain(cut_after=BEFORE_HEAD),
    "reset_mid_body": _plain(cut_after=CUT_AFTER),
    "fin_mid_body": _plain(cut_after=CUT_AFTER, cut="fin"),
    "stall": _plain(stall_after=CUT_AFTER),
    "trickle": _trickle,
    "length_above": _plain(length_error=7),
    "length_below": _plain(length_error=-7),
    "no_length_cut": _no_length,
    "corrupt_byte": _corrupt(Objects.payload_in, 0),
    "corrupt_header": _corrupt(Objects.header_in, 100),  # in the mode's digits
    "shifted_range": _plain(shift=512),
    "ignored_range": _plain(ignore_range=True),
    "too_many": _plain(status=429),
    "unavailable": _plain(status=503, headers={"retry-after": "1"}),
    "storm": _plain(status=500),
    "forbidden": _plain(status=403),
    "missing": _plain(status=404),
    "no_response": _plain(stall_after=BEFORE_HEAD),
    "bad_chunk": _plain(bad_chunk=True, cut_after=CUT_AFTER, cut="fin"),
    "dropped_keep_alive": _plain(hang_up="silent"),
    "changed_object": _changed,
    "refused": lambda world, objects, script, mode: Behaviour(deaf_s=0 if mode == "always" else _REFUSED_S),
    "expiring_signature": lambda world, objects, script, mode: world.expired,
}

assert PART_BYTES - CUT_AFTER < CUT_AFTER
