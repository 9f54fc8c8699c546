"""What a cluster is: hosts with slots, meshes with links, which rank drives which mesh, and how to reach it all.

`load.load_topology` reads the files of a configuration folder and returns a `model.Topology`, whose parts
are consistent, or the diagnostics of the mistakes. It gets the environment as an argument and starts nothing.
"""
