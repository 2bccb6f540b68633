"""`python -m simulations`: run an experiment and report on it."""

from simulations.command import app

app(prog_name="python -m simulations")
