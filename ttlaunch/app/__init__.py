"""The use cases: resolve a request, make hosts ready, execute a plan, restart a run. They return or raise LaunchError."""
