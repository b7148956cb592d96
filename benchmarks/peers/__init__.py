"""Peers: one small file each, see `benchmarks.peer.Peer`."""
