"""The calculator as an environment of `verifiers`, for the API that is there: a function before 0.4, classes since."""

import verifiers

if hasattr(verifiers, "load_environment"):
    from calculator_environment.classic import load_environment

    __all__ = ["load_environment"]
else:
    from calculator_environment.taskset import CalculatorEnv, CalculatorTaskset

    __all__ = ["CalculatorEnv", "CalculatorTaskset"]
