"""The output of ranks and of the engine: keep it byte for byte, record its order, fold equal lines, and show it."""
