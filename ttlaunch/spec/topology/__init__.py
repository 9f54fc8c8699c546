"""What a cluster is: hosts with slots, meshes with links, which rank drives which mesh, and how to reach it all.

`load.load_topology` reads the files of a configuration folder and returns a `model.Topology`, proven consistent, or
the diagnostics that say what is wrong with them. Pure: the environment is handed in, nothing is started.
"""
