"""Everything that imports vLLM. Each place that leans on its internals is in docs/vllm-seams.md."""
