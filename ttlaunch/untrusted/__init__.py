"""Files that strangers wrote and that are programs in disguise or take any amount of time: they are read in a limited child."""
