"""Read a run from its folder, while it is active or afterwards, in order to report, follow, compare or repeat it."""
