"""One disk cache of shards for all processes of a host: names, entries, locks, publishing, eviction."""

__all__: list[str] = []
