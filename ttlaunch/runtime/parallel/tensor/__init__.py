"""Matrices split over ranks: which values a rank has, and the two sums that make one model of them."""
