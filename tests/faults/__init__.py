"""Every fault in every store: what is healed, what is an error, and what nobody can see."""
