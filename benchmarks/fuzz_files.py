"""What users and strangers write, for `fuzz.py`: manifests and tensor headers of checkpoints, training files, mesh graphs."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

from fuzz_cases import Sample, Target

from ttlaunch import contract
from ttlaunch.diagnostics import Source, render
from ttlaunch.running.checkpoints.complete import manifest_digest
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.checkpoints.tensor_difference import read_weights
from ttlaunch.running.checkpoints.tensor_file import TensorFileError
from ttlaunch.spec.located.codes import CONFIGURATION, TOPOLOGY
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.located.source import source_from_bytes
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.topology.mgd_textproto import parse_mesh_graph_textproto

HEADER = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b@0:2/4,0:1/1": {"dtype": "U8", "shape": [2, 1], "data_offsets": [16, 18]},
    "__metadata__": {"format": "pt"},
}
MANIFEST = {
    "run": "2026-08-23T10-14-07-3fa1",
    "step": 10,
    "format": contract.CHECKPOINT_FORMAT,
    "plan": "h",
    "recipe": "r",
    "layout": "l",
    "world_size": 1,
    "config": {"training_config": {"steps": 20}},
    "text_sha256": None,
    "began_from": None,
    "state": {"data": {"epoch": 0}, "early_stop": {"best": 1.5, "misses": 0, "step": 5}},
    "files": {"rank-0.safetensors": {"size": 0, "sha256": "0" * 64, "tensors": ["a"]}},
}
LARGEST_SIGNED = 1_000_000
YAML = b"""training_config: {steps: 20, seed: 1, learning_rate: 3e-4}
transformer_config:
  embedding_dim: 32
  names: &n [a, 'b', "c"]
data_config: {source: text, also: *n}
"""
TEXTPROTO = b"""mesh_descriptors { name: "m0" arch: WORMHOLE_B0 device_topology { dims: [ 1, 2 ] } channels { count: 2 } }
top_level_instance { mesh { mesh_descriptor: "m0" mesh_id: 0 } }
"""


def checkpoints() -> Target:
    """Manifests, whose digest is right, and headers of shards; whole checkpoints are verified and their weights listed."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-checkpoints-"))

    def read_manifest(content: bytes) -> None:
        # What is no manifest, or so large that only this would take memory, is written as it is.
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            if len(content) <= LARGEST_SIGNED:
                manifest = json.loads(content)
                content = json.dumps({**manifest, "sha256": manifest_digest(manifest)}).encode()
        (folder / contract.CHECKPOINT_MANIFEST).write_bytes(content)
        repr(verify(folder))

    def read_shard(content: bytes) -> None:
        (folder / contract.shard_file(0)).write_bytes(len(content).to_bytes(8, "little") + content + bytes(18))
        for tensor in read_weights(folder).values():
            tensor.extents()

    samples = [Sample(json.dumps(MANIFEST).encode(), read_manifest), Sample(json.dumps(HEADER).encode(), read_shard)]
    return Target(samples, (TensorFileError,), close=lambda: shutil.rmtree(folder))


def yaml() -> Target:
    """Training files: parsed, checked against their schema, and every mistake drawn."""

    def read(content: bytes) -> None:
        source, found = source_from_bytes(content, codes=CONFIGURATION, what="a training file", name="train.yaml")
        if source is not None:
            node, more = parse_yaml(source, codes=CONFIGURATION)
            found += more
            if node is not None:
                found += check_schema(TrainingFile, node, codes=CONFIGURATION)[1]
        render(found)

    return Target([Sample(YAML, read)])


def textproto() -> Target:
    """Mesh graph descriptors of the vendor: parsed, checked, and every mistake drawn."""

    def read(content: bytes) -> None:
        source, found = source_from_bytes(content, codes=TOPOLOGY, what="a mesh graph", name="mgd.textproto")
        if source is not None:
            found += parse_mesh_graph_textproto(Source("mgd.textproto", source.text))[1]
        render(found)

    return Target([Sample(TEXTPROTO, read)])
