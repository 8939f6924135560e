"""The certificate: a small copy of a model is trained and pushed in every way that a run does, and compared.

`process.py` is called by `learner/__main__.py` at each start and by `python -m actors certify`. It forks processes
(`certifier.py`, `ranks.py`) that compare, in float32 on the CPU: packed rows and their gradients with transformers' own
forward pass (`rows.py`, `numbers.py`), two ranks with one, weights as servers get them, and an export (`copies.py`).
"""
