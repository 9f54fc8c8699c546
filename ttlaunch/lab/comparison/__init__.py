"""Several recipes on the same model, data and seed: carried out, measured, and put into one table."""
