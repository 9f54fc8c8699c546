"""Several recipes on the same model, data and seed: run, measured, and put into one table."""
