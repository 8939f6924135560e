"""`python -m actors certify MODEL`: proves on this machine that a model is trained and served exactly."""
