"""What ranks sent and waited for: their books, the formula, times and timelines."""
