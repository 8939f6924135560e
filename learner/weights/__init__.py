"""The weights wire: how each new policy gets from the learner into running servers. Both ends live here.

    plan.py      which tensor lies where in which bucket: the same on both sides
    snapshot.py  the buckets themselves, on one device, with their checksums
    channel.py   the group that buckets are broadcast over: gloo on CPU, NCCL on GPU
    protocol.py  what the ends say to each other (ZeroMQ)
    sender.py    the learner's end: `publish`, which puts an edition on the two places of shelf.py
    rounds.py    its background thread, which brings editions to the servers (members.py, group.py)
    receiver.py  the server's end: `policies`, over the connection of link.py
    staging.py   the part of it inside a vLLM worker

Imports neither vllm nor buffer.
"""
