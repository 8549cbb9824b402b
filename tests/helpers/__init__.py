"""Builders that the tests share."""
