"""Where shards are and with whose authority: one small module a backend."""

__all__: list[str] = []
