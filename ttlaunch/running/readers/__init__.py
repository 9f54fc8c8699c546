"""Read a run back from its folder, while it goes on or afterwards: to report, follow, compare or repeat it."""
