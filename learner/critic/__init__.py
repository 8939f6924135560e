"""The critic of `algorithm.advantage: gae`: a second model beside the policy, which learns what a state is worth."""
