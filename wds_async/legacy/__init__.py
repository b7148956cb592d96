"""WebDataset's older classes and functions, 2020 to 2024: they work, and say what to use today."""
