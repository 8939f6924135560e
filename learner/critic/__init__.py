"""The critic of `algorithm.advantage: gae`: a second model, of values."""
