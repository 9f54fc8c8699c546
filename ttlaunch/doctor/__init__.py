"""Find out what every host has and whether it is ready: facts from probes on the hosts, rules over the facts."""
