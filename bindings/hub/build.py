"""Makes a repository of the kernels hub from wheels of fa3: `python3 build.py VERSION OUT WHEEL...`.

A wheel is the package for one CPU architecture. It links neither torch nor CUDA, so it fills every variant of its
architecture: OUT/build/VARIANT has the package and `metadata.json`. VERSION is the hub's, a whole number. The operators
are `torch.ops.ID`, with the ID of `metadata.json`, so that a process can load several versions.
"""

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

# A variant is for a torch of at least this version (2.4), and for a CUDA of the same major version.
VARIANTS = "torch-stable-abi24-{backend}-{architecture}-linux"
HOPPER = {"type": "cuda", "archs": ["9.0a"]}
BACKENDS = {"cu120": HOPPER, "cu130": HOPPER, "cpu": {"type": "cpu"}}
# Where the sources name the operators.
OPERATORS = re.compile(rb'(?<=torch\.ops\.)fa3\b|\bfa3(?=::)|(?<=Library\(")fa3(?=")')


def build(version, out, wheel):
    """Writes the variants of a wheel."""
    digest = hashlib.sha256(Path(wheel).read_bytes()).hexdigest()[:12]
    architecture = re.search(r"_(x86_64|aarch64)\.whl$", str(wheel))[1]
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.startswith("fa3/")}
    for name, backend in BACKENDS.items():
        folder = Path(out, "build", VARIANTS.format(backend=name, architecture=architecture))
        identity = f"_fa3_{name}_{digest}"
        for path, content in files.items():
            if path.endswith((".py", ".pyi")):
                content = OPERATORS.sub(identity.encode(), content)
            file = folder / path.removeprefix("fa3/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        metadata = dict(id=identity, name="fa3", version=version, license="MIT OR Apache-2.0", backend=backend)
        metadata["python-depends"] = []
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    for wheel in sys.argv[3:]:
        build(int(sys.argv[1]), sys.argv[2], wheel)
