"""AIStore."""
