"""Faults made on purpose: drawn, injected, judged, and what they left behind."""
