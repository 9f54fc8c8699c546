"""The folders of runs: any process can make, find, list and remove them, and read and write their files."""
