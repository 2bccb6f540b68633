"""`python -m deploy`: set up and start a server and its sites."""

from deploy.command import app

app(prog_name="python -m deploy")
