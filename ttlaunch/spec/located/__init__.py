"""Read text into values that know their places, for all files that users write: topology, cluster and training files.

`read_source` turns bytes into a `Source`, `parse_yaml` a YAML text into a tree of nodes with a span each, and
`check_schema` that tree into a pydantic model or into one diagnostic per mistake. None of them raises for a
mistake in a file; each returns what it could read together with the diagnostics.

Import from the modules: reading a hostfile needs neither PyYAML nor pydantic, whose imports cost 0.2 s.
"""
