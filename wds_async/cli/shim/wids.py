"""Found as ``wids`` by a process that a script under ``wds-async run`` has spawned: becomes wds_async.wids."""

from importlib import import_module

from wds_async.cli.alias import install

__all__: list[str] = []

install()
import_module("wids")  # the finder's, which takes this module's place
