"""Pictures of a cluster as text: boxes for meshes, lines for links, ranks and roles on them. The functions return text and print nothing."""
