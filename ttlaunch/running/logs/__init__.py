"""The output of ranks and of the engine: kept byte for byte, put in order, folded, shown."""
