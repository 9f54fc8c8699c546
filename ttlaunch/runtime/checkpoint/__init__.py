"""Checkpoints as ranks see them: each writes the shard it owns while training goes on, and reads what it needs by name.

`image.py` lays a shard out in memory, `writer.py` brings it to the disk, `reader.py` gets it back; `checkpoints.py` is
what a rank's context has of them. Completing a checkpoint, once every shard is there, is the launcher's part: ranks of
several hosts share no folder.
"""
