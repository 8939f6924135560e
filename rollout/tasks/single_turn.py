"""The default task: one answer to the prompt. Run by `rollout/episodes/episode.py`, once for each sample."""

from rollout.tasks.trajectory import Generate, Problem, Trajectory


async def single_turn(problem: Problem, generate: Generate) -> Trajectory:
    """Sample once."""
    trajectory = Trajectory(problem.prompt)
    trajectory.take(await generate(trajectory.tokens))
    return trajectory
