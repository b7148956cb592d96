"""The loader service: one shard cache a node, spoken to in AIStore's protocol."""

__all__: list[str] = []
