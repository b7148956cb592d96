"""Random access to samples of shards by number."""
