"""Feeds: batches made on CPU machines for trainers that would otherwise wait for them."""
