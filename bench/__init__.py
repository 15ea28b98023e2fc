"""Measuring, in one form: results are rows (`bench.common`), contestants run one engine each."""
