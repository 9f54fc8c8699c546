"""Ranks on other hosts: the agent on each host, the link to it, and the relay by which the engine starts its daemons."""
