"""The critic of `algorithm.advantage: gae`: a second model beside the policy, which learns what a state is worth.

`critic.py` gives each token of a batch its advantage and then takes the critic's own optimizer steps. Built by
`learner/__main__.py`, called by `learner/train/step.py`, saved by `learner/checkpoint.py`; never published.
"""
