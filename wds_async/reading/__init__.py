"""From shards to samples: the reading stage, its parts, recovery from damage, record streams, files by URL."""
