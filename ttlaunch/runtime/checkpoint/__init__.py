"""Checkpoints as ranks see them: each rank writes the shard that it owns while training continues, and reads what it needs by name.

`image.py` lays a shard out in memory, `writer.py` writes it to the disk, `reader.py` reads it, and `checkpoints.py` is what a
rank's context uses. The launcher completes a checkpoint when all shards are present, because ranks of several hosts share no
folder.
"""
