"""Work on many machines: map, reshard and index shards, feed trainers, and Ray Data's source and sink.

This is a door: names are looked up when they are first used (PEP 562). Ray and Dask are imported by the engines of
these names only.
"""
