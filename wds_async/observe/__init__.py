"""What a job sees of itself: ledger, cost, metrics, progress, diagnosis."""
