"""The one door to other machines: a `Transport` runs commands on one host, over SSH, on this machine, or in memory."""
