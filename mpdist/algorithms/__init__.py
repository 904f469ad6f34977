"""Algorithms: how a collective is carried out, each a program of steps."""
