"""The weights wire: how each new policy gets from the learner into running servers (docs/design/weights-wire.md).

`sender/` is the learner's end, `receiver/` a server's. Imports neither vLLM nor the rest of the learner.
"""
