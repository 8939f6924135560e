"""The critic of `algorithm.advantage: gae`: a second model, which estimates values."""
