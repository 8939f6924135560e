"""The weights wire: how each new policy gets from the learner into running servers (docs/design/weights-wire.md).

`sender/` is the learner's end, `receiver/` a server's: `follow.py` in its front process, `staging.py` in each vLLM
worker. Imports neither vLLM nor the rest of the learner.
"""
