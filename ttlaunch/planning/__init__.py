"""Decide everything before anything starts: roles, slots, environments, the engine's command line and files.

Pure: the same topology, recipe, configuration and facts give the same `LaunchPlan`, with the same hash.
"""
