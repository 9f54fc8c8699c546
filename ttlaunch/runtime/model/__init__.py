"""Models, and their parameters as one flat vector in a precision."""
