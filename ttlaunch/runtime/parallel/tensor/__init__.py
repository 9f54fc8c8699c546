"""Matrices split over ranks: which values a rank has, and the two sums with which the ranks compute like one model."""
