# What tools see of `ttlaunch.runtime`: the names of `ttlaunch.train`, with their types.
from ttlaunch.train import *  # noqa: F403  the list is there
