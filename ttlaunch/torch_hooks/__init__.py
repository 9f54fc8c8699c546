"""What a rank of a plain script records about its use of torch, so that ttlaunch sees what it sees of a recipe.

`at_import.py` installs the hooks when the script imports torch, and only then; no module here imports torch itself. `collectives.py`
and `data_parallel.py` enter what the rank does in `torch.distributed` into its flight recorder, through `group_records.py`.
A hook that fails leaves the script as it is. Python 3.9 and the standard library only.
"""
