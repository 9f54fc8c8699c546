"""The use cases: resolve what was asked for, make hosts ready, carry a run out, restart it. They return or raise LaunchError."""
