"""Names of environment variables that the vendor's runtime and Python read, to tell a misspelled one from one's own."""

KNOWN_VARIABLES = frozenset(
    {
        "ARCH_NAME",
        "LD_LIBRARY_PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "TT_MESH_GRAPH_DESC_PATH",
        "TT_MESH_HOST_RANK",
        "TT_MESH_ID",
        "TT_METAL_CACHE",
        "TT_METAL_CLUSTER_ID",
        "TT_METAL_FACTORY_SYSTEM_DESCRIPTOR_PATH",
        "TT_METAL_HOME",
        "TT_METAL_MOCK_CLUSTER_DESC_PATH",
        "TT_METAL_RUNTIME_ROOT",
        "TT_RUN_ORIGINAL_CWD",
        "TT_RUN_RANK",
        "TT_RUN_SUBCONTEXT_ID",
        "TT_RUN_SUBCONTEXT_SIZES",
        "TT_VISIBLE_DEVICES",
        "VIRTUAL_ENV",
        "WH_ARCH_YAML",
    }
)


def misspelled(name: str) -> str | None:
    """The known variable that a name is one slip away from: a letter changed, missing, added, or two swapped."""
    if name in KNOWN_VARIABLES:
        return None
    return next((known for known in sorted(KNOWN_VARIABLES) if _one_slip(name.upper(), known)), None)


def _one_slip(name: str, known: str) -> bool:
    start = next((at for at, (a, b) in enumerate(zip(name, known, strict=False)) if a != b), min(len(name), len(known)))
    a, b = name[start:], known[start:]
    return a[1:] == b[1:] or a == b[1:] or a[1:] == b or (a[:2] == b[:2][::-1] and a[2:] == b[2:])
