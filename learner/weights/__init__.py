"""The weights wire: how each new policy gets from the learner into running servers. Both ends live here.

    plan.py       which tensor lies where in which bucket: the same at both ends
    buckets.py    one copy of the weights on one device, with its checksums
    channel.py    the process group that buckets are broadcast over: gloo on CPU, NCCL on GPU
    probe.py      the fixed tokens whose log-probabilities both ends must agree on
    protocol.py   the messages between the ends (ZeroMQ)
    sender/       the learner's end: `publish.py` takes a copy, `distributor.py` brings it to the servers
    receiver/     a server's end: `follow.py` in its front process, `staging.py` in each vLLM worker

Imports neither vLLM nor the rest of the learner.
"""
