"""Tools around shards: making, filtering, converting, comparing and copying them, as the command line does."""
