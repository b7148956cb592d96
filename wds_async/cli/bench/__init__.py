"""``wds-async bench``: measured reads, charts and advice."""
