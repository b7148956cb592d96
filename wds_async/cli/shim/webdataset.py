"""Found as ``webdataset`` by a process that a script under ``wds-async run`` has spawned: becomes wds_async."""

from wds_async.cli.alias import install

__all__: list[str] = []

install()
