"""Stores and the credentials for them: one small module per backend."""

__all__: list[str] = []
