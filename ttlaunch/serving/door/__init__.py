"""The door of a serving run: the process that answers HTTP, and asks the head of the run over the wire.

It is a child of the supervisor and no rank: it outlives the ranks, so that it can say what happened to them, and let open streams go on
after a restart. It needs the libraries of the extra `serve`, and no torch.
"""
