"""`python -m ttlaunch.runtime`: one rank of a run; its shim has set the environment that says which."""

from ttlaunch.runtime.entry import main

if __name__ == "__main__":
    main()
