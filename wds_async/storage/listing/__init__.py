"""What is in folders, and what patterns match there."""
