"""Settings of the whole suite: one process, no network, quiet."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# torch's threads wait actively by default: where two workers of the suite share the cores, each
# takes the other's time, and their engines take three times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
