"""Rooms of the double."""
