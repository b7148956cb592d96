"""Reading of samples from shards: the reading stage, its parts, recovery from damage, record streams, files by URL."""
