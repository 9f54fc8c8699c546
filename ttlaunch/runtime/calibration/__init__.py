"""What a calibration runs in each rank: a recipe of its own, which measures messages and rehearses the steps of another plan."""
