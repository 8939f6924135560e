"""The critic of `algorithm.advantage: gae`: a second model that estimates the value of a state."""
