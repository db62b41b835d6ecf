"""Fakes that the tests share: an engine with provenance KV, a scripted front, the simulation."""
