"""What waits for what beside the current stream, eagerly and in a graph."""

from __future__ import annotations

import pytest
import torch

from vllm_moe_offload.device.streams import SideStream

LONG = 50_000_000  # of the GPU's cycles

pytestmark = pytest.mark.gpu


class Work:
    """Fetches and what follows them late; what the current stream sees after each join."""

    def __init__(self) -> None:
        self.side = SideStream(torch.device("cuda"))
        self.fetched, self.followed = (torch.zeros(1, device="cuda") for _ in range(2))
        self.after_join, self.after_all = (torch.zeros(2, device="cuda") for _ in range(2))

    def run(self) -> None:
        self.fetched.zero_()
        self.followed.zero_()
        for _ in range(2):  # as a step of two waves
            with self.side.fork():
                torch.cuda._sleep(LONG // 5)
                self.fetched.add_(1)
        with self.side.follow():
            torch.cuda._sleep(LONG)
            self.followed.add_(1)
        self.side.join()
        torch.cat((self.fetched, self.followed), out=self.after_join)
        self.side.join_followed()
        torch.cat((self.fetched, self.followed), out=self.after_all)

    def check(self) -> None:
        torch.cuda.synchronize()
        assert self.after_join.tolist() == [2, 0], "join waits for the forks and for no more"
        assert self.after_all.tolist() == [2, 1]


def test_what_follows_is_waited_for_by_itself() -> None:
    work = Work()
    work.run()  # loads the kernels, which waits for what runs
    torch.cuda.synchronize()
    for _ in range(3):
        work.run()
        work.check()


def test_what_follows_is_waited_for_by_itself_in_a_graph() -> None:
    work = Work()
    work.run()  # loads the kernels, which capturing does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # as two layers
            work.run()
    for _ in range(3):
        graph.replay()
        work.check()
