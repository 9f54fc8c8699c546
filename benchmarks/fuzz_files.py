"""What users and strangers write, for `fuzz.py`: checkpoints, models of other libraries, training files, mesh graphs."""

import contextlib
import json
import math
import shutil
import tempfile
from pathlib import Path

from fuzz_cases import Sample, Target

from ttlaunch import contract
from ttlaunch.app.import_weights import find_pretrained
from ttlaunch.diagnostics import LaunchError, Source, render
from ttlaunch.running.checkpoints.complete import manifest_digest
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.checkpoints.tensor_difference import read_weights
from ttlaunch.running.checkpoints.tensor_file import TensorFileError
from ttlaunch.running.pretrained.gpt2 import gpt2_shapes, parse_gpt2_config
from ttlaunch.running.pretrained.read_folder import CONFIG, INDEX
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
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 3,
    "n_positions": 2,
    "n_embd": 2,
    "n_layer": 1,
    "n_head": 1,
    "activation_function": "gelu",
    "tie_word_embeddings": True,
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


def pretrained() -> Target:
    """Configurations, indexes and headers of folders that transformers saved; each is a model in which every tensor fits, or refused."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-pretrained-"))
    names = {name: list(shape) for name, shape in gpt2_shapes(parse_gpt2_config(GPT2)).items()}
    header, place = {}, 0
    for name, shape in names.items():
        end = place + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}
        place = end
    shard, config = json.dumps(header).encode(), json.dumps(GPT2).encode()
    index = json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}).encode()

    def read(*, config: bytes = config, index: bytes = index, shard: bytes = shard) -> None:
        (folder / CONFIG).write_bytes(config)
        (folder / INDEX).write_bytes(index)
        (folder / "a.safetensors").write_bytes(len(shard).to_bytes(8, "little") + shard + bytes(place))
        model = find_pretrained(str(folder))
        for tensor in model.weights.values():
            repr((tensor.shape, tensor.dtype))

    read()  # as it is, it is a model; otherwise every case would be refused for one reason
    samples = [
        Sample(config, lambda content: read(config=content)),
        Sample(index, lambda content: read(index=content)),
        Sample(shard, lambda content: read(shard=content)),
    ]
    return Target(samples, (LaunchError,), close=lambda: shutil.rmtree(folder))


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
