"""`loco doctor`: is this machine ready to be a site of that run, and what will a round cost?

`findings` is what a check says, `machine` looks at this machine, `run` at the coordinator and the
run's config, `examine` does all of it in order and prints it.
"""
