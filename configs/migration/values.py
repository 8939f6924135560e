"""The critic of another system's PPO, as `algorithm.critic`. Their lambda and gamma are over tokens, ours over turns;
at 1 both are the same."""

from typing import NamedTuple

from configs.migration.draft import Draft, Given

GAE = "gae"
SHARED = "= the critic is sharded, packed, clipped and saved with the keys of learner"

UNUSED = "= it is for a critic, which only algorithm.advantage: gae has"


class CriticNames(NamedTuple):
    lr: str
    lr_default: float
    clip: str
    epochs: str
    lam: str
    warmup: str
    model: str


def set_critic(given: Given, draft: Draft, names: CriticNames, updates: int) -> None:
    """`updates`: versions of one of their steps."""
    draft.set("algorithm.advantage", GAE)
    draft.set("algorithm.critic.learning_rate", given.take(names.lr, default=names.lr_default))
    draft.note("PPO with a critic is algorithm.loss: ppo with algorithm.advantage: gae, see docs/critic.md")
    clip, epochs = given.take(names.clip), int(given.take(names.epochs, default=1))
    if epochs > 1:
        draft.set("algorithm.critic.updates", epochs)
        draft.set("algorithm.critic.clip", clip)
    elif clip is not None:
        draft.note(f"{names.clip} {clip}: a version is one step of the critic, before which no value has moved")
    if (lam := given.take(names.lam, default=1)) != 1:
        draft.lacks(names.lam, lam, "algorithm.critic.gae_lambda is over turns, not over tokens; 1 is taken")
    if (warmup := given.take(names.warmup, default=0)) > 0:
        draft.set("algorithm.critic.warmup_versions", int(warmup) * updates)
    path, own = given.take(names.model), draft.tree.get("model", {}).get("path")
    if path not in (None, own):
        draft.lacks(names.model, path, "the critic begins as a copy of model.path, with a value head of zeros")
