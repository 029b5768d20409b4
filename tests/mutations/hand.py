"""Hand-written mutations."""

from tests.mutations.patterns import Hand

MUTATIONS: list[Hand] = []
