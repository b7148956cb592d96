"""Engines carry attempts at tasks to processes and machines. The job decides what a task does and when it is done."""
