"""Listings of folders, and searches for names that match a pattern."""
