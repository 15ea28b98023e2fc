"""The compiled engine. Addresses are those of CPU tensors, checked by `plan.py`."""

def isas_available() -> list[str]: ...
def physical_cores() -> list[tuple[int, int]]: ...

class Engine:
    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def phase_seconds(self) -> tuple[float, float, float, float]: ...
    def read_seconds(self, memory: int, bytes: int) -> float: ...
    def tile_multiply_adds(self, count: int) -> float: ...

class Matrix:
    def __init__(
        self,
        *,
        weight: int,
        rows: int,
        row_bytes: int,
        parts: int,
        bias: int,
        scale: int,
        scale_expert_bytes: int,
        scale_row_bytes: int,
        scale_block_rows: int,
        scale_part_rows: int,
        scale_shift: int,
        zero: int,
        global_scale: int,
    ) -> None: ...

class Plan:
    def __init__(
        self,
        *,
        engine: Engine,
        w13: Matrix,
        w2: Matrix,
        experts: int,
        hidden: int,
        intermediate: int,
        format: int,
        dtype: int,
        activation: int,
        gated: bool,
        interleaved: bool,
        alpha: float,
        beta: float,
        limit: float,
        router_weight_on_input: bool,
        max_tokens: int,
        top_k: int,
    ) -> None: ...
    def run(self, call: Call) -> None: ...
    def start(self, call: Call, done: int, used: object) -> Running: ...

class Call:
    def __init__(
        self,
        plan: Plan,
        x: int,
        ids: int,
        weights: int,
        tokens: int,
        top_k: int,
        map: int,
        map_size: int,
        out: int,
        out_bf16: bool,
        accumulate: bool,
        inner_begin: int,
        inner_end: int,
    ) -> None: ...

class Running:
    def wait(self, timeout: float) -> float | None: ...
    def abandon(self) -> None: ...

MOST_PLAN_TOKENS: int
MOST_TOP_K: int
BOARD_ALIGN: int
ASKED: int
DONE: int
FAILED: int

def board_bytes(mailboxes: int) -> int: ...
def doorbell_offsets(mailboxes: int, index: int) -> dict[str, int]: ...

class Doorbell:
    def __init__(
        self, *, engine: Engine, board: int, mailboxes: int, timeout: float, idle: float
    ) -> None: ...
    def add(
        self,
        *,
        layer: str,
        plan: Plan,
        x: int,
        ids: int,
        weights: int,
        top_k: int,
        map: int,
        map_size: int,
        out: int,
        max_tokens: int,
    ) -> int: ...
    def start(self) -> None: ...
    def wake(self) -> None: ...
    def stop(self) -> bool: ...
    @property
    def error(self) -> str: ...
    @property
    def stats(self) -> list[tuple[int, int, int]]: ...
