"""Make the Python environment that ranks need on every host, from the same locked packages."""
