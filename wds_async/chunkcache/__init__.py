"""A disk cache of objects in chunks that are readable as they arrive: chunks, their index, what stays and what goes."""

__all__: list[str] = []
