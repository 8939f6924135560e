"""A worker of vLLM that refuses and tries no mixture of experts: for tests that find out which ones are loaded right.

A worker extension for `worker_extension_cls`: `tests.harness.tried_worker.TriedWorker`.
"""

from rollout.engine.worker import WorkerExtension


class TriedWorker(WorkerExtension):
    """Loads policies by the code of every server."""

    def rl_refusal(self) -> str:
        return ""

    def rl_trial_kinds(self) -> list[str]:
        return []

    def rl_kinds(self) -> list[str]:
        """Kinds of weights that a trial would change."""
        return self.rl_trial_weights.kinds()

    def rl_way(self) -> str:
        """How policies are loaded: `in place`, or by vLLM's `reload`."""
        return "in place" if getattr(self.rl_model, "plainly", True) else "reload"


class UnlistedWorker(WorkerExtension):
    """Tries every mixture of experts, whatever was seen of it."""

    def rl_refusal(self) -> str:
        return ""

    def rl_trial_kinds(self) -> list[str]:
        return self.rl_trial_weights.kinds()
