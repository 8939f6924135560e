"""The calculator of tests/harness/calculator.py as a task set of `verifiers.v1`."""

import verifiers.v1 as vf

__all__ = ["CalculatorEnv", "CalculatorTasks"]
ROWS = [("17*23=", "391"), ("6*7=", "42"), ("2+2=", "4")]


class CalculatorData(vf.TaskData):
    """A problem; `how`: what goes wrong with it."""

    answer: str
    how: str = ""


class CalculatorTask(vf.Task[CalculatorData]):
    """Right or wrong."""

    @vf.reward
    async def right(self, trace) -> float:
        if self.data.how == "unscored":
            raise ValueError("the judge does not answer")
        return float(trace.last_reply == self.data.answer)


class CalculatorConfig(vf.TasksetConfig):
    """`how` of every problem."""

    how: str = ""


class CalculatorTasks(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """Three problems."""

    def load(self):
        for prompt, answer in ROWS:
            data = CalculatorData(prompt=prompt, answer=answer, how=self.config.how)
            yield CalculatorTask(data, self.config.task)


class CalculatorEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Answers what begins with a question mark."""

    async def run(self, task, agents):
        print("an environment may print")
        empty = CalculatorTask(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.agent.interaction(empty) as talk:
            reply = await talk.turn(task.data.prompt)
            if task.data.how == "fail":
                raise RuntimeError("the sandbox is gone")
            if reply.last_reply.startswith("?"):
                await talk.turn(str(eval(reply.last_reply[1:])))
