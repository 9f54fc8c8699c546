"""How a recipe declares itself, and the training files that configure it; what a `recipe.py` imports is `ttlaunch.recipe`."""
