"""The use cases: resolve what was asked for, make hosts ready, execute a plan, restart a run. They return or raise LaunchError."""
