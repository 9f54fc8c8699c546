"""Fault injection: draw faults, inject them, judge the result, and look for leftovers."""
