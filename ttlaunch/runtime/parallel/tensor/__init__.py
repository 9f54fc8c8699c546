"""Matrices split over ranks: which values a rank has, and the two sums that make the ranks compute like one model."""
