"""Configurations of recipes whose workers drift apart that cannot train; the transcripts are in `tests/golden/refusals/`."""


def test_bounded_staleness_over_fabric_sockets_is_refused(refused):
    text = "multihost_config:\n  socket_type: fabric\nclassic_dp_config:\n  staleness_bound: 4\n"
    refused("run classic_dp -c train.yaml", files={"train.yaml": text}, status=3)
