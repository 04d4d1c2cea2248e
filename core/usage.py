"""What a generation used, in parts that do not overlap."""

import msgspec


class TokenUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token counts, disjoint: every token is in exactly one part."""

    input_uncached: int = 0
    input_cached: int = 0
    input_cache_write: int = 0
    output: int = 0  # visible output, without reasoning
    reasoning: int = 0

    @property
    def input_total(self) -> int:
        return self.input_uncached + self.input_cached + self.input_cache_write

    @property
    def output_total(self) -> int:
        return self.output + self.reasoning


NO_USAGE = TokenUsage()
