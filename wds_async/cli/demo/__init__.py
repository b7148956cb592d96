"""``wds-async demo``: a small training from shards streamed over HTTP, with its data and server."""
