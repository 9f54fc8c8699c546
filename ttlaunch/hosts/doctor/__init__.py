"""Ask hosts what they have and judge whether a run can start: facts first, then pure rules, then diagnostics.

For `run` and everyone else who needs a part of it:

- `plan.Question`: what every host is asked; `question_for(topology, launcher_python=sys.executable, engine=…)` makes it.
- `probe_hosts.probe_all(transports, question, timeout_s=5.0)` waits for all hosts and gives `Answers(facts, errors)`, both by
  host name.
- `facts.HostFacts` of a host: `.python.executable` and `.mpi.prefix` are what its ranks run with, `.home`, `.machine`
  (equal for two names of one machine), `.clock`, `.rdma`, `.interfaces`, …
- `troubles.explain_troubles(errors, topology=…, answered=…)` turns `HostError`s into diagnostics that point into the hostfile.
- `checks.check_everything(facts, topology=…, engine=…, launcher=HostFacts | None, packages=…)`: errors keep a run from
  working, warnings and notes do not.
- `network.choose_network(facts, wanted=cluster.network, connections={host: transport.addresses})` gives a
  `NetworkChoice` (`.ranks` and `.control` as CIDR for the engine, `.addresses` by host, `.has_rdma`, `.why`) or a `Diagnostic`.
- `pairs.measure_pairs(transports, choice.addresses, ...)` lets every host connect to every other; `pairs.check_pairs(...)` judges it.

Command line: `ttlaunch.app.reach.reach_hosts(topology, form=…, verbose=…)` gives connected transports or leaves with status 4.
"""
