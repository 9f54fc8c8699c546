"""`ttlaunch dashboard`: runs in a browser, read from their folders only, so that it costs a run nothing and works on a copy.

The page shows what `report`, `metrics`, `logs` and `diff` show, made by the same functions. Needs starlette and uvicorn (the extra
`dashboard`), except for the modules that read.
"""
