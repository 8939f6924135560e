"""A module beside a user's file."""

ANSWER = 42
