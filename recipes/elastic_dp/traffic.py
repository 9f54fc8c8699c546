"""How many bytes an asynchronous server and its workers exchange. No torch here: the launcher reads it."""

from ttlaunch.recipe import NUMBER_BYTES, Ranks, Traffic, TrainingFile

_HEADER_BYTES = 64
"""What a gradient says of itself."""


def traffic(_config: TrainingFile, ranks: Ranks) -> list[Traffic]:
    """S for each gradient, or what a codec makes of it, and S for each pull; how many there are, ranks have said."""
    found = []
    for server in ranks.of("server"):
        for worker in ranks.of("worker"):
            pushes, told = ranks.facts[worker].get("pushes", 0), ranks.facts[server]
            answers, pulls = (told.get(f"{what}_to_{worker}", 0) for what in ("answers", "weights"))
            found += [
                Traffic("registration", worker, server, once=NUMBER_BYTES),
                Traffic("pushes", worker, server, once=pushes * (_HEADER_BYTES + told["payload_bytes"])),
                Traffic("answers", server, worker, once=2 * NUMBER_BYTES * answers),
                Traffic("weights", server, worker, once=pulls * ranks.weight_bytes(server)),
            ]
    return found
