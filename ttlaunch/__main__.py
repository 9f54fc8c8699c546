"""`python -m ttlaunch` is the `ttlaunch` command."""

from ttlaunch.cli.main import main

main()
