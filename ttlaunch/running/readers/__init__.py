"""A run read back from its folder, while it goes on or afterwards: reported, followed, compared, repeated."""
