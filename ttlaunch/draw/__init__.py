"""Pictures of a cluster as text: boxes for meshes, lines for links, ranks and roles on them. Pure: text out, nothing printed."""
