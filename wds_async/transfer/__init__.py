"""The engine: from shards to slabs of bytes, in order, within a budget."""

__all__: list[str] = []
