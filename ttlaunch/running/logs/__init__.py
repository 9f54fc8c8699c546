"""What ranks and the engine print: kept byte for byte, put in order, folded, shown."""
