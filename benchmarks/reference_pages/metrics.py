"""What each metric means, by name, for docs/reference/metrics*.md. Pure.

A name may have parts that stand for others: `B` a bucket of ages (`0`, `1`, `2-3` ... `64+`), `SIGN`, `NAME` of a
server, `SET` of `data.eval`, `SOURCE` of rows, `STATE` of an item, `KIND` of a failure or request, `KEY` of a user's
own figure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from configs.flow.alerts import ALERTS

PLACEHOLDERS = {
    "SIGN": "(?:positive|negative)",
    "NAME": r"[^/]+",
    "SET": r"[^/]+",
    "SOURCE": r".+",
    "STATE": r"\w+",
    "KIND": r"\w+",
    "KEY": r".+",
    "K": r"\d+",
    "N": r"\d+",
    "B": r"(?:\d+(?:-\d+|\+)?|undone)",
}
"""Parts of a name that stand for others, and what may be in their place."""
NOTE = "<!-- Written by `python -m benchmarks.reference_pages`; do not edit it. -->"


class Described(NamedTuple):
    """A metric, or several of one kind. Example: `Described("age/max", "versions", "largest age of a group")`"""

    name: str
    unit: str
    meaning: str

    def fits(self, metric: str) -> bool:
        """Whether this describes the metric of that name."""
        parts = re.split(rf"\b({'|'.join(PLACEHOLDERS)})(?![a-z])|(?<=_)(B|SIGN|KIND|STATE)\b", self.name)
        form = "".join(PLACEHOLDERS.get(part, re.escape(part)) for part in parts if part)
        return re.fullmatch(form, metric) is not None


D = Described
METRICS: Mapping[str, Sequence[Described]] = {
    "Does it learn": (
        D("reward/mean", "reward", "mean over the samples of the batch"),
        D("reward/std", "reward", "standard deviation over the samples of the batch"),
        D("groups/solved_all", "share", "groups in which every sample reached a reward of 1"),
        D("groups/solved_none", "share", "groups in which no sample reached a reward of 1"),
        D("groups/flat", "share", "groups without variance in their rewards, of all groups made since the last batch"),
        D("length/mean", "tokens", "sampled tokens of a sample"),
        D("length/max", "tokens", "sampled tokens of the longest sample"),
        D("length/truncated", "share", "samples that were cut at `sampling.max_tokens`"),
        D("entropy/mean", "nat", "entropy of the learner's policy at the sampled tokens"),
        D("turns/mean", "-", "turns of a sample: runs of sampled tokens between given ones"),
        D("turns/max", "-", "turns of the sample that has most"),
        D("segments/mean", "-", "segments of a sample: texts by themselves"),
        D("segments/max", "-", "segments of the sample that has most"),
        D("sample/KEY", "-", "means of the metrics that a reward function or task returns"),
    ),
    "Is it sound": (
        D(
            "mismatch/k1_fresh",
            "nat",
            "E[-x] on tokens of the current policy; x: log-probability of the learner less the server's",
        ),
        D(
            "mismatch/k3_fresh",
            "nat",
            "E[exp(x) - 1 - x] on tokens of the current policy: noise between vLLM and the learner, 6e-4 to 1e-3 in"
            " bfloat16 (second-hand). Only there if the batch has such tokens. Where sequences continue older tokens,"
            " the age of those in the KV cache adds to it, up to 9e-4 in float32",
        ),
        D("mismatch/m2_fresh", "nat²", "E[x²] on tokens of the current policy"),
        D("offpolicy/k1", "nat", "k1 on all tokens: how far the policy has moved"),
        D("offpolicy/k3", "nat", "k3 on all tokens"),
        D("offpolicy/m2", "nat²", "m2 on all tokens"),
        D("offpolicy/k1_age_B", "nat", "k1 by age of the token"),
        D("offpolicy/k3_age_B", "nat", "k3 by age of the token"),
        D("offpolicy/m2_age_B", "nat²", "m2 by age of the token"),
        D(
            "ratio/mean",
            "-",
            "mean of learner's probability / server's; far from 1: the tokens were not sampled from that policy",
        ),
        D("ratio/max", "-", "largest learner's probability / server's"),
        D("ess/token", "share", "effective sample size (Σw)² / (n Σw²) of the untruncated ratios w, by token"),
        D("ess/sequence", "share", "the same, by sample"),
        D("limit/masked_SIGN", "share", "tokens that the loss masks, by the sign of the advantage"),
        D("limit/capped_SIGN", "share", "tokens whose weight the loss caps, by the sign of the advantage"),
        D("age/mean", "versions", "age of the groups: trained version minus dispatch version"),
        D("age/max", "versions", "age of the oldest group; never above `batch.max_staleness`"),
        D("age/token_mean", "versions", "age of the tokens: trained version minus the version that sampled them"),
        D("age/token_max", "versions", "age of the oldest token"),
        D(
            "age/share_B",
            "share",
            "tokens by age. `undone`: tokens that may come from a policy that a rewind undid; they have no age",
        ),
        D("age/versions_per_sample", "versions", "policies that sampled tokens of one sample"),
        D("age/versions_per_sample_max", "versions", "the same, of the sample with most"),
        D("reference/k3", "nat", "k3 against the reference policy (`algorithm.reference_kl`)"),
        D("loss", "-", "the loss: the sum of its terms"),
        D("loss/policy", "-", "term of the policy loss"),
        D("loss/behaviour_kl", "-", "term of `algorithm.behaviour_kl`"),
        D("loss/reference_kl", "-", "term of `algorithm.reference_kl`"),
        D("loss/entropy", "-", "term of `algorithm.entropy_bonus`"),
        D("loss/teacher", "-", "term of `teacher.top_k`"),
        D("teacher/reverse_kl", "nat", "with `teacher`: mean of log mu - log q over the sampled tokens that have one"),
        D("teacher/SOURCE/reverse_kl", "nat", "the same, of the teacher of one `data_source`"),
        D("teacher/divergence", "nat", "with `teacher.top_k`: mean reverse KL over its k tokens and the rest"),
        D("teacher/share", "share", "sampled tokens that have a teacher"),
        D(
            "critic/explained_variance",
            "-",
            "before a critic's step: 1 - variance of errors / variance of returns",
        ),
        D("critic/value", "reward", "its mean value of a sampled token"),
        D("critic/return", "reward", "mean return of a sampled token"),
        D("critic/loss", "reward²", "half its mean squared error"),
        D("critic/clipped", "share", "tokens without gradient by `algorithm.critic.clip`, in its last update"),
        D("critic/gradient_norm", "-", "norm of its last gradient before clipping"),
        D("critic/gradient_skipped", "0 or 1", "its last update was skipped"),
        D("critic/lr", "-", "its learning rate"),
        D("demonstrations/loss", "nat", "with `data.demonstrations`: mean of -log p over their trained tokens"),
        D("demonstrations/rows", "rows", "demonstrations beside the batch's samples"),
        D("demonstrations/tokens_trained", "tokens", "trained tokens of these"),
        D("demonstrations/epoch", "-", "passes over all demonstrations so far"),
        D("gradient/norm", "-", "norm of the gradient before clipping"),
        D("gradient/skipped", "0 or 1", "the gradient was not finite and the step was skipped"),
        D("gradient/overflowed", "0 or 1", "every part of the gradient was finite, its norm was not"),
        D("gradient/zero", "0 or 1", "the gradient was zero, so the batch had no effect"),
        D("lr", "-", "learning rate"),
        D("moe/load_max_over_mean", "-", "tokens of the busiest expert / mean of all; 1 is balance"),
        D("moe/experts_unused", "share", "experts that no token of the batch took"),
        D("moe/router_entropy", "nat", "entropy of the router's choice, per token"),
        D("moe/routes_agree", "share", "with routing replay: choices of the servers that are the learner's too"),
    ),
    "Is it fast": (
        D("tokens", "tokens", "all tokens of the batch, prompts counted for each sample"),
        D("tokens_sampled", "tokens", "sampled tokens of the batch"),
        D("tokens_computed", "tokens", "tokens of all ranks' rows: as `tokens`, with each shared prefix once"),
        D("samples", "samples", "samples of the batch"),
        D("tokens_per_s", "tokens/s", "`tokens` / `time/version_s`"),
        D("microbatches", "-", "microbatches of rank 0"),
        D("tokens_microbatch_max", "tokens", "tokens of its largest microbatch"),
        D("images", "images", "images that the tower encoded"),
        D("patches", "patches", "patches of these images"),
        D("flops", "FLOP", "arithmetic of the step"),
        D("flops_saved", "FLOP", "further arithmetic that the step would take with nothing shared"),
        D("mfu", "share", "of the GPUs' peak, during training"),
        D("mfu/version", "share", "of the GPUs' peak, during the whole version"),
        D("time/version_s", "s", "the whole version"),
        D("time/wait_s", "s", "the learner waits for a batch"),
        D("time/train_s", "s", "the learner trains"),
        D("time/publish_s", "s", "training waits until the weights are copied for the servers"),
        D("time/checkpoint_s", "s", "training waits for a checkpoint"),
        D("time/critic_s", "s", "part of `train_s`: the critic's steps; its judging pass is a part of `pack_s`"),
        D("time/pack_s", "s", "part of `train_s`: packing"),
        D("time/backward_s", "s", "part of `train_s`: both passes; in supervised fine-tuning decoding images too"),
        D(
            "time/update_s",
            "s",
            "part of `train_s`: the optimizer; with a GPU, to queue its update",
        ),
        D("memory/host_gib", "GiB", "peak host memory of rank 0"),
        D("memory/gpu_gib", "GiB", "peak GPU memory of rank 0"),
    ),
    "Do policies reach the servers": (
        D("weights/version", "version", "the last version that reached servers"),
        D("weights/servers", "servers", "servers that it reached"),
        D("weights/members", "servers", "servers on the weights wire"),
        D("weights/failed", "-", "failed rounds so far"),
        D("weights/bytes", "bytes", "size of one policy"),
        D("weights/gather_s", "s", "`publish` called, to all copying queued on rank 0 (on a GPU) or done"),
        D("weights/span_s", "s", "all ranks in the group and the copy complete, to all buckets received"),
        D("weights/gb_per_s", "GB/s", "`bytes` / `span_s`"),
        D("weights/received_s", "s", "`publish` called, to every server having all buckets with the right checksums"),
        D("weights/load_s", "s", "the call to the workers, to its answer; the slowest server's"),
        D("weights/pause_s", "s", "pause of generation: 0 unless weights are streamed; the slowest server's"),
        D("weights/verify_s", "s", "loaded, to probe compared; the slowest server's"),
        D("weights/lag_s", "s", "`publish` called, to loaded"),
        D("weights/round_s", "s", "Offer to Loaded"),
        D(
            "weights/probe",
            "nat",
            "mean absolute difference of the log-probabilities of the probe's first text, server to learner",
        ),
        D("weights/probe_version", "version", "the version of that probe"),
        D("weights/NAME/KEY", "s", "the timings above, of one server"),
    ),
    "Problems and failures": (
        D(
            "buffer/failed",
            "attempts",
            "attempts that failed in the run so far; items that a draining server gives back do not count",
        ),
        D("buffer/failed_share", "share", "failed attempts of all attempts in the run so far"),
        D("buffer/dropped", "items", "items dropped in the run so far, groups of zero variance included"),
        D("buffer/retried", "groups", "groups of the run so far that were not made at the first attempt"),
        D("buffer/quarantined", "groups", "groups of the run so far that could not be trained"),
        D("problems/unseen", "problems", "rows of `data.train` without a group"),
        D("problems/unsolved", "problems", "rows of which no sample was solved"),
        D("problems/between", "problems", "rows of which some samples were solved"),
        D("problems/solved", "problems", "rows of which all samples were solved"),
        D("problems/retired", "problems", "with `data.difficulty`: solved rows that are not drawn for a while"),
        D("problems/left_out", "problems", "rows that failed all their attempts and are not drawn any more"),
        D("problems/left_out_share", "share", "the same, of all rows"),
    ),
    "Evaluations": (
        D("eval/version", "version", "the version that was evaluated"),
        D("eval/due", "version", "the version at which the evaluation was due"),
        D("eval/SET/mean@N", "share", "solved attempts, mean over problems; N attempts at each"),
        D("eval/SET/pass@K", "share", "one of K attempts is solved"),
        D("eval/SET/pass^K", "share", "all of K attempts are solved"),
        D("eval/SET/left_out@K", "problems", "problems with fewer than K scored attempts"),
        D("eval/SET/loss", "nat", "held-out loss of supervised fine-tuning"),
        D("eval/SET/KEY", "-", "`error`, `reward`, `length`, `truncated`, `problems`, `failed`, `version`"),
    ),
    "Supervised fine-tuning": (
        D("tokens_trained", "tokens", "tokens of the batch that are trained"),
        D("epoch", "epochs", "passes over the rows so far"),
        D("rows_dropped", "rows", "rows that were longer than `sft.max_tokens`"),
    ),
    "Servers and buffer": (
        D("servers/running", "sequences", "sequences that all servers ran when the batch was taken"),
        D("servers/places", "sequences", "sequences that all servers had places for then"),
        D("servers/known", "servers", "servers that have said Hello"),
        D("servers/heard", "servers", "servers that sent a heartbeat lately"),
        D("servers/wanted", "servers", "servers that the run asks for"),
        D("servers/oldest_version", "version", "the oldest policy that a server runs"),
        D(
            "servers/KEY",
            "-",
            "sums over the servers that are alive: `waiting`, `tokens_per_s`, `preempted`, `parked` ...; the largest of"
            " `kv_usage`, `stall_s`, `scoring_s`, `teacher_s`, `task_s`",
        ),
        D(
            "server/NAME/KEY",
            "-",
            "figures of a server's last heartbeat, its version, leases and seconds of silence; the first 64",
        ),
        D("buffer/version", "version", "the next batch"),
        D("buffer/trained", "version", "the last trained version"),
        D("buffer/bytes", "bytes", "samples that are not trained yet"),
        D("buffer/refused", "messages", "messages that the buffer refused"),
        D("buffer/items_STATE", "items", "items by state"),
        D("buffer/failed_KIND", "attempts", "failed attempts by kind"),
        D("buffer/dropped_all", "items", "dropped items"),
        D("waiting/KIND_s", "s", "the longest wait of a pending request: `Take` of the learner, `Ask` of servers"),
        D("waiting/KIND", "requests", "pending requests of that kind"),
        D("gpus", "GPUs", "GPUs that the run holds"),
    ),
    "Each record": (
        D("version", "version", "the policy that the step produced"),
        D("time", "s", "when the record was written, in Unix time"),
        D("kind", "-", "`servers`: a look at servers and buffer, without a version"),
    ),
}
"""All metrics, by the question that they answer."""


def described(metric: str) -> Described | None:
    """The description of a metric; None if there is none."""
    found = [one for section in METRICS.values() for one in section if one.fits(metric)]
    exact = [one for one in found if one.name == metric]
    return next(iter(exact or found), None)


PAGES: Mapping[str, tuple[str, Sequence[str]]] = {
    "metrics.md": ("Metrics of a version", ("Does it learn", "Is it sound", "Is it fast", "Each record")),
    "metrics-servers.md": (
        "Metrics of servers, problems and evaluations",
        (
            *("Do policies reach the servers", "Problems and failures", "Servers and buffer"),
            *("Evaluations", "Supervised fine-tuning"),
        ),
    ),
}
"""The pages: title, and sections in order."""


def metrics_pages() -> dict[str, str]:
    """The text of each page, by its file's name. Raises if a section is on no page."""
    shown = [section for _, sections in PAGES.values() for section in sections]
    if missing := METRICS.keys() - set(shown):
        raise ValueError(f"{missing}: name the section in benchmarks/reference_pages/metrics.py")
    return {name: "\n".join(lines(*page)) + "\n" for name, page in PAGES.items()}


def lines(title: str, sections: Sequence[str]) -> Iterator[str]:
    """The lines of a page."""
    others = " and ".join(f"[{other[0].lower()}]({name})" for name, other in PAGES.items() if other[0] != title)
    yield f"# {title}\n\n{NOTE}\n"
    yield (
        "`metrics.jsonl` has one flat JSON object per version. Means over tokens or samples are quotients of sums\n"
        "over the whole batch, whatever the number of ranks. **Bold** ones have an [alert](../metrics.md#alerts),\n"
        "which says what to do. In names, `B` is a bucket of ages (`0`, `1`, `2-3`, `4-7` ... `64+`), `SIGN` is\n"
        "`positive` or `negative`, `NAME` a server, `SET` one of `data.eval`; the meaning says what `STATE`, `KIND`,\n"
        "`KEY`, `K` and `N` stand for.\n"
        f"Another page has {others}."
    )
    alerts = [key for key, *_ in ALERTS]
    for section in sections:
        yield f"\n## {section}\n\n| metric | unit | meaning |\n|---|---|---|"
        for one in METRICS[section]:
            name = f"**`{one.name}`**" if any(map(one.fits, alerts)) else f"`{one.name}`"
            yield f"| {name} | {one.unit} | {one.meaning} |"
