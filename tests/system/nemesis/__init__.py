"""Runs that meet every kind of fault, and a checker that judges their history (`__main__.py`)."""
