"""The weights wire: how each new policy gets from the learner into running servers (docs/design/weights-wire.md).

    plan.py, rows.py       which tensor lies where in which bucket, and which bytes of it each rank sends
    buckets.py, slices.py  one copy of the weights, whole or of what one worker loads, with its checksums
    channel.py             the process group that buckets are broadcast over
    probe.py               the fixed tokens whose log-probabilities both ends must agree on
    protocol.py            the messages between the ends (ZeroMQ)
    sender/                the learner's end: `publish.py` takes a copy, `distributor.py` brings it to the servers
    receiver/              a server's end: `follow.py` in its front process, `staging.py` in each vLLM worker

Imports neither vLLM nor the rest of the learner.
"""
