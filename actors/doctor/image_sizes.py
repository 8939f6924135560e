"""Judges the images of a run's data: their sizes in pixels and tokens, and whether the servers' encoder takes them."""

from typing import TYPE_CHECKING

from actors.doctor.trial import Judgement
from buffer.data.images import ImageError, counted
from configs.data.sources import source_name
from configs.load import ConfigError
from configs.model_facts import facts_of
from configs.schema import Config

if TYPE_CHECKING:
    from buffer.problems import Problems


def judge_images(judgement: Judgement, config: Config, problems: "Problems", key: str) -> None:
    """Raises ConfigError if the run cannot start with these images."""
    from buffer.problems import check_images  # slow

    form = check_images(config, problems, key)
    if form is None or problems.images is None:
        if key == "train" and facts_of(config.model).image_token is not None:
            problem = f"no row of data.train has one, and {config.model.path} is trained with them"
            judgement.facts.append(f"images: {problem}; model.text_alone: true saves the tower's memory and time")
        return
    where, broken = f"data.{key}: {source_name(config.data.sources()[key])}", list(problems.images.broken)
    shown: list[tuple[int, int, str]] = []  # pixels, tokens, in words
    for height, width in problems.images.sizes:
        try:
            tokens = form.num_tokens(height, width)
        except ImageError as error:
            broken.append(str(error))
        else:
            shown.append((height * width, tokens, f"{width:,} x {height:,} ({tokens:,} tokens)"))
    looked_at = f"{counted(len(shown) + len(broken), 'image')} looked at"
    if not shown:
        raise ConfigError([f"{where}: none of the {looked_at} can be shown to the model, such as {broken[0]}"])
    if broken:
        share = f"{len(broken):,} of {looked_at} cannot be shown, their rows are dropped"
        judgement.warnings.append(f"{where}: {share}, such as {broken[0]}")
    shown.sort()
    smallest, median, largest = (shown[place][2] for place in (0, len(shown) // 2, -1))
    rows = f"{len(problems.images.num_bytes()):,} of {counted(len(problems), 'row')} have some"
    judgement.facts.append(f"images of data.{key}: {rows}; smallest {smallest}, median {median}, largest {largest}")
    longest, budget = max(tokens for _, tokens, _ in shown), config.rollout.engine.get("max_num_batched_tokens")
    if isinstance(budget, int) and budget < longest:
        problem = f"rollout.engine.max_num_batched_tokens: {budget} is less than the {longest:,} tokens of an image"
        raise ConfigError([f"{problem} in data.{key}; set it to {longest} or more, or lower data.max_pixels"])
