"""`python -m actors.doctor.price [--gpu NAME]`: estimates what a run takes on a card, before anything starts.

The config is on stdin, as `configs.load.dump` writes it. Prints memory by part, settings that `auto` takes, speeds,
time and cost; exit code 2, with what would fit, for a run that does not fit. Without `--gpu` the card is this
machine's; without either it prints how to ask.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from actors.doctor.host import find_gpus
from actors.doctor.trial import Judgement
from configs import variables
from configs.checks import cluster_of
from configs.entrypoint import BAD_INPUT, DONE, quiet_hub, split_flags
from configs.flow.cards import CARDS, MIB, Card, card_of, checked_card
from configs.flow.sequences import mean_tokens
from configs.hub_reach import skip_hub_out_of_reach
from configs.load import ConfigError, parse
from configs.model_facts import facts_of
from configs.plain_text import print_visible, visible_line
from configs.publishing import choice, copies_over, shards_of
from configs.schema import Config

if TYPE_CHECKING:
    from actors.doctor.forecast import Forecast

PROG = "python -m actors.doctor.price"
SETTINGS = ("compile", "activation_checkpointing", "gather", "head_chunk_tokens")
MEASURED = ("H100", "H200")
PRICE, ESTIMATED, GIB = "log.price_per_gpu_hour", "estimated", 1 << 30


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, or 2 for a run that does not fit the card."""
    variables.prepare()
    quiet_hub()
    flags, rest = split_flags(argv, PROG, gpu={})
    if {"-h", "--help"} & {*rest}:
        print_visible((__doc__ or "").strip())
        return DONE
    if rest:
        print_visible(
            f"{PROG}: {rest[0]}: no such word; usage: {PROG} [--gpu NAME], with the config on stdin", sys.stderr
        )
        return BAD_INPUT
    card = checked_card(flags.gpu, PROG)
    config = parse(sys.stdin.buffer.read().decode())
    skip_hub_out_of_reach(config)
    judgement = judge_price(config, card)
    for lines, stream in ((judgement.lines(), sys.stdout), (judgement.refused, sys.stderr)):
        print_visible("\n".join(map(visible_line, lines)), stream, end="\n" * bool(lines))
    return BAD_INPUT if judgement.refused else DONE


def judge_price(config: Config, named: Card | None) -> Judgement:
    """What the run takes on the card `named`, or on that of this machine."""
    judgement = Judgement()
    if config.learner.device == "cpu":
        return judgement
    card = named or this_card()
    if card is None:
        why = "this machine has no GPU to estimate them for; name one that you mean to use"
        judgement.facts.append(f"GPU memory, speed and cost: {why}: --gpu H100 ({', '.join(CARDS)} are known)")
        return judgement
    from actors.doctor import forecast  # imports torch

    try:
        patches = forecast.patches_of(config)
    except ConfigError as error:  # such as a hub name without a network
        judgement.facts.append(f"GPU memory, speed and cost: not known, because of {error.problems[0]}")
        return judgement
    try:
        found = forecast.forecast(config, card, patches)
    except ConfigError as error:
        elsewhere = not named and cluster_of(config)  # its nodes may have other cards
        (judgement.warnings if elsewhere else judgement.refused).extend(error.problems)
        return judgement
    judgement.facts += [*_memory(found), *_speed(found, forecast.mean_answer(config))]
    judgement.warnings += forecast.above_auto(found, patches)
    return judgement


def _memory(found: "Forecast") -> Iterator[str]:
    card, learner, settled = found.card, found.settled.learner, found.settled
    measured = "estimates were from 2 % below to 5 % above the peaks that were measured"
    near = measured if card.name in MEASURED else "no run was measured on this card"
    yield f"on {card.name}: {card.total / GIB:.1f} GiB, of which {card.free / GIB:.1f} can be used; {ESTIMATED}, {near}"
    taken = ", ".join(f"{key} {str(getattr(learner, key)).lower()}" for key in SETTINGS)
    yield f"the learner's settings there, auto decided: {taken}"
    if (shards := shards_of(found.config)) > 1 and (chosen := choice(found.config, shards)):
        yield chosen
    sending = sum(copies_over(found.config, shards, rank) > 0 for rank in range(learner.ranks))
    several = 1 < sending < learner.ranks
    who = f"each of ranks 0 to {sending - 1}" if several else "rank 0" if settled.others else "the learner"
    yield f"memory of {who}: {settled.first.describe()}; microbatches of {settled.first.tokens:,} tokens"
    if settled.others:
        yield f"memory of each other rank: {settled.others.describe()}; of {settled.others.tokens:,} tokens"
    if found.room.sequences is not None:
        holds = f"{found.room.sequences:,} sequences of {mean_tokens(found.config):,.0f} tokens at a time"
        given = f"{found.weights / 1e9:.3g} GB of weights; its KV cache holds {holds}"
        yield f"memory of a server's GPU: {given}; activations and CUDA graphs are not counted"


def _speed(found: "Forecast", answer: float) -> Iterator[str]:
    config, speed, seconds = found.config, found.speed, found.seconds
    if speed is None or seconds is None:
        why = "with learner.cpu_offload" if config.learner.cpu_offload else f"of {found.card.name} with this model"
        why = why if config.model.dtype == "bfloat16" else f"with model.dtype: {config.model.dtype}"
        yield f"speed and cost: not estimated, because no speed {why} is known"
        return
    sampled = f"{speed.sampled:,.0f} sampled tokens, {speed.tokens_per_s:,.0f} a second"
    assumed = f"answers of {answer:,.0f} tokens in the mean are assumed, a quarter of the longest"
    right = (
        "the MFU within 20 % of what was measured, a whole run may be slower"
        if found.card.name in MEASURED
        else "no speed was measured there"
    )
    yield f"a version: {speed.version_s:,.1f} s, {sampled}; {ESTIMATED}, {right}; {assumed}"
    ranks = config.learner.ranks
    trains = f"{f'{ranks} ranks train' if ranks > 1 else '1 rank trains'} a batch in {speed.train_s:,.1f} s"
    needs = f"{speed.servers} server{'s' * (speed.servers > 1)} keep{'s' * (speed.servers == 1)} the learner busy"
    makes = f"a full server makes one in {speed.batch_s:,.1f} s"
    yield f"servers: {trains}, {makes}: {needs}, the run has {_servers(config)}"
    hours = seconds / 3600 * found.gpus
    price = config.log.price_per_gpu_hour
    cost = f"costs {hours * price:,.2f} at {price:g} an hour" if price is not None else f"set {PRICE} for the cost"
    whole = f"{config.run.versions:,} versions take {_duration(seconds)}, the start included"
    yield f"to the end: {whole}, on {found.gpus} GPUs {hours:,.1f} GPU hours; {cost}"
    if facts_of(config.model).tower:
        yield "images: not counted in these speeds; the tower makes a token of an image up to 1.8 times as expensive"


def _servers(config: Config) -> str:
    least, most = config.rollout.least_servers, config.rollout.most_servers
    return f"{least}" if least == most else f"{least} to {most}"


def _duration(seconds: float) -> str:
    """`7384.0` -> `2 h 3 min`"""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


def this_card() -> Card | None:
    """This machine's smallest GPU."""
    sized = [gpu for gpu in find_gpus() if gpu.total_mib]
    gpu = min(sized, key=lambda gpu: gpu.total_mib, default=None)
    if gpu is None:
        return None
    known = card_of(gpu.name, gpu.total_mib * MIB)
    peak, bandwidth = (known.peak, known.bandwidth) if known else (None, None)
    return Card(known.name if known else gpu.name, gpu.total_mib * MIB, peak, bandwidth)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
