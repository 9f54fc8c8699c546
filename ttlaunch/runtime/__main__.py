"""`python -m ttlaunch.runtime`: one rank of a run, which the shim names in the environment."""

from ttlaunch.runtime.entry import main

if __name__ == "__main__":
    main()
