"""Files of weights for tests of the command line, which has no torch."""

import json


def tensor_file(tensors):
    """A safetensors file by hand: the format's own words, not ours."""
    header, body = {}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [len(body), len(body) + len(values)]}
        body += bytes(values)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body
