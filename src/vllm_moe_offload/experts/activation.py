"""The activation between an expert's two products."""

from __future__ import annotations

import enum


class Activation(enum.Enum):
    """What becomes of the first product.

    Gated: ``f(gate) * up``, where w13 holds all gate rows, then all up rows (SWIGLUOAI: gate and
    up rows in turns). Not gated (``_no_mul``): ``f(w13 @ x)``, and w13 has I rows.
    The values are vLLM's own names, so that a configuration reads the same on both sides.

    SWIGLUOAI and SWIGLUOAI_UNINTERLEAVE are gpt-oss's: ``(up + beta) * gate * sigmoid(alpha *
    gate)``, gate at most `limit`, up within plus and minus it.
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def gated(self) -> bool:
        """Whether w13 has up rows besides the gate rows."""
        return not self.value.endswith("_no_mul")

    @property
    def interleaved(self) -> bool:
        """Whether gate and up rows are in turns."""
        return self is Activation.SWIGLUOAI

    @property
    def parts(self) -> int:
        """Rows of w13 for each row of the intermediate dimension."""
        return 2 if self.gated else 1

    @classmethod
    def parse(cls, name: str) -> Activation:
        """The member called `name`; raises ValueError that lists what exists."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(sorted(member.value for member in cls))
            raise ValueError(
                f"activation {name!r} is not one the expert engine computes (it has: {known})"
            ) from None
