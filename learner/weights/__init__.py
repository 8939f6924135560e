"""The weights wire: how each new policy gets from the learner into running servers (docs/design/weights-wire.md).

    plan.py, rows.py       which tensor lies where in which bucket, and what of it each rank sends
    buckets.py, slices.py  a copy of the weights, whole or of what one worker loads
    channel.py             the process group of a broadcast
    probe.py, prober.py    the fixed texts that both ends compare, and how far they may be off
    protocol.py            the messages between the ends
    sender/                the learner's end
    receiver/              a server's end: `follow.py` in its front process, `staging.py` in each vLLM worker

Imports neither vLLM nor the rest of the learner.
"""
