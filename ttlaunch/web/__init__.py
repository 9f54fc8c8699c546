"""What every HTTP server of this project needs, whatever it serves: who may ask, how much of it, and how long it may take.

Needs the libraries of the extra `serve` (starlette, uvicorn), except for `addresses.py`.
"""
