"""docs/your-run.md: its reward judges as it says, and its run file is valid and takes eight GPUs."""

import re
from pathlib import Path

from configs.checks import check
from configs.load import load
from configs.schema import RewardConfig
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer

PAGE = (Path(__file__).parents[2] / "docs/your-run.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_its_reward_takes_the_last_number_of_an_answer(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(blocks("python")[1])
    reward = load_reward(RewardConfig(function=f"{tmp_path}/my_reward.py:score"))
    row = {"problem": "?", "answer": "48 / 2 = 24 clips in May. 48 + 24 = 72 in all. #### 72"}
    texts = ("So 24 + 48 = 72.", "72, no: 24", "172", "none", "It is 72 clips")
    answers = [Answer(text, 9, row) for text in texts]
    assert [score.reward for score in reward.score(answers)] == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_its_run_file_is_valid_and_takes_eight_gpus(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    config = load([str(tmp_path / "run.yaml")])
    check(config, files=())
    assert config.learner.ranks + config.rollout.servers * config.rollout.tensor_parallel == 8
    assert config.reward.function == "my_reward.py:score" and config.data.columns == {"problem": "question"}
