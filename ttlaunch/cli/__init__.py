"""The command line: one file per command, and the only place that prints, colours or exits.

Commands import what they need inside their functions, so that `ttlaunch --help` and `ttlaunch validate` start fast.
"""
