"""Classes and sources for other frameworks, a module for each."""
