"""Which request a connection may make: the role that its key has (`buffer/curve.py`), and a table of verbs by role.

`refusal` is asked for each message before anything else is done with it. docs/design/samples-wire.md shows `table`.
"""

from buffer.wire import protocol
from buffer.wire.message import Message

VERBS: dict[str, tuple[str, ...]] = {
    "rollout": ("Hello", "Status", "Where", "Ask", "Put", "Fail", "Heartbeat", "Evaluate", "Evaluated", "Goodbye"),
    "learner": ("Hello", "Status", "Rewind", "Take", "Trained", "Quarantine", "Trial", "Results"),
    "launcher": ("Hello", "Status", "Scale", "Kept"),
    "observer": ("Hello", "Status"),
}
"""By role of the key. A process may also say Hello as an observer, and then only asks what an observer may ask."""
OWNER = {"rollout": "rollout servers", "learner": "the learner", "launcher": "the launcher and `actors scale`"}


def refusal(role: str, said: str | None, message: Message) -> str | None:
    """Why a connection with the key of `role`, whose Hello `said` its role, may not send `message`; None: it may."""
    verb = type(message).__name__
    if role not in VERBS:
        return "the key of this connection is of no role that may ask anything"
    if isinstance(message, protocol.Hello):
        if message.role not in (role, "observer"):
            wanted = f"says Hello as {message.role} with the key of {role}"
            return f"{message.name} {wanted}: give it the files {message.role}.* of <run>/keys"
        if message.serves is not None and message.role != "learner":
            return f"{message.name} names a weights wire, which only the learner serves"
    elif verb not in VERBS[role] or (said is not None and verb not in VERBS[said]):
        allowed = " and ".join(OWNER[one] for one, verbs in VERBS.items() if verb in verbs)
        return f"{verb} is a request of {allowed}, and this connection is of {said or role}"
    return None


def table() -> list[str]:
    """The lines of the table in docs/design/samples-wire.md."""
    verbs = dict.fromkeys(verb for verbs in VERBS.values() for verb in verbs)
    rows = [[f" `{verb}` ", *(" yes " if verb in allowed else " " for allowed in VERBS.values())] for verb in verbs]
    head = [" request ", *(f" `{role}` " for role in VERBS)]
    return [f"|{'|'.join(row)}|" for row in (head, ["---"] * len(head), *rows)]
