"""Servers that may die: their state is at two members, and every gradient reaches both."""
