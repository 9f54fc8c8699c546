"""Parse and check what users write, and keep the position of every value; no code here touches a machine."""
