"""The worker of a site: inner steps, exchange with the coordinator, launch of local ranks."""
