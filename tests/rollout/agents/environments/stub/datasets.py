"""Stub of the package `datasets`; `calculator_classic.py` uses one function of it."""


class Dataset(list):
    """Rows."""

    @classmethod
    def from_list(cls, rows):
        return cls(rows)
